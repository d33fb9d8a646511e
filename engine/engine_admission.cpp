// How requests come in: checks on the client's thread, samples on the step thread.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"

namespace loupe {
namespace {

absl::Status CheckIds(const char* what, const std::vector<int32_t>& ids, int vocab_size) {
  for (const int32_t id : ids) {
    if (id >= 0 && id < vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(what, " holds token id ", id, "; ids go from 0 to ", vocab_size - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const char* what, float value, float min, float max) {
  if (value >= min && value <= max) return absl::OkStatus();  // NaN is outside
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", value, "; it must lie between ", min, " and ", max));
}

}  // namespace

absl::Status EngineCore::CheckSampling(const SamplingParams& params) const {
  const struct {
    const char* what;
    float value, min, max;
  } ranges[] = {
      {"temperature", params.temperature, 0, 1e6f},         {"top_p", params.top_p, 1e-9f, 1},
      {"min_p", params.min_p, 0, 1},                        {"repetition_penalty", params.repetition_penalty, 1e-3f, 1e3f},
      {"frequency_penalty", params.frequency_penalty, -1e3f, 1e3f}, {"presence_penalty", params.presence_penalty, -1e3f, 1e3f},
  };
  for (const auto& r : ranges) {
    if (absl::Status s = CheckRange(r.what, r.value, r.min, r.max); !s.ok()) return s;
  }
  const struct {
    const char* what;
    int value, min;
  } counts[] = {{"max_tokens", params.max_tokens, -1}, {"min_tokens", params.min_tokens, 0}, {"logprobs", params.logprobs, -1}};
  for (const auto& c : counts) {
    if (c.value < c.min) return absl::InvalidArgumentError(absl::StrCat(c.what, " is ", c.value, "; it must be at least ", c.min));
  }
  if (params.logprobs > vocab_size_) {
    return absl::InvalidArgumentError(absl::StrCat("logprobs asks for ", params.logprobs, " of ", vocab_size_, " tokens"));
  }
  if (absl::Status s = CheckIds("stop_token_ids", params.stop_token_ids, vocab_size_); !s.ok()) return s;
  for (const auto& [id, bias] : params.logit_bias) {
    if (absl::Status s = CheckIds("logit_bias", {id}, vocab_size_); !s.ok()) return s;
    if (absl::Status s = CheckRange("logit_bias", bias, -1e6f, 1e6f); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status EngineCore::Check(const Request& request) const {
  if (request.prompt.empty()) return absl::InvalidArgumentError("the prompt has 0 tokens; it needs at least 1");
  if (absl::Status s = CheckIds("the prompt", request.prompt, vocab_size_); !s.ok()) return s;
  if (request.n < 1 || request.n > kMaxSamples) {
    return absl::InvalidArgumentError(absl::StrCat("n is ", request.n, "; it must lie between 1 and ", kMaxSamples));
  }
  if (absl::Status s = CheckSampling(request.sampling); !s.ok()) return s;
  // A prompt that fills the context leaves no room for a token, unless none is asked for.
  const int64_t room = request.sampling.max_tokens == 0 ? 0 : 1;
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  if (tokens + room > limits_.max_context) {
    return absl::InvalidArgumentError(absl::StrCat(
        "context_length_exceeded: the prompt has ", tokens, " tokens, the context holds ", limits_.max_context,
        room > 0 ? " and one must be left for the answer" : "", "; shorten the prompt (the KV cache has ",
        limits_.kv_device_bytes, " bytes)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ResponseStream>> EngineCore::Submit(Request request) {
  if (absl::Status s = Check(request); !s.ok()) return s;
  auto kv = chooser_->Choose(request);
  if (!kv.ok()) return kv.status();
  const uint64_t number = submitted_.fetch_add(1, std::memory_order_relaxed);
  if (!request.sampling.seed) {
    request.sampling.seed = static_cast<uint64_t>(UniformAt(parts_.seed, number) * 0x1p53);
  }
  if (request.id.empty()) request.id = absl::StrCat("request-", number);
  if (request.arrival == SteadyTime{}) request.arrival = parts_.clock->Now();
  auto stream = std::make_shared<ResponseStream>(request.id, request.n);
  if (absl::Status s = queue_.Push({std::move(request), stream, *std::move(kv)}); !s.ok()) return s;
  // The reader's end: when its last copy goes, nobody waits for the answer any more.
  ResponseStream* raw = stream.get();
  return std::shared_ptr<ResponseStream>(raw, [keep = std::move(stream)](ResponseStream* s) { s->Cancel(); });
}

void EngineCore::AddRequest(Submission submission) {
  auto state = std::make_shared<RequestState>();
  state->request = std::move(submission.request);
  state->stream = std::move(submission.stream);
  const Request& request = state->request;
  state->seed = request.sampling.seed.value_or(0);
  const int room = limits_.max_context - static_cast<int>(request.prompt.size());
  const int asked = request.sampling.max_tokens;
  state->context_bound = asked < 0 || asked > room;
  state->max_tokens = state->context_bound ? room : asked;
  state->unfinished = request.n;
  if (submission.kv.may_be_full) {
    int64_t free = cache_->bytes_free();
    for (const auto* list : {&running_, &waiting_}) {
      for (const SequencePtr& s : *list) free -= NeededBytes(*s);
    }
    const int prompt = static_cast<int>(request.prompt.size());
    KvChooser::Decide(cache_->BytesForTokens(prompt + state->max_tokens), free, prompt, &submission.kv);
  }
  state->kv = std::move(submission.kv);
  SequencePtr first;
  for (int i = 0; i < request.n; ++i) {
    auto sequence = std::make_unique<EngineSequence>(state, i, next_order_++, *parts_.tokenizer, end_ids_);
    if (i == 0) {
      first = std::move(sequence);
    } else {
      state->siblings.push_back(std::move(sequence));
    }
  }
  Enqueue(std::move(first));
}

void EngineCore::Enqueue(SequencePtr sequence) {
  const Rank rank = sequence->rank();
  const auto at = std::find_if(waiting_.begin(), waiting_.end(), [&](const SequencePtr& s) { return rank.Before(s->rank()); });
  waiting_.insert(at, std::move(sequence));
}

}  // namespace loupe
