// Byte-pair merging: bytes of one word to token ids. Knows nothing of words, special tokens or Unicode. Immutable after
// creation but for relaxed flags that remember what merging found: any thread may encode.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "engine/text/tokenizer.h"

namespace loupe {

// GPT-2's spelling of bytes as printable characters. DecodeByteAlphabet returns the token as it is if it has characters
// outside the alphabet.
std::string EncodeByteAlphabet(std::string_view bytes);
std::string DecodeByteAlphabet(std::string_view token);

class Bpe {
 public:
  // `bytes[id]` are the exact bytes of each token. `whole_words`: a word that is a token is never merged from its parts
  // (ignore_merges). INVALID_ARGUMENT names the merge that is not one.
  static absl::StatusOr<std::unique_ptr<Bpe>> Make(const Vocabulary& vocabulary,
                                                   const std::vector<std::string_view>& bytes, bool whole_words);

  // Appends the ids of one word. Bytes for which the vocabulary has no token vanish before merging. O(n log n).
  void Encode(std::string_view word, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    uint64_t pair = kNoPair;  // left id << 32 | right id
    uint32_t rank = kNoRank;
    int32_t merged = -1;
  };
  struct WordSlot {
    uint32_t hash = 0;
    int32_t id = -1;
  };
  enum WholeWord : uint8_t { kNotTried, kYes, kNo };  // whether merging a token's bytes gives the token

  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static constexpr uint32_t kNoRank = ~uint32_t{0};

  Bpe() = default;
  absl::Status AddMerges(const Vocabulary& vocabulary);
  void AddWords(const Vocabulary& vocabulary, const std::vector<std::string_view>& bytes);
  const Merge& FindMerge(int32_t left, int32_t right) const;
  int32_t FindWord(std::string_view word) const;
  void MergeShort(std::string_view word, std::vector<int32_t>* ids) const;
  void MergeLong(std::string_view word, std::vector<int32_t>* ids) const;
  void MergeWord(std::string_view word, std::vector<int32_t>* ids) const;

  bool whole_words_ = false;
  size_t longest_word_ = 0;                 // bytes of the longest entry of words_
  std::array<int32_t, 256> byte_ids_ = {};  // -1 where the vocabulary has none
  std::vector<Merge> merges_;               // open addressing, power of two, half full at most
  std::vector<WordSlot> words_;             // likewise, bytes of a token to its id
  std::vector<std::string_view> bytes_;
  std::unique_ptr<std::atomic<uint8_t>[]> is_whole_;  // WholeWord of each id
};

}  // namespace loupe
