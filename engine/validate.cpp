#include "engine/validate.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace loupe {
namespace {

absl::Status Refuse(const char* field, const std::string& value, const std::string& allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": is ", value, ", must be ", allowed));
}

// Written so that NaN fails.
absl::Status CheckRange(const char* field, float value, float low, float high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Refuse(field, absl::StrCat(value), absl::StrCat("from ", low, " to ", high));
}

absl::Status CheckNumbers(const SamplingParams& s) {
  if (auto status = CheckRange("temperature", s.temperature, 0, 2); !status.ok()) return status;
  if (!(s.top_p > 0 && s.top_p <= 1)) return Refuse("top_p", absl::StrCat(s.top_p), "above 0 and at most 1");
  if (s.top_k < 0) return Refuse("top_k", absl::StrCat(s.top_k), "0 (off) or positive");
  if (auto status = CheckRange("min_p", s.min_p, 0, 1); !status.ok()) return status;
  if (auto status = CheckRange("repetition_penalty", s.repetition_penalty, kMinRepetitionPenalty, kMaxRepetitionPenalty);
      !status.ok()) {
    return status;
  }
  if (auto status = CheckRange("frequency_penalty", s.frequency_penalty, -2, 2); !status.ok()) return status;
  if (auto status = CheckRange("presence_penalty", s.presence_penalty, -2, 2); !status.ok()) return status;
  if (s.max_tokens < -1) return Refuse("max_tokens", absl::StrCat(s.max_tokens), "0 or more");
  if (s.min_tokens < 0) return Refuse("min_tokens", absl::StrCat(s.min_tokens), "0 or more");
  if (s.max_tokens >= 0 && s.min_tokens > s.max_tokens) {
    return Refuse("min_tokens", absl::StrCat(s.min_tokens),
                  absl::StrCat("at most max_tokens, which is ", s.max_tokens));
  }
  if (s.logprobs > kMaxLogprobs)
    return Refuse("logprobs", absl::StrCat(s.logprobs), absl::StrCat("at most ", kMaxLogprobs));
  if (s.prompt_logprobs > kMaxLogprobs)
    return Refuse("prompt_logprobs", absl::StrCat(s.prompt_logprobs), absl::StrCat("at most ", kMaxLogprobs));
  return absl::OkStatus();
}

absl::Status CheckToken(const char* field, int32_t id, int vocab_size) {
  if (id >= 0 && (vocab_size == 0 || id < vocab_size)) return absl::OkStatus();
  const std::string allowed = vocab_size == 0 ? "a token id" : absl::StrCat("a token id from 0 to ", vocab_size - 1);
  return Refuse(field, absl::StrCat(id), allowed);
}

absl::Status CheckStops(const SamplingParams& s, int vocab_size) {
  if (s.stop.size() > kMaxStopStrings) {
    return Refuse("stop", absl::StrCat(s.stop.size(), " strings"), absl::StrCat("at most ", kMaxStopStrings));
  }
  for (const std::string& stop : s.stop) {
    if (stop.empty()) return Refuse("stop", "an empty string", "text that can be found");
    if (stop.size() > kMaxStopBytes) {
      return Refuse("stop", absl::StrCat(stop.size(), " bytes"),
                    absl::StrCat("at most ", kMaxStopBytes, " bytes a string"));
    }
  }
  if (s.stop_token_ids.size() > kMaxStopTokenIds) {
    return Refuse("stop_token_ids", absl::StrCat(s.stop_token_ids.size(), " ids"),
                  absl::StrCat("at most ", kMaxStopTokenIds));
  }
  for (const int32_t id : s.stop_token_ids) {
    if (auto status = CheckToken("stop_token_ids", id, vocab_size); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckBias(const SamplingParams& s, int vocab_size) {
  if (s.logit_bias.size() > kMaxLogitBias) {
    return Refuse("logit_bias", absl::StrCat(s.logit_bias.size(), " entries"), absl::StrCat("at most ", kMaxLogitBias));
  }
  for (const auto& [id, bias] : s.logit_bias) {
    if (auto status = CheckToken("logit_bias", id, vocab_size); !status.ok()) return status;
    if (auto status = CheckRange("logit_bias", bias, -100, 100); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const Request& request, int vocab_size) {
  if (request.n < 1 || request.n > kMaxSamples) {
    return Refuse("n", absl::StrCat(request.n), absl::StrCat("from 1 to ", kMaxSamples));
  }
  if (auto status = CheckNumbers(request.sampling); !status.ok()) return status;
  if (auto status = CheckStops(request.sampling, vocab_size); !status.ok()) return status;
  return CheckBias(request.sampling, vocab_size);
}

absl::Status ValidatePrompt(const std::vector<int32_t>& prompt, int vocab_size) {
  if (prompt.empty()) return Refuse("prompt", "0 tokens long", "at least 1");
  for (const int32_t id : prompt) {
    if (auto status = CheckToken("prompt", id, vocab_size); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ValidatePromptLogprobs(std::span<const Request> requests) {
  int64_t tokens = 0, all = 0;
  for (const Request& request : requests) {
    if (request.sampling.prompt_logprobs < 0) continue;
    const auto own = static_cast<int64_t>(request.prompt.size());
    tokens += own;
    all += own * (request.sampling.prompt_logprobs + 1) * request.n;
  }
  if (all <= kMaxPromptLogprobs) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("prompt_logprobs: ", tokens, " prompt tokens make ", all,
                                                 " log-probabilities (those beside each token and all samples counted), at most ",
                                                 kMaxPromptLogprobs, " go into one request; ask for fewer"));
}

}  // namespace loupe
