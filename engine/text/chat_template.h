// Renders a conversation into the prompt text of a model, by the Jinja template that ships with it. Immutable after
// creation: any thread may render. Templates are not trusted: steps, output and nesting are limited.
#pragma once

#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace loupe {

struct TemplateLimits {
  int64_t max_steps = 1'000'000;           // statements and expressions evaluated
  int64_t max_output_bytes = 16 << 20;     // and bytes of any intermediate string
  int max_depth = 100;                     // nesting of the source and of calls
};

struct ChatTemplateContext {
  std::string bos_token, eos_token;
  std::function<std::tm()> now;  // for strftime_now; empty: local time
};

class ChatTemplate {
 public:
  // INVALID_ARGUMENT with line and column for a syntax error or a construct outside the subset.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source, ChatTemplateContext context,
                                                             TemplateLimits limits = {});
  ~ChatTemplate();

  // `variables` is an object: messages, tools, add_generation_prompt and any chat_template_kwargs; they win over the
  // context's tokens. tools and documents that are missing are none, as transformers passes them.
  // INVALID_ARGUMENT: raise_exception's text or a failed operation; RESOURCE_EXHAUSTED: a limit, with its number.
  absl::StatusOr<std::string> Render(const nlohmann::ordered_json& variables) const;
  const std::string& source() const;

 private:
  ChatTemplate();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loupe
