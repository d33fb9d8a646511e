// The binary: picks the subcommand, resolves its options, runs it. Nothing else.
#include <cstdio>
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
    std::printf("%s\n", command.options->ToJson().c_str());
    return loupe::kExitOk;
  }
  return command.run();
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

  try {
    root.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return root.exit(done);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "error: %s; see loupe --help\n", error.what());
    return loupe::kExitBadInput;
  }
  loupe::WarnAboutUnknownEnvironment(root);
  for (const loupe::Command& command : commands) {
    if (command.app->parsed()) return RunCommand(command);
  }
  return loupe::kExitBadInput;
}
