// The subcommands of the binary, one file each. A command adds its options to the root and returns what runs once they
// are parsed; the result is the exit code: 0 done, 1 failed at run time, 2 bad usage or bad input.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "server/options.h"

namespace loupe {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitBadInput = 2;

struct Command {
  CLI::App* app = nullptr;  // selected if app->parsed()
  std::shared_ptr<OptionTable> options;
  std::shared_ptr<CommonOptions> common;
  std::function<int()> run;
};

Command AddServeCommand(CLI::App* root);
Command AddGenerateCommand(CLI::App* root);
Command AddTokenizeCommand(CLI::App* root);
Command AddInspectCommand(CLI::App* root);
Command AddHealthCommand(CLI::App* root);
std::vector<Command> AddBenchCommands(CLI::App* root);
std::vector<Command> AddEvalCommands(CLI::App* root);
std::vector<Command> AddCalibrateCommands(CLI::App* root);

// A command with its common options, ready for its own.
Command MakeCommand(CLI::App* parent, const std::string& name, const std::string& summary, const std::string& example);

// Prints "error: <what>" to stderr; the exit code that fits the status: INVALID_ARGUMENT, NOT_FOUND and the like are
// the caller's (2), the rest is 1.
int Fail(const absl::Status& status);

// Beside CLI::Range, which NaN passes.
CLI::Validator IsANumber();

// The options that every command with a model has, and what they fill.
struct EngineConfig;
void AddModelOptions(CLI::App* app, std::string* model, EngineConfig* config);
// Those of the commands that take a `kv` object: which artifacts load beside the model.
void AddStrategyOptions(CLI::App* app, EngineConfig* config);

}  // namespace loupe
