#include "engine/grammar/schema_formats.h"

#include <map>

#include "absl/strings/str_cat.h"

namespace loupe::grammar {
namespace {

// Every day that exists in every year; so never 29 February.
constexpr const char* kDate =
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
constexpr const char* kTime = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
constexpr const char* kOctet = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
constexpr const char* kLabel = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?";

std::map<std::string, std::string, std::less<>> MakeFormats() {
  const std::string hostname = absl::StrCat(kLabel, "(\\.", kLabel, ")*"), h = "[0-9a-fA-F]{1,4}";
  const std::string domain = absl::StrCat(kLabel, "(\\.", kLabel, ")+"), mark = "[a-zA-Z0-9._~!$&'()*+,;=:@-]";
  return {
      {"date", kDate},
      {"time", kTime},
      {"date-time", absl::StrCat(kDate, "T", kTime)},
      {"duration",
       "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))?"
       "|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))"},
      {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
      {"ipv4", absl::StrCat(kOctet, "(\\.", kOctet, "){3}")},
      {"ipv6", absl::StrCat("(", h, "(:", h, "){7}|", h, "(:", h, "){0,5}::|::", h, "(:", h, "){0,5}|", h, "::", h, "(:", h, "){0,4}|::)")},
      {"hostname", hostname},
      {"email", absl::StrCat("[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+(\\.[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+)*@", domain)},
      {"uri", absl::StrCat("[a-zA-Z][a-zA-Z0-9+.-]*://", hostname, "(:[0-9]{1,4})?(/", mark,
                           "*)*(\\?[a-zA-Z0-9._~!$&'()*+,;=:@/?-]*)?"
                           "(#[a-zA-Z0-9._~!$&'()*+,;=:@/?-]*)?")}};
}

}  // namespace

std::string FormatExpression(std::string_view format) {
  static const auto formats = MakeFormats();
  const auto found = formats.find(format);
  return found == formats.end() ? std::string() : absl::StrCat("^(", found->second, ")$");
}

}  // namespace loupe::grammar
