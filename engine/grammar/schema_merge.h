// Schemas as values: the schema of what satisfies two of them, and whether nothing can. Pure.
#pragma once

#include <set>
#include <string>

#include "engine/grammar/json_text.h"

namespace loupe::grammar {

enum class Keyword {
  kOffered,     // changes what is written
  kAnnotation,  // says nothing about what is valid
  kRefused,     // restricts in a way that is not offered
};
// Unknown ones are annotations, as the standard has it.
Keyword KindOf(const std::string& keyword);

// Types that the schema allows: those it names, or those that its keywords speak of, or all.
std::set<std::string> TypesOf(const Json& schema);

// What merging needs of the whole.
class Resolver {
 public:
  virtual ~Resolver() = default;
  // What a $ref points to. Refusal: nothing.
  virtual const Json& Resolve(const std::string& reference) const = 0;
  // Refusal or Cancelled if the time is over.
  virtual void CheckTime() const = 0;
};

// What satisfies both, references of either resolved. Refusal if two keywords cannot be put together. `depth` counts how
// far references led.
Json MergeSchemas(const Json& a, const Json& b, const Resolver& resolve, int depth = 0);
// Refusal if the lists are too long to be compared item by item.
void CheckProduct(const Json& a, const Json& b, const char* what);

// Surely no value satisfies both; false if that cannot be told.
bool AreDisjoint(const Json& a, const Json& b, const Resolver& resolve, int depth = 0);

}  // namespace loupe::grammar
