// Flags, environment and file, in that order of precedence: `--max-queue 8` over `LOUPE_MAX_QUEUE=8` over
// {"max-queue": 8} in --config FILE over the default that a config struct holds. One per subcommand, used at start-up.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace loupe {

// Options that every subcommand has.
struct CommonOptions {
  bool json = false;
  std::string log_level = "info";
  std::string config_file;
  bool print_config = false;
};

class OptionTable {
 public:
  // Adds the common options to `app`; the subcommand adds its own to the same `app`.
  OptionTable(CLI::App* app, CommonOptions* common);

  // After parsing: fills what the command line left open from the environment and the file. INVALID_ARGUMENT names the
  // variable or key and what is wrong with it.
  absl::Status Resolve();

  // Every option with its value and where it came from (flag, environment, file, default), as one JSON object; `indent`
  // as in nlohmann's dump, -1 for one line.
  std::string ToJson(int indent) const;

 private:
  absl::Status Set(CLI::Option* option, const std::vector<std::string>& values, const std::string& origin);
  // The flag's value, or the variable's; true if one of them is there.
  absl::StatusOr<bool> TakeFlagOrVariable(CLI::Option* option);

  CLI::App* app_;
  CommonOptions* common_;
  std::map<const CLI::Option*, std::string> origins_;
};

// Prints a warning for each LOUPE_ variable that no subcommand of `root` knows. LOUPE_PORT* and LOUPE_SERVICE* are
// Kubernetes' own (it injects them for a Service called loupe) and LOUPE_TEST_* the tests'.
void WarnAboutUnknownEnvironment(const CLI::App& root);

// "512MiB", "40Gi", "1.5GB", "1048576". INVALID_ARGUMENT for anything else.
absl::StatusOr<int64_t> ParseSize(const std::string& text);
std::string FormatSize(int64_t bytes);  // "512.0 MiB"

// An option that takes a size; "auto" gives 0 if allowed.
CLI::Option* AddSizeOption(CLI::App* app, const std::string& name, int64_t* bytes, bool allow_auto, const std::string& help);

}  // namespace loupe
