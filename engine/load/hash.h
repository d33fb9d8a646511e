// FNV-1a in words of 8 bytes, for what is only told apart and never attacked: weights of models, texts of artifacts.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace loupe {

inline constexpr uint64_t kHashStart = 14695981039346656037u;

inline uint64_t HashWords(std::string_view bytes, uint64_t hash = kHashStart) {
  constexpr uint64_t kPrime = 1099511628211u;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    hash = (hash ^ word) * kPrime;
  }
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  return hash;
}

}  // namespace loupe
