#include "server/server_context.h"

#include "absl/strings/str_cat.h"

namespace loupe {

absl::StatusOr<Engine*> ServingEngine(const ServerContext& context) {
  if (Engine* engine = context.engine) return engine;
  const int percent = static_cast<int>(100 * context.lifecycle->progress());
  return absl::UnavailableError(
      absl::StrCat("the model is being loaded (", PhaseName(context.lifecycle->phase()), ", ", percent, " %); try again soon"));
}

absl::Status CheckModel(const ServerContext& context, const std::string& model) {
  if (model.empty() || model == context.model_name) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("model: \"", model.substr(0, 100), "\" is not served here; this server has \"", context.model_name, "\""));
}

}  // namespace loupe
