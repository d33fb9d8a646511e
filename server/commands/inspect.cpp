// loupe inspect: what a model file contains, and whether this build can serve it.
#include <cstdio>

#include "engine/load/inspect.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const ModelSummary& m) {
  Json types = Json::object(), formats = Json::object();
  for (const auto& [name, type] : m.tensor_types) types[name] = {{"count", type.count}, {"bytes", type.bytes}};
  for (const auto& [name, bytes] : m.kv_bytes_per_token_by_format) formats[name] = bytes;
  return {{"kind", m.kind},
          {"format", m.format},
          {"architecture", m.architecture},
          {"name", m.name},
          {"parameters", m.parameters},
          {"layers", m.layers},
          {"heads", m.heads},
          {"kv_heads", m.kv_heads},
          {"head_dim", m.head_dim},
          {"width", m.width},
          {"feed_forward", m.feed_forward},
          {"vocab", m.vocab},
          {"context", m.context},
          {"tied_embeddings", m.tied_embeddings},
          {"tokenizer", m.tokenizer},
          {"chat_template", m.chat_template},
          {"tensor_types", types},
          {"file_bytes", m.file_bytes},
          {"kv_bytes_per_token", m.kv_bytes_per_token},
          {"kv_bytes_per_token_by_format", formats},
          {"supported", m.supported},
          {"reason", m.reason}};
}

void PrintText(const ModelSummary& m) {
  std::printf("%s (%s, %s)\n", m.name.empty() ? "unnamed model" : m.name.c_str(), m.architecture.c_str(), m.format.c_str());
  std::printf("  parameters     %.1f M in %s\n", static_cast<double>(m.parameters) / 1e6, FormatSize(m.file_bytes).c_str());
  for (const auto& [name, type] : m.tensor_types) {
    std::printf("                 %s: %lld tensors, %s\n", name.c_str(), static_cast<long long>(type.count),
                FormatSize(type.bytes).c_str());
  }
  std::printf("  layers         %lld, width %lld, feed-forward %lld\n", static_cast<long long>(m.layers), static_cast<long long>(m.width),
              static_cast<long long>(m.feed_forward));
  std::printf("  heads          %lld query, %lld key/value, of %lld\n", static_cast<long long>(m.heads), static_cast<long long>(m.kv_heads),
              static_cast<long long>(m.head_dim));
  std::printf("  context        %lld tokens\n", static_cast<long long>(m.context));
  std::printf("  tokenizer      %s, %lld tokens, %s chat template\n", m.tokenizer.c_str(), static_cast<long long>(m.vocab),
              m.chat_template ? "with a" : "no");
  std::printf("  KV cache       %s a token", FormatSize(m.kv_bytes_per_token).c_str());
  if (m.context > 0) std::printf(", %s for a full context", FormatSize(m.kv_bytes_per_token * m.context).c_str());
  std::printf("\n  supported      %s%s%s\n", m.supported ? "yes" : "no", m.reason.empty() ? "" : ": ", m.reason.c_str());
}

}  // namespace

Command AddInspectCommand(CLI::App* root) {
  Command command = MakeCommand(root, "inspect", "say what a model file contains and whether it is supported",
                                "loupe inspect models/SmolLM2-135M-Instruct.Q4_1.gguf");
  auto path = std::make_shared<std::string>();
  command.app->add_option("file", *path, "GGUF file")->required();
  const auto common = command.common;
  command.run = [path, common] {
    const auto summary = InspectModel(*path);
    if (!summary.ok()) return Fail(summary.status());
    if (common->json) {
      std::printf("%s\n", ToJson(*summary).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    } else {
      PrintText(*summary);
    }
    return kExitOk;
  };
  return command;
}

}  // namespace loupe
