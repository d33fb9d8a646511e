// Any text is a profile that holds, or is refused; what is read is written and read again to the same.
#include <string>

#include "engine/load/profile_file.h"
#include "kernels/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = loupe::ParseProfile(std::string(reinterpret_cast<const char*>(data), size), "x");
  if (!read.ok()) return 0;
  LOUPE_CHECK(loupe::CheckProfile(*read).ok());
  const std::string text = loupe::ProfileToText(*read, nlohmann::ordered_json::object());
  const auto again = loupe::ParseProfile(text, "x");
  LOUPE_CHECK(again.ok()) << again.status().ToString();
  LOUPE_CHECK(loupe::ProfileToText(*again, nlohmann::ordered_json::object()) == text);
  return 0;
}
