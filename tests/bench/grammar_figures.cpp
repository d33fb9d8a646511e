// Grammars by lines of JSON on stdin, for oracles and figures:
//   {"kind": "json_schema" | "json_object" | "regex" | "choice", "text": "...", "choices": [...], "inputs": ["...", ...]}
// and a line of JSON out for each: {"status": "" or why it is refused, "compile_us": ..., "compile_cpu_us": ..., "read": [[bytes, may end], ...]}.
// Inputs are read byte by byte. With `--model FILE` they are also walked token by token, with a mask before each, as a
// sample does; the last line holds the times of all masks and the share that is found ready: {"masks": ..., "median_us": ...}.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <string>

#include "engine/grammar/grammar.h"
#include "engine/load/load_model.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/grammar/byte_tokenizer.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// Of this thread on a processor: what a busy machine does not stretch.
double ThreadMicroseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double MicrosecondsSince(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

GrammarSpec SpecOf(const Json& line) {
  const std::string kind = line.at("kind");
  GrammarSpec spec;
  spec.kind = kind == "regex"         ? GrammarSpec::Kind::kRegex
              : kind == "choice"      ? GrammarSpec::Kind::kChoice
              : kind == "json_object" ? GrammarSpec::Kind::kJsonObject
                                      : GrammarSpec::Kind::kJsonSchema;
  spec.text = line.value("text", "");
  spec.choices = line.value("choices", std::vector<std::string>());
  return spec;
}

Json Read(const std::shared_ptr<Grammar>& grammar, const std::string& text) {
  GrammarMatcher matcher(grammar);
  size_t read = 0;
  while (read < text.size() && matcher.Accept(text.substr(read, 1)).ok()) ++read;
  return {read, read == text.size() && matcher.accepts()};
}

void Walk(const std::shared_ptr<Grammar>& grammar, const Tokenizer& tokenizer, const std::string& text, std::vector<double>* times) {
  GrammarMatcher matcher(grammar);
  std::vector<uint32_t> mask(static_cast<size_t>(tokenizer.vocab_size() + 31) / 32);
  for (const int32_t id : tokenizer.Encode(text, false, false)) {
    const auto start = Clock::now();
    if (!matcher.FillMask(mask.data()).ok()) return;
    times->push_back(MicrosecondsSince(start));
    if (!grammar::HasToken(mask.data(), id) || !matcher.Accept(tokenizer.TokenBytes(id)).ok()) return;
  }
}

int Main(int argc, char** argv) {
  std::unique_ptr<Tokenizer> tokenizer;
  if (argc == 3 && std::string(argv[1]) == "--model") {
    auto loaded = LoadTokenizer(argv[2]);
    if (!loaded.ok()) return std::fprintf(stderr, "error: %s\n", loaded.status().ToString().c_str()), 1;
    tokenizer = *std::move(loaded);
  }
  const testing::ByteTokenizer bytes;
  const Tokenizer& used = tokenizer ? *tokenizer : static_cast<const Tokenizer&>(bytes);
  const grammar::TokenTrie trie(used, used.vocab_size());
  std::vector<double> times;
  for (std::string text; std::getline(std::cin, text);) {
    const Json line = Json::parse(text);
    const auto start = Clock::now();
    const double cpu = ThreadMicroseconds();
    const auto compiled = Grammar::Compile(SpecOf(line), trie);
    const double cpu_us = ThreadMicroseconds() - cpu;
    Json out = {{"status", std::string(compiled.status().message())}, {"compile_us", MicrosecondsSince(start)}, {"compile_cpu_us", cpu_us},
                {"read", Json::array()}};
    for (const std::string& input : line.value("inputs", std::vector<std::string>())) {
      if (!compiled.ok()) break;
      if (tokenizer) Walk(*compiled, *tokenizer, input, &times);
      out["read"].push_back(Read(*compiled, input));
    }
    std::puts(out.dump().c_str());
  }
  if (!tokenizer || times.empty()) return 0;
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) { return times[static_cast<size_t>(share * static_cast<double>(times.size() - 1))]; };
  const Json summary = {{"masks", times.size()}, {"vocabulary", used.vocab_size()}, {"median_us", at(.5)}, {"p90_us", at(.9)}, {"p99_us", at(.99)}, {"max_us", times.back()}};
  std::puts(summary.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace loupe

int main(int argc, char** argv) { return loupe::Main(argc, argv); }
