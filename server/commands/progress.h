// How far a long command has come, for people: one line on stderr that is written over, or a line every tenth where
// nobody watches. One thread.
#pragma once

#include <functional>
#include <string>

namespace loupe {

// Called now and then with the share done, 0 to 1, and what is under way.
std::function<void(double, const std::string&)> ProgressOnStderr();

}  // namespace loupe
