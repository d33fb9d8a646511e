// Items as text: reading them, and judging an answer.
#include <algorithm>
#include <cctype>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "engine/eval/items.h"
#include "engine/load/read_text.h"

namespace loupe {
namespace {

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}
bool IsWordByte(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

// Whether `name` stands in `text` with no letter or digit next to it. Both in lower case.
bool ContainsWhole(const std::string& text, const std::string& name) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const bool open = at == 0 || !IsWordByte(text[at - 1]) || !IsWordByte(name.front());
    const size_t end = at + name.size();
    const bool closed = end == text.size() || !IsWordByte(text[end]) || !IsWordByte(name.back());
    if (open && closed) return true;
  }
  return false;
}

std::vector<std::string> Words(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

absl::StatusOr<EvalItem> ParseItem(const nlohmann::json& j) {
  EvalItem item;
  try {
    item.id = j.at("id");
    item.task = j.at("task");
    item.context = j.at("context");
    item.question = j.at("question");
    item.answer_prefix = j.value("answer_prefix", "");
    item.answers = j.at("answers").get<std::vector<std::string>>();
    item.scoring = j.value("scoring", "contains_all");
    item.max_new_tokens = j.value("max_new_tokens", 24);
    item.group = j.value("group", item.id);
  } catch (const nlohmann::json::exception& e) {
    return absl::InvalidArgumentError(e.what());
  }
  const auto empty = [](const std::string& s) { return s.empty(); };
  if (item.context.empty()) return absl::InvalidArgumentError("context is empty");
  if (item.answers.empty() || std::any_of(item.answers.begin(), item.answers.end(), empty)) {
    return absl::InvalidArgumentError("answers is empty or holds an empty answer");
  }
  if (item.max_new_tokens < 0 || item.max_new_tokens > 4096) {
    return absl::InvalidArgumentError(absl::StrCat("max_new_tokens is ", item.max_new_tokens, ", at most 4096"));
  }
  return item;
}

}  // namespace

absl::StatusOr<std::vector<EvalItem>> ReadItems(const std::string& path, int limit) {
  auto text = ReadText("--items", path);
  if (!text.ok()) return text.status();
  std::istringstream in(*std::move(text));
  std::vector<EvalItem> items;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.empty()) continue;
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_discarded())
      return absl::InvalidArgumentError(absl::StrCat("--items ", path, ": line ", number, " is not JSON"));
    if (json.value("scoring", "") == "nll_kl") continue;  // windows of running text: eval kl does those
    auto item = ParseItem(json);
    if (!item.ok())
      return absl::InvalidArgumentError(
          absl::StrCat("--items ", path, ": line ", number, ": ", item.status().message()));
    items.push_back(*std::move(item));
    if (limit > 0 && static_cast<int>(items.size()) == limit) break;
  }
  if (items.empty()) return absl::InvalidArgumentError(absl::StrCat("--items ", path, " holds no item"));
  return items;
}

double ScoreAnswer(const EvalItem& item, const std::string& answer) {
  const std::string text = Lower(answer);
  if (item.scoring == "first_word") {
    const std::vector<std::string> words = Words(text);
    return !words.empty() && ContainsWhole(words.front(), Lower(item.answers.front())) ? 1 : 0;
  }
  if (item.scoring == "lcp_words") {
    const std::vector<std::string> wanted = Words(Lower(item.answers.front())), got = Words(text);
    size_t same = 0;
    while (same < wanted.size() && same < got.size() && wanted[same] == got[same]) ++same;
    return static_cast<double>(same) / static_cast<double>(wanted.size());
  }
  int found = 0;
  for (const std::string& name : item.answers) found += ContainsWhole(text, Lower(name));
  if (item.scoring == "contains_any") return found > 0 ? 1 : 0;
  if (item.scoring == "contains_all") return static_cast<double>(found) / static_cast<double>(item.answers.size());
  return 0;
}

std::string GoldText(const EvalItem& item) {
  const std::string& prefix = item.answer_prefix.empty() ? item.question : item.answer_prefix;
  const std::string& before = prefix.empty() ? item.context : prefix;
  const bool joins = before.back() == '"' || std::isspace(static_cast<unsigned char>(before.back())) != 0;
  std::string text = joins ? "" : " ";
  for (size_t i = 0; i < item.answers.size(); ++i) absl::StrAppend(&text, i > 0 ? ", " : "", item.answers[i]);
  return text;
}

}  // namespace loupe
