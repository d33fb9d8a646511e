// What a request asks of its cache, in types: the `kv` object after parsing. Nothing here is checked against a model or a
// prompt; the registry does that. Plain values, any thread.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace loupe {

struct KvBudget {
  enum class Kind : uint8_t { kNone, kRatio, kTokens, kBytes };
  Kind kind = Kind::kNone;  // kNone: nothing is dropped
  double value = 0;
};

// Entries that stay whatever the policy.
struct KvProtect {
  std::optional<int> sinks;                   // first positions; default 4
  std::optional<int> recent;                  // last positions; default min(64, a quarter of the budget)
  std::vector<std::pair<int, int>> ranges;    // [from, to) prompt positions
  // Of a chat, counted from 0. The edge turns them into ranges, since it knows where a message lies in the prompt.
  std::vector<int> messages;
  std::vector<std::string> roles;
};

// Bits of a coordinate in which kept entries may be stored: 16 (the model's own type), 8, 4, 3, 2; 0: auto.
struct KvBits {
  int key = 0;
  int value = 0;
};

// How far the cache of a running request may be lowered under pressure; 0: not said.
struct KvFloor {
  int bits = 0;
  double ratio = 0;
};

using KvParam = std::variant<double, std::string>;

struct KvOptions {
  std::string policy = "auto";
  KvBudget budget;
  KvBits bits;
  KvFloor floor;
  KvProtect protect;
  std::string strategy;  // name of an artifact that the server was started with; empty: none named
  std::map<std::string, KvParam> params;
};

}  // namespace loupe
