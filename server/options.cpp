#include "server/options.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

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
  static const std::set<std::string> kFixed = {"help", "version", "config", "print-config"};
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
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot open config file '", path, "'"));
  Json json = Json::parse(file, nullptr, false);
  if (json.is_discarded() || !json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("config file '", path, "' is not a JSON object"));
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

absl::Status OptionTable::Resolve() {
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
    known.insert(flag);
    const std::string variable = VariableName(flag);
    const char* from_environment = std::getenv(variable.c_str());
    if (option->count() > 0) {
      origins_[option] = "flag";
    } else if (from_environment != nullptr) {
      absl::Status set = Set(option, {from_environment}, variable);
      if (!set.ok()) return set;
      origins_[option] = "environment";
    } else if (const auto it = file.find(flag); it != file.end()) {
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

std::string OptionTable::ToJson() const {
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
  return out.dump(2);
}

void WarnAboutUnknownEnvironment(const CLI::App& root) {
  std::set<std::string> known;
  for (const CLI::App* sub : root.get_subcommands([](const CLI::App*) { return true; })) {
    for (const CLI::Option* option : sub->get_options()) known.insert(VariableName(FlagName(option)));
    for (const CLI::App* inner : sub->get_subcommands([](const CLI::App*) { return true; })) {
      for (const CLI::Option* option : inner->get_options()) known.insert(VariableName(FlagName(option)));
    }
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    const auto begins = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
    if (!begins("LOUPE_") || begins("LOUPE_PORT") || begins("LOUPE_SERVICE") || begins("LOUPE_TEST_")) continue;
    if (known.count(name) == 0) std::fprintf(stderr, "warning: environment variable %s sets no flag of loupe\n", name.c_str());
  }
}

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
  if (end == text.c_str() || it == kUnits.end() || !std::isfinite(number) || number < 0 || number * it->second > 9e18) {
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
