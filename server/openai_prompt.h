// From a parsed request to token ids: renders the chat template, encodes text. CPU work on the caller's
// thread, bounded: text that cannot fit the context is refused by its length, without encoding it. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "server/openai_request.h"

namespace loupe {

// Text of one request that is encoded, in all: bounds the time that one request holds a thread.
inline constexpr int64_t kMaxTextBytes = 4 << 20;

struct PromptLimits {
  int max_context = 0;          // tokens
  int longest_token_bytes = 0;  // of the vocabulary; 0: not known, everything is encoded
};

// The longest token's bytes, found by looking at all.
int LongestTokenBytes(const Tokenizer& tokenizer);

// INVALID_ARGUMENT if `bytes` of text are more than one request may bring; names `field` and both numbers.
absl::Status CheckTextBytes(const std::string& field, int64_t bytes);

// The conversation as the model wants to read it. INVALID_ARGUMENT: CheckConversation's, or the template refuses it.
absl::StatusOr<std::string> RenderChat(const ApiRequest& request, const ChatTemplate& chat_template);

// The ids of one prompt. Raw text gets the specials that the model wants (BOS) and its special tokens are parsed; a
// rendered conversation brings its own.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const std::string& text, bool add_special, const Tokenizer& tokenizer,
                                                  const PromptLimits& limits);

// All prompts of a request, in order.
absl::StatusOr<std::vector<std::vector<int32_t>>> BuildPrompts(const ApiRequest& request,
                                                               const ChatTemplate& chat_template,
                                                               const Tokenizer& tokenizer, const PromptLimits& limits);

}  // namespace loupe
