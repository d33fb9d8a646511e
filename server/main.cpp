// The binary: picks the subcommand, resolves its options, runs it. Nothing else.
#include <cerrno>
#include <cstdio>
#include <cstring>
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
    std::fprintf(stderr, "error: %s; see loupe --help\n", error.what());
    return loupe::kExitBadInput;
  }
  loupe::WarnAboutUnknownEnvironment(root);
  for (const loupe::Command& command : commands) {
    if (command.app->parsed()) return FinishOutput(RunCommand(command));
  }
  return loupe::kExitBadInput;
}
