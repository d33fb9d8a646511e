// Cuts text into the words inside which byte pairs are merged. The rules are those of the regular expressions that
// models were trained with, as hand-written scanners: linear time on any input, where a regex engine backtracks.
// Stateless; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace loupe {

enum class PreTokenizer { kGpt2, kSmolLm, kLlamaBpe, kQwen2 };

// By the name in model files; nothing if there is no such rule here.
std::optional<PreTokenizer> FindPreTokenizer(std::string_view name);
// The names, for error messages.
std::string_view PreTokenizerNames();

// End of the word that starts at `begin`, which must be inside `text`. Words are never empty and leave nothing out.
size_t NextWord(PreTokenizer rule, std::string_view text, size_t begin);

}  // namespace loupe
