// Range checks that every way in shares: HTTP and gRPC parse types, this checks values. Pure, any thread.
#pragma once

#include "absl/status/status.h"
#include "engine/request.h"

namespace loupe {

inline constexpr int kMaxSamples = 128;  // n
inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopBytes = 4096;  // of one stop string
inline constexpr int kMaxStopTokenIds = 256;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxLogitBias = 4096;

// INVALID_ARGUMENT whose message is "<field>: <what is wrong, with the number and the range>". Token ids in the prompt
// are checked by the engine, which knows the vocabulary; those of stop_token_ids and logit_bias against `vocab_size`
// here (0: not known, not checked).
absl::Status ValidateRequest(const Request& request, int vocab_size = 0);

}  // namespace loupe
