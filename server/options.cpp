#include "server/options.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "server/read_input.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

std::string FlagName(const CLI::Option* option) {
  return option->get_lnames().empty() ? std::string() : option->get_lnames().front();
}

std::string VariableName(const std::string& flag) {
  std::string name = "LOUPE_";
  for (const char c : flag) name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// Options that only make sense on a command line.
bool IsSettable(const CLI::Option* option) {
  static const std::set<std::string> kFixed = {"help", "version"};
  const std::string name = FlagName(option);
  return !name.empty() && kFixed.count(name) == 0;
}

absl::StatusOr<std::vector<std::string>> ValuesFromJson(const std::string& key, const Json& value) {
  const auto text = [](const Json& v) { return v.is_string() ? v.get<std::string>() : v.dump(); };
  if (value.is_null()) return absl::InvalidArgumentError(absl::StrCat("config key '", key, "' is null; leave it out instead"));
  if (!value.is_array()) return std::vector<std::string>{text(value)};
  std::vector<std::string> values;
  for (const Json& item : value) values.push_back(text(item));
  return values;
}

absl::StatusOr<Json> ReadConfig(const std::string& path) {
  const auto text = ReadFile("config file", path);
  if (!text.ok()) return text.status();
  // JSON allows a key twice; which of the two was meant, nobody can tell.
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto note = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) repeated = parsed.get<std::string>();
    return true;
  };
  Json json = Json::parse(*text, note, false);
  if (json.is_discarded() || !json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("config file '", path, "' is not a JSON object"));
  }
  if (!repeated.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("config file '", path, "' has the key '", repeated, "' twice; keep one"));
  }
  return json;
}

}  // namespace

OptionTable::OptionTable(CLI::App* app, CommonOptions* common) : app_(app), common_(common) {
  app->option_defaults()->always_capture_default();
  app->add_flag("--json", common->json, "machine-readable output on stdout, one JSON object a line");
  app->add_option("--log-level", common->log_level, "trace, debug, info, warning, error")
      ->check(CLI::IsMember({"trace", "debug", "info", "warning", "error"}));
  app->add_option("--config", common->config_file, "JSON file with {\"flag-name\": value}; flags and LOUPE_* override it");
  app->add_flag("--print-config", common->print_config, "print every option with its value and origin, then stop");
}

absl::Status OptionTable::Set(CLI::Option* option, const std::vector<std::string>& values, const std::string& origin) {
  // CLI11 reports bad values by exceptions; they end here.
  try {
    for (const std::string& value : values) option->add_result(value);
    option->run_callback();
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ": ", error.what()));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> OptionTable::TakeFlagOrVariable(CLI::Option* option) {
  if (option->count() > 0) {
    if (origins_.count(option) == 0) origins_[option] = "flag";
    return true;
  }
  const std::string variable = VariableName(FlagName(option));
  const char* value = std::getenv(variable.c_str());
  if (value == nullptr) return false;
  if (absl::Status set = Set(option, {value}, variable); !set.ok()) return set;
  origins_[option] = "environment";
  return true;
}

absl::Status OptionTable::Resolve() {
  // Which file it is cannot be said in the file.
  CLI::Option* config = app_->get_option("--config");
  if (auto taken = TakeFlagOrVariable(config); !taken.ok()) return taken.status();
  Json file = Json::object();
  if (!common_->config_file.empty()) {
    auto read = ReadConfig(common_->config_file);
    if (!read.ok()) return read.status();
    file = *std::move(read);
  }
  std::set<std::string> known;
  for (CLI::Option* option : app_->get_options()) {
    if (!IsSettable(option)) continue;
    const std::string flag = FlagName(option);
    if (option != config) known.insert(flag);
    const auto taken = TakeFlagOrVariable(option);
    if (!taken.ok()) return taken.status();
    if (*taken) continue;
    if (const auto it = file.find(flag); option != config && it != file.end()) {
      auto values = ValuesFromJson(flag, *it);
      if (!values.ok()) return values.status();
      absl::Status set = Set(option, *values, absl::StrCat("config key '", flag, "'"));
      if (!set.ok()) return set;
      origins_[option] = "file";
    } else {
      origins_[option] = "default";
    }
  }
  for (const auto& [key, value] : file.items()) {
    if (known.count(key) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("config file '", common_->config_file, "' has the key '", key,
                                                     "', which ", app_->get_name(), " does not know"));
    }
  }
  return absl::OkStatus();
}

std::string OptionTable::ToJson(int indent) const {
  Json out = Json::object();
  for (const CLI::Option* option : app_->get_options()) {
    const auto origin = origins_.find(option);
    if (origin == origins_.end()) continue;
    const auto& results = option->results();
    std::string value = option->get_default_str();
    if (!results.empty()) {
      value = results.front();
      for (size_t i = 1; i < results.size(); ++i) value += " " + results[i];
    }
    out[FlagName(option)] = {{"value", value}, {"origin", origin->second}};
  }
  return out.dump(indent);
}

void WarnAboutUnknownEnvironment(const CLI::App& root) {
  std::set<std::string> known;
  for (const CLI::App* sub : root.get_subcommands([](const CLI::App*) { return true; })) {
    const auto learn = [&known](const CLI::App* app) {
      for (const CLI::Option* option : app->get_options()) {
        if (IsSettable(option)) known.insert(VariableName(FlagName(option)));
      }
    };
    learn(sub);
    for (const CLI::App* inner : sub->get_subcommands([](const CLI::App*) { return true; })) learn(inner);
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    const auto begins = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
    if (!begins("LOUPE_") || begins("LOUPE_PORT") || begins("LOUPE_SERVICE") || begins("LOUPE_TEST_")) continue;
    if (known.count(name) == 0) std::fprintf(stderr, "warning: environment variable %s sets no flag of loupe\n", name.c_str());
  }
}

constexpr double kMaxSize = 8e6 * 1099511627776.;  // fits an int64_t

absl::StatusOr<int64_t> ParseSize(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit(end);
  unit.erase(std::remove(unit.begin(), unit.end(), ' '), unit.end());
  static const std::map<std::string, double> kUnits = {
      {"", 1},         {"B", 1},          {"k", 1e3},        {"K", 1024.},     {"KB", 1e3},      {"Ki", 1024.},
      {"KiB", 1024.},  {"M", 1e6},        {"MB", 1e6},       {"Mi", 1048576.}, {"MiB", 1048576.}, {"G", 1e9},
      {"GB", 1e9},     {"Gi", 1073741824.}, {"GiB", 1073741824.}, {"T", 1e12}, {"TB", 1e12},     {"Ti", 1099511627776.},
      {"TiB", 1099511627776.}};
  const auto it = kUnits.find(unit);
  if (end != text.c_str() && it != kUnits.end() && number * it->second > kMaxSize) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is too large a size; the limit is 8000000TiB"));
  }
  if (end == text.c_str() || it == kUnits.end() || !std::isfinite(number) || number < 0) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a size; write 512MiB, 40Gi or plain bytes"));
  }
  return static_cast<int64_t>(number * it->second);
}

std::string FormatSize(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  if (unit == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat("%.1f %s", value, units[unit]);
}

CLI::Option* AddSizeOption(CLI::App* app, const std::string& name, int64_t* bytes, bool allow_auto, const std::string& help) {
  const auto parse = [bytes, allow_auto](const std::string& text) {
    if (allow_auto && text == "auto") {
      *bytes = 0;
      return;
    }
    const auto size = ParseSize(text);
    if (!size.ok()) throw CLI::ValidationError(std::string(size.status().message()));
    *bytes = *size;
  };
  CLI::Option* option = app->add_option_function<std::string>(name, parse, help);
  option->type_name("SIZE");
  option->default_str(*bytes == 0 && allow_auto ? "auto" : std::to_string(*bytes));
  return option;
}

}  // namespace loupe
