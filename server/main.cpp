// The binary: picks the subcommand, resolves its options, runs it. Nothing else.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "server/commands/command.h"
#include "server/version.h"

namespace {

int RunCommand(const loupe::Command& command) {
  const absl::Status resolved = command.options->Resolve();
  if (!resolved.ok()) {
    std::fprintf(stderr, "error: %s; see loupe %s --help\n", std::string(resolved.message()).c_str(),
                 command.app->get_name().c_str());
    return loupe::kExitBadInput;
  }
  if (command.common->print_config) {
    std::printf("%s\n", command.options->ToJson(command.common->json ? -1 : 2).c_str());
    return loupe::kExitOk;
  }
  return command.run();
}

// What is wrong with the command line, in the words of the command that it reached.
std::string Explain(const CLI::App& root, const CLI::ParseError& error) {
  const CLI::App* at = &root;
  std::string path = "loupe";
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().back();
    path += " " + at->get_name();
  }
  const std::string help = "; see " + path + " --help";
  const std::vector<std::string> rest = root.remaining(true);
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && at->get_require_subcommand_min() > 0) {
    std::string names;
    for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; })) {
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    return (rest.empty() ? path + " needs a command" : path + " has no command '" + rest.front() + "'") + ": " + names + help;
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !rest.empty()) {
    return path + " does not know '" + rest.front() + "'" + help;
  }
  return error.what() + help;
}

// What was printed has to have arrived: a result that is lost is a failure.
int FinishOutput(int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "error: cannot write to standard output%s%s\n", errno != 0 ? ": " : "", errno != 0 ? std::strerror(errno) : "");
  return code == loupe::kExitOk ? loupe::kExitFailed : code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App root("Loupe: an LLM inference server whose KV cache is adaptive in resolution.", "loupe");
  root.set_version_flag("--version", std::string("loupe ") + loupe::kVersion + " (" + loupe::kCommit + ")");
  root.require_subcommand(1);
  root.footer("Start here:\n  loupe serve --model models/SmolLM2-135M-Instruct.Q4_1.gguf\n  loupe <command> --help");

  std::vector<loupe::Command> commands = {
      loupe::AddServeCommand(&root),   loupe::AddGenerateCommand(&root), loupe::AddTokenizeCommand(&root),
      loupe::AddInspectCommand(&root), loupe::AddHealthCommand(&root),
  };
  for (loupe::Command& bench : loupe::AddBenchCommands(&root)) commands.push_back(std::move(bench));
  for (loupe::Command& eval : loupe::AddEvalCommands(&root)) commands.push_back(std::move(eval));
  for (loupe::Command& one : loupe::AddCalibrateCommands(&root)) commands.push_back(std::move(one));

  try {
    root.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return FinishOutput(root.exit(done));
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "error: %s\n", Explain(root, error).c_str());
    return loupe::kExitBadInput;
  }
  loupe::WarnAboutUnknownEnvironment(root);
  for (const loupe::Command& command : commands) {
    if (command.app->parsed()) return FinishOutput(RunCommand(command));
  }
  return loupe::kExitBadInput;
}
