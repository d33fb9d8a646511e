// Any bytes as a chat template over a fixed conversation: parses or is refused, renders or fails, within its limits.
#include <cstdio>
#include <cstdlib>

#include "engine/text/chat_template.h"
#include "nlohmann/json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const nlohmann::ordered_json kVariables = {
      {"messages",
       {{{"role", "system"}, {"content", "Be br\xC3\xAD" "ef."}},
        {{"role", "user"}, {"content", "  What is 1 + 1?\n"}},
        {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", {{{"name", "add"}, {"arguments", {{"a", 1}, {"b", 1.5}}}}}}}}},
      {"tools", {{{"type", "function"}, {"function", {{"name", "add"}, {"parameters", {{"type", "object"}}}}}}}},
      {"add_generation_prompt", true},
      {"x", {1, 2, 3}},
      {"bytes", "\xff\xfe"}};
  constexpr int64_t kMaxOutput = 1 << 18;
  const auto parsed = loupe::ChatTemplate::Parse({reinterpret_cast<const char*>(data), size}, {"<s>", "</s>", {}}, {20'000, kMaxOutput, 50});
  if (!parsed.ok()) return 0;
  const auto text = (*parsed)->Render(kVariables);
  if (text.ok() && static_cast<int64_t>(text->size()) > kMaxOutput) {
    std::fprintf(stderr, "output of %zu bytes\n", text->size());
    std::abort();
  }
  return 0;
}
