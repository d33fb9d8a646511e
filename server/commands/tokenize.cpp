// loupe tokenize: text on stdin to token ids, or back with --decode.
#include <cstdio>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/load/load_model.h"
#include "nlohmann/json.hpp"
#include "server/commands/command.h"
#include "server/read_input.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

struct State {
  std::string model;
  bool add_special = false, parse_special = false, decode = false;
};

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

int Decode(const Tokenizer& tokenizer, const std::string& input, bool json) {
  std::istringstream words(input);
  std::vector<int32_t> ids;
  for (std::string word; words >> word;) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(word, &id) || id < 0 || id >= tokenizer.vocab_size()) {
      return Fail(absl::InvalidArgumentError(absl::StrCat("'", word, "' is no token id; this model has ids 0 to ",
                                                          tokenizer.vocab_size() - 1, ", separated by spaces")));
    }
    ids.push_back(id);
  }
  const std::string text = tokenizer.Decode(ids, false);
  const std::string line = (json ? Dump({{"text", text}}) : text) + "\n";
  std::fwrite(line.data(), 1, line.size(), stdout);  // zero bytes included
  return kExitOk;
}

int Encode(const Tokenizer& tokenizer, const std::string& input, const State& state, bool json) {
  const std::vector<int32_t> ids = tokenizer.Encode(input, state.add_special, state.parse_special);
  const size_t kept = tokenizer.Decode(tokenizer.Encode(input, false, state.parse_special), false).size();
  if (kept < input.size()) {
    std::fprintf(stderr, "warning: %zu of %zu bytes have no token in this vocabulary and are left out\n", input.size() - kept,
                 input.size());
  }
  if (json) {
    Json pieces = Json::array();
    for (const int32_t id : ids) pieces.push_back(std::string(tokenizer.Piece(id)));
    std::printf("%s\n", Dump({{"tokens", ids}, {"pieces", pieces}}).c_str());
    return kExitOk;
  }
  for (size_t i = 0; i < ids.size(); ++i) std::printf("%s%d", i == 0 ? "" : " ", ids[i]);
  std::printf("\n");
  return kExitOk;
}

}  // namespace

Command AddTokenizeCommand(CLI::App* root) {
  Command command = MakeCommand(root, "tokenize", "text on stdin to token ids, or ids to text",
                                "echo -n 'Hello' | loupe tokenize --model models/SmolLM2-135M-Instruct.Q4_1.gguf");
  auto state = std::make_shared<State>();
  command.app->add_option("--model,-m", state->model, "GGUF file")->type_name("PATH");
  command.app->add_flag("--add-special", state->add_special, "add the tokens that the model wants at the start and end");
  command.app->add_flag("--parse-special", state->parse_special, "special tokens in the text become their ids");
  command.app->add_flag("--decode", state->decode, "stdin holds ids; print their text");
  const auto common = command.common;
  command.run = [state, common] {
    if (state->model.empty()) return Fail(absl::InvalidArgumentError("tokenize needs --model PATH"));
    const auto tokenizer = LoadTokenizer(state->model);
    if (!tokenizer.ok()) return Fail(tokenizer.status());
    const auto input = ReadStandardInput();
    if (!input.ok()) return Fail(input.status());
    return state->decode ? Decode(**tokenizer, *input, common->json) : Encode(**tokenizer, *input, *state, common->json);
  };
  return command;
}

}  // namespace loupe
