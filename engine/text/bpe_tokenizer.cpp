#include "engine/text/bpe_tokenizer.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "engine/text/unicode.h"
#include "kernels/check.h"

namespace loupe {
namespace {

// The byte that a token like <0x0A> stands for, -1 if it is not spelled so.
int ByteOfName(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const size_t digit = std::string_view("0123456789ABCDEF").find(c >= 'a' ? static_cast<char>(c - 'a' + 'A') : c);
    if (digit == std::string_view::npos) return -1;
    value = value * 16 + static_cast<int>(digit);
  }
  return value;
}

std::string BytesOf(const std::string& token, TokenKind kind) {
  switch (kind) {
    case TokenKind::kNormal:
      return DecodeByteAlphabet(token);
    case TokenKind::kByte: {
      const int byte = ByteOfName(token);
      return byte >= 0 ? std::string(1, static_cast<char>(byte)) : DecodeByteAlphabet(token);
    }
    case TokenKind::kUnused:
      return "";
    default:
      return token;  // added tokens are spelled as they read
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> BpeTokenizer::Make(Vocabulary vocabulary, PreTokenizer rule) {
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const TokenKind kind = vocabulary.kinds[id];
    const size_t size = vocabulary.tokens[id].size();
    if ((IsSpecial(kind) || kind == TokenKind::kUserDefined) && size > AddedTokens::kLongestToken) {
      return absl::InvalidArgumentError(
          absl::StrFormat("added token %d has %d bytes, the limit is %d", id, size, AddedTokens::kLongestToken));
    }
  }
  std::unique_ptr<BpeTokenizer> tokenizer(new BpeTokenizer(std::move(vocabulary), rule));
  // Llama 3's rule comes with ignore_merges: a word that is a token stays whole.
  absl::StatusOr<std::unique_ptr<Bpe>> bpe =
      Bpe::Make(tokenizer->vocabulary_, tokenizer->bytes_, rule == PreTokenizer::kLlamaBpe);
  if (!bpe.ok()) return bpe.status();
  tokenizer->bpe_ = *std::move(bpe);
  std::vector<std::string>().swap(tokenizer->vocabulary_.merges);  // gives the memory back, which clear() keeps
  return std::unique_ptr<Tokenizer>(std::move(tokenizer));
}

BpeTokenizer::BpeTokenizer(Vocabulary vocabulary, PreTokenizer rule) : vocabulary_(std::move(vocabulary)), rule_(rule) {
  const size_t num_tokens = vocabulary_.tokens.size();
  std::vector<size_t> ends;
  for (size_t i = 0; i < num_tokens; ++i) {
    const std::string& token = vocabulary_.tokens[i];
    const TokenKind kind = vocabulary_.kinds[i];
    arena_ += BytesOf(token, kind);
    ends.push_back(arena_.size());
    if (token.empty()) continue;
    const int32_t id = static_cast<int32_t>(i);
    if (kind == TokenKind::kUserDefined) user_defined_.Add(token, id);
    if (kind == TokenKind::kUserDefined || IsSpecial(kind)) added_.Add(token, id);
  }
  bytes_.reserve(num_tokens);
  size_t begin = 0;
  for (const size_t end : ends) {
    bytes_.push_back(std::string_view(arena_).substr(begin, end - begin));
    begin = end;
  }
  ends_.resize(num_tokens);
  for (const int32_t id : vocabulary_.end_of_generation) ends_[id] = true;
  if (vocabulary_.eos >= 0) ends_[vocabulary_.eos] = true;
}

void BpeTokenizer::CheckId(int32_t id) const {
  LOUPE_CHECK(id >= 0 && id < vocab_size()) << "token id " << id << ", vocabulary of " << vocab_size();
}

void BpeTokenizer::EncodeWords(std::string_view text, std::vector<int32_t>* ids) const {
  std::string composed;
  // Qwen's tokenizer was trained on composed characters only.
  if (rule_ == PreTokenizer::kQwen2 && NormaliseNfc(text, &composed)) text = composed;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = NextWord(rule_, text, begin);
    bpe_->Encode(text.substr(begin, end - begin), ids);
    begin = end;
  }
}

std::vector<int32_t> BpeTokenizer::Encode(std::string_view text, bool add_special, bool parse_special) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  const bool add_bos = add_special && vocabulary_.add_bos && vocabulary_.bos >= 0;
  if (add_bos) ids.push_back(vocabulary_.bos);
  const AddedTokens& added = parse_special ? added_ : user_defined_;
  for (size_t begin = 0; begin < text.size();) {
    const AddedTokens::Match match = added.Find(text, begin);
    EncodeWords(text.substr(begin, match.begin - begin), &ids);
    if (match.id >= 0) ids.push_back(match.id);
    begin = match.end;
  }
  // A text that brings its own BOS gets no second one: models were not trained on two.
  if (add_bos && ids.size() > 1 && ids[1] == vocabulary_.bos) ids.erase(ids.begin());
  if (add_special && vocabulary_.add_eos && vocabulary_.eos >= 0) ids.push_back(vocabulary_.eos);
  return ids;
}

std::string_view BpeTokenizer::TokenBytes(int32_t id) const {
  CheckId(id);
  return bytes_[id];
}

bool BpeTokenizer::IsControl(int32_t id) const {
  CheckId(id);
  return IsSpecial(vocabulary_.kinds[id]);
}

bool BpeTokenizer::IsEndOfGeneration(int32_t id) const {
  CheckId(id);
  return ends_[id];
}

std::string_view BpeTokenizer::Piece(int32_t id) const {
  CheckId(id);
  return vocabulary_.tokens[id];
}

}  // namespace loupe
