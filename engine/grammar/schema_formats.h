// JSON Schema's formats as expressions that only valid ones match. Pure.
#pragma once

#include <string>
#include <string_view>

namespace loupe::grammar {

// Empty: not one of those that are kept; a format is an annotation then, as the standard has it.
std::string FormatExpression(std::string_view format);

}  // namespace loupe::grammar
