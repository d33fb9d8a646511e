#include "engine/text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <queue>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/text/unicode.h"

namespace loupe {
namespace {

// Below this many bytes a scan over a small array beats a heap.
constexpr size_t kShortWord = 48;
// Positions are 32 bits wide; a longer word, which no request can carry, is cut.
constexpr size_t kLongestWord = size_t{1} << 30;

uint64_t Mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15u;
  return x ^ (x >> 29);
}

uint32_t HashBytes(std::string_view bytes) {
  uint64_t hash = Mix(bytes.size());
  while (bytes.size() >= 8) {
    uint64_t chunk;
    std::memcpy(&chunk, bytes.data(), 8);
    hash = Mix(hash ^ chunk);
    bytes.remove_prefix(8);
  }
  uint64_t rest = 0;
  for (const char c : bytes) rest = (rest << 8) | static_cast<unsigned char>(c);
  return static_cast<uint32_t>(Mix(hash ^ rest) >> 16);
}

uint64_t PairKey(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

// Bytes that print as themselves in the alphabet; the others follow from U+0100 in their order.
bool PrintsItself(int byte) { return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174; }

struct Alphabet {
  std::array<char32_t, 256> character = {};
  std::array<int16_t, 0x180> byte = {};  // -1 outside the alphabet

  Alphabet() {
    byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      character[b] = PrintsItself(b) ? static_cast<char32_t>(b) : next++;
      byte[character[b]] = static_cast<int16_t>(b);
    }
  }
};

const Alphabet& GetAlphabet() {
  static const Alphabet alphabet;
  return alphabet;
}

}  // namespace

std::string EncodeByteAlphabet(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) AppendUtf8(GetAlphabet().character[static_cast<unsigned char>(c)], &out);
  return out;
}

std::string DecodeByteAlphabet(std::string_view token) {
  const Alphabet& alphabet = GetAlphabet();
  std::string out;
  for (size_t pos = 0; pos < token.size();) {
    char32_t c = 0;
    const int bytes = DecodeUtf8(token.substr(pos), &c);
    if (bytes == 0 || c >= alphabet.byte.size() || alphabet.byte[c] < 0) return std::string(token);
    out.push_back(static_cast<char>(alphabet.byte[c]));
    pos += bytes;
  }
  return out;
}

absl::StatusOr<std::unique_ptr<Bpe>> Bpe::Make(const Vocabulary& vocabulary, const std::vector<std::string_view>& bytes,
                                               bool whole_words) {
  std::unique_ptr<Bpe> bpe(new Bpe);
  bpe->whole_words_ = whole_words;
  bpe->bytes_ = bytes;
  bpe->byte_ids_.fill(-1);
  bpe->is_whole_ = std::make_unique<std::atomic<uint8_t>[]>(bytes.size());
  bpe->AddWords(vocabulary, bytes);
  if (absl::Status status = bpe->AddMerges(vocabulary); !status.ok()) return status;
  return bpe;
}

void Bpe::AddWords(const Vocabulary& vocabulary, const std::vector<std::string_view>& bytes) {
  words_.resize(std::bit_ceil(bytes.size() * 2 + 2));
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int32_t id = static_cast<int32_t>(i);
    const TokenKind kind = vocabulary.kinds[i];
    if (kind == TokenKind::kNormal && bytes[i].size() == 1) {
      int32_t& byte_id = byte_ids_[static_cast<unsigned char>(bytes[i][0])];
      if (byte_id < 0 || vocabulary.kinds[byte_id] == TokenKind::kByte) byte_id = id;
    } else if (kind == TokenKind::kByte && bytes[i].size() == 1) {
      int32_t& byte_id = byte_ids_[static_cast<unsigned char>(bytes[i][0])];
      if (byte_id < 0) byte_id = id;
    }
    if (kind != TokenKind::kNormal || bytes[i].empty() || FindWord(bytes[i]) >= 0) continue;
    const uint32_t hash = HashBytes(bytes[i]);
    size_t slot = hash & (words_.size() - 1);
    while (words_[slot].id >= 0) slot = (slot + 1) & (words_.size() - 1);
    words_[slot] = {hash, id};
    longest_word_ = std::max(longest_word_, bytes[i].size());
  }
}

absl::Status Bpe::AddMerges(const Vocabulary& vocabulary) {
  // Of equally spelled tokens the first that text may become, else the first.
  std::unordered_map<std::string_view, int32_t> ids;
  for (const bool special : {false, true}) {
    for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
      if (IsSpecial(vocabulary.kinds[i]) == special) ids.emplace(vocabulary.tokens[i], static_cast<int32_t>(i));
    }
  }
  merges_.resize(std::bit_ceil(vocabulary.merges.size() * 2 + 2));
  std::string merged;
  for (size_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const std::string_view line = vocabulary.merges[rank];
    const size_t space = line.empty() ? std::string_view::npos : line.find(' ', 1);
    const auto fail = [&](const char* what) {
      return absl::InvalidArgumentError(absl::StrFormat("merge %d of %d, \"%s\", %s; the vocabulary is damaged", rank,
                                                        vocabulary.merges.size(), std::string(line.substr(0, 80)),
                                                        what));
    };
    if (space == std::string_view::npos || space + 1 == line.size())
      return fail("is not two parts with a space between");
    const std::string_view left = line.substr(0, space);
    const std::string_view right = line.substr(space + 1);
    merged.assign(left).append(right);
    const auto left_id = ids.find(left), right_id = ids.find(right), merged_id = ids.find(merged);
    if (left_id == ids.end()) return fail("has a left part that is no token");
    if (right_id == ids.end()) return fail("has a right part that is no token");
    if (merged_id == ids.end()) return fail("makes something that is no token");
    // Plain text must never become a special token, whatever the merges say.
    if (IsSpecial(vocabulary.kinds[merged_id->second])) continue;
    const uint64_t key = PairKey(left_id->second, right_id->second);
    size_t slot = Mix(key) & (merges_.size() - 1);
    while (merges_[slot].pair != kNoPair && merges_[slot].pair != key) slot = (slot + 1) & (merges_.size() - 1);
    if (merges_[slot].pair == kNoPair) merges_[slot] = {key, static_cast<uint32_t>(rank), merged_id->second};
  }
  return absl::OkStatus();
}

const Bpe::Merge& Bpe::FindMerge(int32_t left, int32_t right) const {
  const uint64_t key = PairKey(left, right);
  size_t slot = Mix(key) & (merges_.size() - 1);
  while (merges_[slot].pair != key && merges_[slot].pair != kNoPair) slot = (slot + 1) & (merges_.size() - 1);
  return merges_[slot];
}

int32_t Bpe::FindWord(std::string_view word) const {
  const uint32_t hash = HashBytes(word);
  size_t slot = hash & (words_.size() - 1);
  while (words_[slot].id >= 0) {
    if (words_[slot].hash == hash && bytes_[words_[slot].id] == word) return words_[slot].id;
    slot = (slot + 1) & (words_.size() - 1);
  }
  return -1;
}

void Bpe::Encode(std::string_view word, std::vector<int32_t>* ids) const {
  while (word.size() > kLongestWord) {
    MergeWord(word.substr(0, kLongestWord), ids);
    word.remove_prefix(kLongestWord);
  }
  const int32_t id = word.size() <= longest_word_ ? FindWord(word) : -1;
  if (id < 0) return MergeWord(word, ids);
  const uint8_t known = whole_words_ ? uint8_t{kYes} : is_whole_[id].load(std::memory_order_relaxed);
  if (known == kYes) {
    ids->push_back(id);
    return;
  }
  const size_t before = ids->size();
  MergeWord(word, ids);
  if (known == kNo) return;
  // Two threads may find this out at the same time; both find the same.
  const bool is_whole = ids->size() == before + 1 && ids->back() == id;
  is_whole_[id].store(is_whole ? kYes : kNo, std::memory_order_relaxed);
}

void Bpe::MergeWord(std::string_view word, std::vector<int32_t>* ids) const {
  word.size() <= kShortWord ? MergeShort(word, ids) : MergeLong(word, ids);
}

void Bpe::MergeShort(std::string_view word, std::vector<int32_t>* ids) const {
  std::array<int32_t, kShortWord> parts;
  std::array<const Merge*, kShortWord> joins = {};  // [i]: what parts i and i + 1 become
  int count = 0;
  for (const char c : word) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    if (id >= 0) parts[count++] = id;
  }
  for (int i = 0; i + 1 < count; ++i) joins[i] = &FindMerge(parts[i], parts[i + 1]);
  while (count > 1) {
    int best = 0;
    for (int i = 1; i + 1 < count; ++i) {
      if (joins[i]->rank < joins[best]->rank) best = i;
    }
    if (joins[best]->rank == kNoRank) break;
    parts[best] = joins[best]->merged;
    for (int i = best + 1; i + 1 < count; ++i) {
      parts[i] = parts[i + 1];
      joins[i] = joins[i + 1];
    }
    --count;
    if (best > 0) joins[best - 1] = &FindMerge(parts[best - 1], parts[best]);
    if (best + 1 < count) joins[best] = &FindMerge(parts[best], parts[best + 1]);
  }
  ids->insert(ids->end(), parts.begin(), parts.begin() + count);
}

void Bpe::MergeLong(std::string_view word, std::vector<int32_t>* ids) const {
  struct Part {
    int32_t id = -1;  // -1: merged into its left neighbour
    int32_t previous = -1;
    int32_t next = -1;
  };
  std::vector<Part> parts;
  parts.reserve(word.size());
  for (const char c : word) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    if (id < 0) continue;
    const int32_t here = static_cast<int32_t>(parts.size());
    if (here > 0) parts.back().next = here;
    parts.push_back({id, here - 1, -1});
  }
  // Candidates are rank << 32 | position, so that the smallest is the best merge, leftmost first. One whose neighbours
  // have changed since is known by its rank, which belongs to one pair only.
  std::vector<uint64_t> heap;
  const auto candidate = [&](int32_t left) -> const Merge* {
    const int32_t right = left < 0 ? -1 : parts[left].next;
    if (right < 0) return nullptr;
    const Merge& merge = FindMerge(parts[left].id, parts[right].id);
    return merge.rank == kNoRank ? nullptr : &merge;
  };
  const auto key = [](const Merge& merge, int32_t left) {
    return (uint64_t{merge.rank} << 32) | static_cast<uint32_t>(left);
  };
  for (int32_t i = 0; i < static_cast<int32_t>(parts.size()); ++i) {
    if (const Merge* merge = candidate(i)) heap.push_back(key(*merge, i));
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue(std::greater<>(), std::move(heap));
  while (!queue.empty()) {
    const uint64_t top = queue.top();
    queue.pop();
    const int32_t left = static_cast<int32_t>(top & 0xFFFFFFFFu);
    if (parts[left].id < 0) continue;
    const Merge* merge = candidate(left);
    if (merge == nullptr || merge->rank != top >> 32) continue;
    Part& gone = parts[parts[left].next];
    parts[left].id = merge->merged;
    parts[left].next = gone.next;
    gone.id = -1;
    if (parts[left].next >= 0) parts[parts[left].next].previous = left;
    const int32_t previous = parts[left].previous;
    if (const Merge* next = candidate(previous)) queue.push(key(*next, previous));
    if (const Merge* next = candidate(left)) queue.push(key(*next, left));
  }
  for (const Part& part : parts) {
    if (part.id >= 0) ids->push_back(part.id);
  }
}

}  // namespace loupe
