// What a request is and what comes back: plain structs between the edge and the engine. No strings decide anything in
// here; the edge parses and validates into these.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvcache/policies/options.h"

namespace loupe {

class Grammar;  // engine/grammar/grammar.h

using SteadyTime = std::chrono::steady_clock::time_point;

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;
  int top_k = 0;  // 0: off
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // over prompt and output (Keskar et al., arXiv 1909.05858)
  float frequency_penalty = 0.0f;   // over output, as OpenAI defines both
  float presence_penalty = 0.0f;
  std::optional<uint64_t> seed;  // none: drawn by the engine
  int max_tokens = -1;           // -1: as many as the context holds
  int min_tokens = 0;            // no stop before that many
  bool ignore_eos = false;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool include_stop_str_in_output = false;
  std::vector<std::pair<int32_t, float>> logit_bias;
  int logprobs = -1;  // -1: none; k >= 0: the chosen token's and the k best
  bool end_logprobs = false;  // also those of the token that ends an answer, which is no part of it
  int prompt_logprobs = -1;   // the same of the prompt's tokens, each given those before it
};

struct Request {
  std::string id;  // unique among requests in flight; the edge makes one if the client gave none
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  std::optional<KvOptions> kv;  // none: the operator's default
  std::shared_ptr<Grammar> grammar;  // what the answer may be; null: any text
  int n = 1;         // independent samples; sample i uses seed + i
  int priority = 0;  // higher first; equal priorities by arrival
  std::optional<SteadyTime> deadline;  // over queue, prefill and decode
  SteadyTime arrival{};                // when the edge accepted it
};

enum class FinishReason : uint8_t { kStop, kLength, kToolCalls, kCancelled, kDeadline, kError };

struct TokenAlternative {
  int32_t id = 0;
  float logprob = 0;
  std::string bytes;  // exact bytes of the token, possibly not whole UTF-8
};

struct TokenLogprobs {
  TokenAlternative chosen;
  std::vector<TokenAlternative> top;  // best first
};

// A piece of one sample's output. Text is whole UTF-8 and may lag behind the tokens.
struct Delta {
  int index = 0;  // which of the n samples
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<TokenLogprobs> logprobs;  // of token_ids, if asked for; one more at an end that was asked for
};

// The prompt is in the cache and its log-probabilities were asked for. Once a request, before the first Delta.
struct PromptScored {
  std::vector<TokenLogprobs> tokens;  // of the whole prompt; nothing precedes the first, which has only id and bytes
};

struct KvReport {
  std::string policy;
  std::string reason;  // why auto chose it, or "requested"
  int64_t device_bytes = 0, host_bytes = 0, full_bytes = 0;
  double bytes_ratio = 0, peak_bytes_ratio = 0;  // of prompt_full_bytes
  int64_t prompt_full_bytes = 0;                 // what the prompt costs in the model's own type
  int64_t lists = 0;
  int64_t entries_kept = 0, entries_merged = 0, entries_dropped = 0, entries_on_host = 0;
  double key_bits = 16, value_bits = 16;
  std::vector<std::pair<std::string, int64_t>> entries_by_format;
  int64_t zooms = 0, zoom_tokens = 0, fetched_bytes = 0;
  int64_t read_bytes_per_token = 0, full_read_bytes_per_token = 0;
  int64_t lowered = 0;
  std::optional<double> estimated_error;  // nats
};

struct Usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;
  int cached_tokens = 0;
  KvReport kv;
};

struct Timings {  // seconds, per sample
  double queue = 0, prefill = 0, decode = 0, first_token = 0, total = 0;
};

struct Finished {
  int index = 0;
  FinishReason reason = FinishReason::kStop;
  std::string stop_reason;      // matched stop string or token id, "deadline", "context"; empty: end of sequence
  absl::Status error;           // set for kError
  Usage usage;
  Timings timings;
};

}  // namespace loupe
