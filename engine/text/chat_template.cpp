#include "engine/text/chat_template.h"

#include "absl/strings/str_cat.h"
#include "engine/text/jinja_interp.h"
#include "engine/text/jinja_parser.h"
#include "nlohmann/json.hpp"

namespace loupe {
namespace {

constexpr size_t kLongestSource = 4 << 20;  // bytes

jinja::Value FromJson(jinja::Budget& budget, const nlohmann::ordered_json& json, int depth) {
  using jinja::Value;
  budget.Charge();
  budget.CheckDepth(depth);
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::boolean: return Value::Bool(json.get<bool>());
    case nlohmann::ordered_json::value_t::number_integer: return Value::Int(json.get<int64_t>());
    case nlohmann::ordered_json::value_t::number_unsigned: {
      const auto number = json.get<uint64_t>();
      return number > INT64_MAX ? Value::Float(static_cast<double>(number)) : Value::Int(static_cast<int64_t>(number));
    }
    case nlohmann::ordered_json::value_t::number_float: return Value::Float(json.get<double>());
    case nlohmann::ordered_json::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      budget.ChargeBytes(text.size());
      return Value::String(text);
    }
    case nlohmann::ordered_json::value_t::array: {
      std::vector<Value> items;
      for (const auto& item : json) items.push_back(FromJson(budget, item, depth + 1));
      return MakeList(budget, std::move(items));
    }
    case nlohmann::ordered_json::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& [key, value] : json.items()) items.emplace_back(Value::String(key), FromJson(budget, value, depth + 1));
      return MakeDict(budget, std::move(items));
    }
    default: return Value::None();
  }
}

// The one place where the exceptions of the template language end.
absl::Status ToStatus(const jinja::Error& error) {
  std::string where;
  if (error.line > 0) absl::StrAppend(&where, ", line ", error.line);
  if (error.column > 0) absl::StrAppend(&where, ", column ", error.column);
  switch (error.kind) {
    case jinja::ErrorKind::kRaised: return absl::InvalidArgumentError(error.what());
    case jinja::ErrorKind::kLimit: return absl::ResourceExhaustedError(absl::StrCat("chat template", where, ": ", error.what()));
    case jinja::ErrorKind::kSyntax:
    case jinja::ErrorKind::kFailed: break;
  }
  return absl::InvalidArgumentError(absl::StrCat("chat template", where, ": ", error.what()));
}

}  // namespace

struct ChatTemplate::Impl {
  std::string source;
  ChatTemplateContext context;
  TemplateLimits limits;
  jinja::Body body;
};

ChatTemplate::ChatTemplate() : impl_(std::make_unique<Impl>()) {}
ChatTemplate::~ChatTemplate() = default;

const std::string& ChatTemplate::source() const { return impl_->source; }

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source, ChatTemplateContext context,
                                                                  TemplateLimits limits) {
  if (source.size() > kLongestSource) {
    return absl::ResourceExhaustedError(absl::StrCat("chat template: ", source.size(), " bytes, at most ", kLongestSource));
  }
  std::unique_ptr<ChatTemplate> parsed(new ChatTemplate);
  parsed->impl_->source = std::string(source);
  parsed->impl_->context = std::move(context);
  parsed->impl_->limits = limits;
  try {
    parsed->impl_->body = jinja::Parse(source, limits);
  } catch (const jinja::Error& error) {
    return ToStatus(error);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("chat template: not enough memory to read it");
  }
  return parsed;
}

absl::StatusOr<std::string> ChatTemplate::Render(const nlohmann::ordered_json& variables) const {
  if (!variables.is_object()) return absl::InvalidArgumentError("chat template: its variables must be a JSON object");
  jinja::Interpreter interpreter(impl_->limits, impl_->context);
  try {
    std::unordered_map<std::string, jinja::Value> values;
    values["bos_token"] = jinja::Value::String(impl_->context.bos_token);
    values["eos_token"] = jinja::Value::String(impl_->context.eos_token);
    values["tools"] = values["documents"] = jinja::Value::None();
    for (const auto& [name, value] : variables.items()) values[name] = FromJson(interpreter.budget(), value, 0);
    return interpreter.Run(impl_->body, std::move(values));
  } catch (const jinja::Error& error) {
    if (error.line > 0 || interpreter.line() == 0) return ToStatus(error);
    return ToStatus(jinja::Error(error.kind, error.what(), interpreter.line()));
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("chat template: not enough memory to render it");
  }
}

}  // namespace loupe
