#include "server/commands/command.h"

#include <cstdio>
#include <filesystem>

#include "engine/engine_config.h"

namespace loupe {
namespace {

// Beside the binary; empty if that cannot be found out.
std::string ArtifactFolder() {
  std::error_code error;
  const auto binary = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "" : (binary.parent_path() / "artifacts").string();
}

}  // namespace

Command MakeCommand(CLI::App* parent, const std::string& name, const std::string& summary, const std::string& example) {
  Command command;
  command.app = parent->add_subcommand(name, summary);
  command.app->footer("Example:\n  " + example +
                      "\nEvery flag can also be set as LOUPE_<FLAG> or in --config FILE; flag over environment over file.");
  command.common = std::make_shared<CommonOptions>();
  command.options = std::make_shared<OptionTable>(command.app, command.common.get());
  return command;
}

CLI::Validator IsANumber() {
  const auto check = [](std::string& text) { return text.find_first_of("nN") == std::string::npos ? "" : text + " is not a number"; };
  return CLI::Validator(check, "");
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
      return kExitBadInput;
    default:
      return kExitFailed;
  }
}

void AddModelOptions(CLI::App* app, std::string* model, EngineConfig* config) {
  app->add_option("--model,-m", *model, "GGUF file of a llama-family model")->type_name("PATH");
  app->add_option("--device", config->backend.device, std::string("where to compute: ") + BuiltDevices());
  app->add_option("--threads", config->backend.num_threads, "compute threads; 0 takes every core this process may use")
      ->check(CLI::Range(0, 1024));
  app->add_flag_function(
         "--exact", [config](int64_t count) { config->backend.exact = count > 0; },
         "compute with f32 weights and activations: slow, the yardstick for quality")
      ->default_str("false");
  app->add_flag_function(
         "--deterministic", [config](int64_t count) { config->backend.deterministic = count > 0; },
         "on a GPU: the same bits alone and in a batch, at some cost in speed; the CPU's are the same always")
      ->default_str("false");
  app->add_option("--isa", config->backend.isa, "force portable, avx2 or avx512 kernels; empty takes the best there is");
  AddSizeOption(app, "--kv-device-bytes", &config->kv_device_bytes, true,
                "memory of the KV cache; auto takes 25 % of RAM on the CPU, 90 % of the free memory of a GPU");
  app->add_option("--max-context", config->max_context, "tokens a sequence may have; 0 takes the model's limit")
      ->check(CLI::Range(0, 1 << 24));
}

void AddStrategyOptions(CLI::App* app, EngineConfig* config) {
  config->artifact_folder = ArtifactFolder();
  app->add_option("--strategy", config->strategy_files,
                  "artifact (repeatable): a strategy of polykv or a profile of spherical, in place of the one shipped for the model; "
                  "the file's name without .json is what kv.strategy asks for, the first of a kind is taken without it")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app->add_flag_function(
         "--no-artifacts", [config](int64_t count) { if (count > 0) config->artifact_folder.clear(); },
         "load none of the artifacts that are shipped beside the binary")
      ->default_str("false");
}

}  // namespace loupe
