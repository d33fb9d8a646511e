// Invariants that hold in release builds too: a violated one is our own bug, so the process says where and stops.
//   LOUPE_CHECK(page.count <= 64) << "page " << id;
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace loupe {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition) {
    message_ << file << ":" << line << ": check failed: " << condition << " ";
  }
  [[noreturn]] ~CheckFailure() {
    std::fprintf(stderr, "%s\n", message_.str().c_str());
    std::fflush(stderr);
    std::abort();
  }
  template <class T>
  CheckFailure& operator<<(const T& value) {
    message_ << value;
    return *this;
  }

 private:
  std::ostringstream message_;
};

}  // namespace loupe

#define LOUPE_CHECK(condition) \
  if (condition) [[likely]] {  \
  } else                       \
    ::loupe::CheckFailure(__FILE__, __LINE__, #condition)
#define LOUPE_CHECK_EQ(a, b) LOUPE_CHECK((a) == (b)) << (a) << " against " << (b) << " "
#define LOUPE_CHECK_GE(a, b) LOUPE_CHECK((a) >= (b)) << (a) << " against " << (b) << " "
#define LOUPE_CHECK_LE(a, b) LOUPE_CHECK((a) <= (b)) << (a) << " against " << (b) << " "
