#include "engine/grammar/tool_calls.h"

#include "absl/strings/str_cat.h"
#include "engine/grammar/json_schema.h"

namespace loupe::grammar {
namespace {

struct Form {
  const char *open, *arguments, *close, *between;
};
constexpr Form kHermes = {"<tool_call>\n{\"name\": ", ", \"arguments\": ", "}\n</tool_call>", "\n"};
constexpr Form kLlama = {"{\"name\": ", ", \"parameters\": ", "}", "; "};

}  // namespace

void AddToolCalls(NfaBuilder& nfa, StateId from, std::string_view calls, StateId to) {
  const Json asked = Json::parse(calls);
  const Form& form = asked.at("format") == "llama" ? kLlama : kHermes;
  JsonText text(nfa);
  const Rule call = nfa.NewRule();
  const StateId opened = nfa.NewState(), closing = nfa.NewState();
  nfa.AddText(call.start, form.open, opened);
  nfa.AddText(closing, form.close, call.end);
  for (const Json& tool : asked.at("tools")) {
    const std::string name = tool.at("name").get<std::string>();
    const StateId named = nfa.NewState(), arguments = nfa.NewState();
    text.AddLiteral(opened, Json(name), named);
    nfa.AddText(named, form.arguments, arguments);
    const Json& parameters = tool.at("parameters");
    try {
      // Arguments are an object, whatever else a schema says.
      if (parameters.empty()) {
        text.AddAnyObject(arguments, closing);
      } else if (parameters.contains("type")) {
        AddJsonSchema(text, arguments, parameters, closing);
      } else {
        Json object = parameters;
        object["type"] = "object";
        AddJsonSchema(text, arguments, object, closing);
      }
    } catch (const Refusal& refusal) {
      throw Refusal(absl::StrCat(name, ": ", refusal.what()));
    }
  }
  StateId before = from;
  const int most = asked.at("parallel").get<bool>() ? kMaxCalls : 1;
  for (int i = 0; i < most; ++i) {
    const StateId after = nfa.NewState();
    nfa.AddCall(before, call, after);
    nfa.AddEmpty(after, to);
    if (i + 1 == most) break;
    before = nfa.NewState();
    nfa.AddText(after, form.between, before);
  }
}

}  // namespace loupe::grammar
