// Filters by name, in two halves: those on text and numbers, those on lists and dicts.
#pragma once

#include <string>
#include <unordered_map>

#include "engine/text/jinja_interp.h"

namespace loupe::jinja {

using FilterTable = std::unordered_map<std::string, FilterFunction>;
const FilterTable& TextFilters();
const FilterTable& ListFilters();

}  // namespace loupe::jinja
