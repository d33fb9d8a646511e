// What a request may hold: the only definition of these ranges. The engine checks every request by it; HTTP and gRPC ask
// before they encode the prompt, so that a bad value costs nothing. Pure, any thread.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "engine/request.h"

namespace loupe {

inline constexpr int kMaxSamples = 128;  // n
inline constexpr float kMinRepetitionPenalty = 1e-3f, kMaxRepetitionPenalty = 100;
inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopBytes = 4096;  // of one stop string
inline constexpr int kMaxStopTokenIds = 256;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int64_t kMaxPromptLogprobs = 1 << 20;  // of all prompts of one request, for all samples
inline constexpr int kMaxLogitBias = 4096;

// INVALID_ARGUMENT whose message is "<field>: <what is wrong, with the number and the range>". All but the prompt; token
// ids of stop_token_ids and logit_bias are checked against `vocab_size` (0: not known, not checked).
absl::Status ValidateRequest(const Request& request, int vocab_size = 0);
absl::Status ValidatePrompt(const std::vector<int32_t>& prompt, int vocab_size);
// What is sent of prompts' log-probabilities: prompt tokens times (prompt_logprobs + 1) times n, over all `requests`.
absl::Status ValidatePromptLogprobs(std::span<const Request> requests);

}  // namespace loupe
