#include "server/kv_protect.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "server/openai_prompt.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<std::set<int>> WantedMessages(const KvProtect& protect, const Json& messages) {
  std::set<int> wanted;
  const int count = static_cast<int>(messages.size());
  for (const int message : protect.messages) {
    if (message >= count) {
      return absl::InvalidArgumentError(
          absl::StrCat("kv.protect.messages: has ", message, ", must be below ", count, ", the number of messages"));
    }
    wanted.insert(message);
  }
  for (int i = 0; i < count; ++i) {
    const std::string role = messages[static_cast<size_t>(i)].value("role", "");
    if (std::find(protect.roles.begin(), protect.roles.end(), role) != protect.roles.end()) wanted.insert(i);
  }
  return wanted;
}

// How many of the prompt's tokens the first `count` messages became.
absl::StatusOr<int> TokensOfFirst(int count, const ApiRequest& chat, const ChatTemplate& chat_template, const Tokenizer& tokenizer,
                                  const std::vector<int32_t>& ids) {
  if (count == 0) return 0;
  ApiRequest part;
  part.messages = Json(chat.messages.begin(), chat.messages.begin() + count);
  part.template_kwargs = chat.template_kwargs;
  part.add_generation_prompt = false;
  const auto text = RenderChat(part, chat_template);
  if (!text.ok()) return text.status();
  const std::vector<int32_t> first = tokenizer.Encode(*text, false, true);
  const size_t limit = std::min(first.size(), ids.size());
  size_t same = 0;
  while (same < limit && first[same] == ids[same]) ++same;
  // The last token of a part may have become one with what follows it.
  if (same + 1 < first.size()) {
    return absl::InvalidArgumentError(absl::StrCat("kv.protect.messages: the model's template does not write its messages one after the ",
                                                   "other (message ", count - 1, "); protect ranges of tokens instead"));
  }
  return static_cast<int>(same);
}

}  // namespace

absl::Status ProtectMessages(const ChatTemplate& chat_template, const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                             ApiRequest* chat) {
  if (!chat->engine.kv) return absl::OkStatus();
  KvProtect& protect = chat->engine.kv->protect;
  if (protect.messages.empty() && protect.roles.empty()) return absl::OkStatus();
  const auto wanted = WantedMessages(protect, chat->messages);
  if (!wanted.ok()) return wanted.status();
  for (const int message : *wanted) {
    const auto from = TokensOfFirst(message, *chat, chat_template, tokenizer, ids);
    if (!from.ok()) return from.status();
    const auto to = TokensOfFirst(message + 1, *chat, chat_template, tokenizer, ids);
    if (!to.ok()) return to.status();
    if (*from < *to) protect.ranges.emplace_back(*from, *to);
  }
  protect.messages.clear();
  protect.roles.clear();
  return absl::OkStatus();
}

}  // namespace loupe
