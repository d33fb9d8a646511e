// Templates against jinja2 (tests/golden/templates, written by tests/reference/make_template_goldens.py), and the limits.
#include "engine/text/chat_template.h"

#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <map>

#include "nlohmann/json.hpp"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << "cannot open " << path << "; run from the root of the repository";
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The moment that the goldens were made at: Sunday, 2026-07-26 15:04:05.
std::tm GoldenTime() {
  std::tm now{};
  now.tm_year = 126, now.tm_mon = 6, now.tm_mday = 26;
  now.tm_hour = 15, now.tm_min = 4, now.tm_sec = 5;
  now.tm_wday = 0, now.tm_yday = 206;
  return now;
}

absl::StatusOr<std::string> Render(const std::string& source, const Json& variables = Json::object(), TemplateLimits limits = {}) {
  const auto parsed = ChatTemplate::Parse(source, {"<s>", "</s>", GoldenTime}, limits);
  if (!parsed.ok()) return parsed.status();
  return (*parsed)->Render(variables);
}

class Goldens : public testing::Test {
 protected:
  static const Json& All() {
    static const Json kAll = Json::parse(ReadAll("tests/golden/templates/goldens.json"));
    return kAll;
  }
  static std::string Source(const Json& golden) {
    if (golden.contains("template")) return golden["template"];
    if (golden["family"] == "model") return All()["model_template"];
    return ReadAll("tests/golden/templates/" + golden["family"].get<std::string>() + ".jinja");
  }
};

TEST_F(Goldens, EqualsJinja2) {
  int rendered = 0, failed = 0;
  for (const Json& golden : All()["cases"]) {
    const std::string name = golden["name"];
    const auto text = Render(Source(golden), golden["variables"]);
    if (golden.contains("error")) {
      ++failed;
      EXPECT_FALSE(text.ok()) << name << ": jinja2 fails with " << golden["error"] << ", here it gives: " << *text;
      continue;
    }
    ++rendered;
    if (!text.ok()) {
      ADD_FAILURE() << name << ": " << text.status();
    } else {
      EXPECT_EQ(*text, golden["output"].get<std::string>()) << name;
    }
  }
  EXPECT_GE(rendered, 150);
  EXPECT_GE(failed, 50);
}

TEST_F(Goldens, RaisedTextIsTheMessage) {
  const auto text = Render("a\n{{ raise_exception('Roles must alternate') }}");
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(text.status().message()), "Roles must alternate");
}

TEST(ChatTemplate, SyntaxErrorsSayWhere) {
  const std::map<std::string, std::string> kCases = {
      {"a\n  {{ 'x' + }}", "line 2, column 12"}, {"{% if x %}", "end of template"}, {"{{ x | nosuch }}", "nosuch"},
      {"\n\n{% frobnicate %}", "line 3"}, {"{% for x in y recursive %}{% endfor %}", "recursive"}, {"{% break %}", "outside a loop"},
      {"{{ 99999999999999999999 }}", "64 bits"}, {"{{ x $ y }}", "'$'"}};
  for (const auto& [source, message] : kCases) {
    const auto parsed = ChatTemplate::Parse(source, {});
    ASSERT_FALSE(parsed.ok()) << source;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << source;
    EXPECT_NE(std::string(parsed.status().message()).find(message), std::string::npos) << source << ": " << parsed.status();
  }
}

TEST(ChatTemplate, FailuresSayWhereAndWhat) {
  const auto text = Render("{% for m in messages %}\n{{ m.role + '\n' }}\n{{ m.nothing.here }}{% endfor %}", {{"messages", {{{"role", "user"}}}}});
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(text.status().message());
  EXPECT_NE(message.find("line 4"), std::string::npos) << message;
  EXPECT_NE(message.find("'nothing'"), std::string::npos) << message;
}

TEST(ChatTemplate, VariablesWinOverTokensAndMayBeMissing) {
  EXPECT_EQ(*Render("{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ messages is defined }}"), "<s>TrueTrueFalse");
  EXPECT_EQ(*Render("{{ bos_token }}", {{"bos_token", "B"}}), "B");
  EXPECT_FALSE(Render("x", Json::array()).ok());
}

TEST(ChatTemplate, AppendWorksOnLists) {
  EXPECT_EQ(*Render("{% set xs = [1] %}{% set _ = xs.append(2) %}{{ xs }}"), "[1, 2]");
}

TEST(ChatTemplate, BytesThatAreNotUtf8DoNoHarm) {
  const Json variables = {{"s", "a\xff\xc3"}};
  EXPECT_EQ(*Render("{{ s }}{{ s|length }}", variables), "a\xff\xc3" "3");
  EXPECT_EQ(*Render("{{ s|tojson }}", variables), "\"a\xEF\xBF\xBD\xEF\xBF\xBD\"");
  EXPECT_TRUE(Render("{{ s|upper }}{{ s.strip() }}{{ s[::-1] }}{{ [s] }}", variables).ok());
}

// Every one would run for ever, fill the memory or overflow the stack without limits.
TEST(ChatTemplate, HostileTemplatesEndAtALimit) {
  const std::string kDeep = std::string(5000, '(') + "1" + std::string(5000, ')');
  std::string ifs, chain = "1", filters = "'a'", attributes = "x";
  for (int i = 0; i < 3000; ++i) {
    ifs += "{% if 1 %}";
    chain += "+1";
    filters += "|upper";
    attributes += ".a";
  }
  const std::vector<std::string> kTemplates = {
      "{{ 'a' * 10 ** 9 }}",
      "{{ [1] * 10 ** 9 }}",
      "{{ range(10 ** 9) }}",
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
      "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
      "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
      "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
      "{% set ns = namespace(l=[1]) %}{% for i in range(90) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l == ns.l + [] }}{{ ns.l }}",
      "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}",
      "{% set ns = namespace(l={}) %}{% for i in range(100000) %}{% set ns.l = {'a': ns.l} %}{% endfor %}",
      "{% set ns = namespace(l=0) %}{% for i in range(100000) %}{% for x in [ns.l] %}{% set ns.l = loop %}{% endfor %}{% endfor %}",
      "{% set ns = namespace(l='a') %}{% for i in range(100000) %}{% set ns.l = [ns.l][0:].index %}{% endfor %}{{ 'x' * 10 ** 9 }}",
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
      "{{ " + kDeep + " }}",
      "{{ " + std::string(5000, '[') + std::string(5000, ']') + " }}",
      "{{ " + std::string(5000, '-') + "1 }}",
      "{{ not " + std::string(20000, ' ') + std::string("not ") + " }}" + ifs,
      "{{ " + chain + " }}",
      "{{ " + filters + " }}",
      "{{ " + attributes + " }}",
      ifs,
      "{{ 'abc' | indent(10 ** 9) }}",
      "{{ 'abc' | center(10 ** 9) }}",
      "{{ '%1000000000d' % 1 }}",
      "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
      "{{ ('a,' * 1000000).split(',') }}",
      "{{ ('a' * 100000) | list | join('b' * 100000) }}",
      "{% set xs = [] %}{% set _ = xs.append(xs) %}{{ xs }}",
      "{% set xs = [] %}{% set _ = xs.append(xs) %}{{ xs | tojson }}",
      "{% set xs = [] %}{% set ys = [xs] %}{% set _ = xs.append(ys) %}{{ xs == ys }}{{ xs }}",
      "{{ strftime_now('%100000000Y') }}",
  };
  for (const std::string& source : kTemplates) {
    const std::clock_t start = std::clock();  // of this process: others may be busy
    const auto text = Render(source);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_FALSE(text.ok()) << source.substr(0, 100);
    EXPECT_FALSE(text.status().message().empty()) << source.substr(0, 100);
    EXPECT_LT(seconds, 20) << source.substr(0, 100);
  }
}

TEST(ChatTemplate, LimitsAreNamedWithTheirNumbers) {
  const auto steps = Render("{% for i in range(1000) %}{{ i }}{% endfor %}", Json::object(), {500, 1 << 20, 100});
  EXPECT_EQ(steps.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(steps.status().message()).find("500"), std::string::npos) << steps.status();
  const auto bytes = Render("{% for i in range(1000) %}abc{% endfor %}", Json::object(), {1'000'000, 100'000, 100});
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  const auto output = Render("{% for i in range(99) %}{{ 'abcdefghijkl' * 9 }}{% endfor %}", Json::object(), {1'000'000, 5000, 100});
  EXPECT_EQ(output.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(output.status().message()).find("5000"), std::string::npos) << output.status();
  Json deep = Json::array();
  for (int i = 0; i < 1000; ++i) deep = Json::array({deep});
  const auto depth = Render("{{ x }}", {{"x", deep}});
  EXPECT_EQ(depth.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ChatTemplate, ThingsThatHoldThemselvesAreFreed) {  // seen by the leak checker of the sanitizer build
  EXPECT_TRUE(Render("{% set ns = namespace() %}{% set ns.me = ns %}{% macro m() %}{% endmacro %}{% set ns.m = m %}"
                     "{% set xs = [ns] %}{% set _ = xs.append(xs) %}{% set c = cycler(xs) %}{{ xs is iterable }}").ok());
}

TEST(ChatTemplate, LongConversationsFitTheLimits) {
  Json messages = Json::array();
  for (int i = 0; i < 2000; ++i) messages.push_back({{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", std::string(500, 'a')}});
  const auto text = Render("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}",
                           {{"messages", messages}});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_GT(text->size(), 1'000'000u);
}

}  // namespace
}  // namespace loupe
