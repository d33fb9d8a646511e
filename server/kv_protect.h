// Which tokens of a chat's prompt a message became, for `kv.protect.messages` and `kv.protect.roles`. Any thread.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "server/openai_request.h"

namespace loupe {

// Turns the messages and roles that chat.engine.kv protects into ranges of `ids`, the chat's prompt; does nothing if there
// are none. A message is what the template adds for it, its markers included. INVALID_ARGUMENT: a message that the chat
// does not have, or a template that does not write messages one after the other.
absl::Status ProtectMessages(const ChatTemplate& chat_template, const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                             ApiRequest* chat);

}  // namespace loupe
