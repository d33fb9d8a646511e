#include "engine/text/stream_decoder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/engine/text/small_vocabulary.h"

namespace loupe {
namespace {

class StreamDecoderTest : public ::testing::Test {
 protected:
  StreamDecoderTest() {
    Vocabulary vocabulary = SmallVocabulary("gpt2", "abc\xC3\xA9", 60, 9);
    control_ = AddToken(&vocabulary, "<end>", TokenKind::kControl);
    tokenizer_ = *MakeTokenizer(std::move(vocabulary));
  }

  // Pushes byte by byte; all that came out.
  std::string PushBytes(StreamDecoder* decoder, const std::string& bytes) {
    std::string out;
    for (const char c : bytes) out += decoder->Push(static_cast<unsigned char>(c));
    return out;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  int32_t control_ = -1;
};

std::string Repaired(const std::string& bytes) {
  Utf8Repair repair;
  std::string out;
  repair.Push(bytes, &out);
  repair.Finish(&out);
  return out;
}

TEST_F(StreamDecoderTest, EmitsWholeCharactersOnly) {
  StreamDecoder decoder(*tokenizer_, {}, false);
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Push(0x9F), "");
  EXPECT_EQ(decoder.Push(0x99), "");
  EXPECT_EQ(decoder.Push(0x82), "🙂");
  EXPECT_EQ(decoder.Push(0xE5), "");
  EXPECT_EQ(decoder.Push('a'), "\uFFFDa");
  EXPECT_EQ(decoder.Push(control_), "");
  EXPECT_EQ(decoder.Push(0xE5), "");
  EXPECT_EQ(decoder.Flush(), "\uFFFD");
  EXPECT_EQ(decoder.Flush(), "");
}

TEST_F(StreamDecoderTest, HoldsBackOnlyWhatMayBecomeAStop) {
  StreamDecoder decoder(*tokenizer_, {"abc"}, false);
  EXPECT_EQ(decoder.Push('x'), "x");
  EXPECT_EQ(decoder.Push('a'), "");
  EXPECT_EQ(decoder.Push('b'), "");
  EXPECT_EQ(decoder.Push('a'), "ab");
  EXPECT_EQ(decoder.Push('d'), "ad");
  EXPECT_EQ(PushBytes(&decoder, "ab"), "");
  EXPECT_EQ(decoder.Flush(), "ab");
  EXPECT_FALSE(decoder.stopped());
}

TEST_F(StreamDecoderTest, StopsAcrossTokensAndStaysStopped) {
  for (const bool include : {false, true}) {
    StreamDecoder decoder(*tokenizer_, {"\n\nHuman:", "", "end"}, include);
    EXPECT_EQ(PushBytes(&decoder, "hi\n\nHuman: x"), include ? "hi\n\nHuman:" : "hi");
    EXPECT_TRUE(decoder.stopped());
    EXPECT_EQ(decoder.matched(), "\n\nHuman:");
    EXPECT_EQ(decoder.Push('x'), "");
    EXPECT_EQ(decoder.Flush(), "");
  }
}

TEST_F(StreamDecoderTest, FirstCompleteStopWinsThenTheLongest) {
  StreamDecoder inner(*tokenizer_, {"abcd", "bc"}, false);
  EXPECT_EQ(PushBytes(&inner, "xabcd"), "xa");
  EXPECT_EQ(inner.matched(), "bc");
  StreamDecoder same_end(*tokenizer_, {"c", "abc", "bc"}, false);
  EXPECT_EQ(PushBytes(&same_end, "xabc"), "x");
  EXPECT_EQ(same_end.matched(), "abc");
}

TEST_F(StreamDecoderTest, StopsThatMayNotCountYetArePassedOver) {
  StreamDecoder decoder(*tokenizer_, {"ab"}, false);
  std::string out = decoder.Push('a', false);
  out += decoder.Push('b', false);
  EXPECT_EQ(out, "ab");
  out += decoder.Push('a', false);
  out += decoder.Push('b', true);  // the stop ends here, where it counts
  EXPECT_EQ(out, "ab");
  EXPECT_TRUE(decoder.stopped());
}

TEST_F(StreamDecoderTest, BrokenCharactersMayCompleteAStop) {
  StreamDecoder decoder(*tokenizer_, {"x\uFFFD"}, false);
  EXPECT_EQ(PushBytes(&decoder, "ax\xE5"), "a");
  EXPECT_EQ(decoder.Flush(), "");
  EXPECT_TRUE(decoder.stopped());
  StreamDecoder bytes(*tokenizer_, {"\xFF"}, false);  // meets repaired text, so it is repaired as well
  EXPECT_EQ(PushBytes(&bytes,
                      "a\xFE"
                      "b"),
            "a");
  EXPECT_EQ(bytes.matched(), "\xFF");
}

// Everything at once against a search over the whole text: token by token what came out is a prefix of the answer, and
// what is held back is as short as it can be.
TEST_F(StreamDecoderTest, EqualsASearchOverTheWholeText) {
  for (uint32_t seed = 1; seed <= 3000; ++seed) {
    std::mt19937 random(seed);
    const std::string letters = seed % 3 == 0 ? "ab" : "abc\xC3\xA9";
    const auto random_text = [&](size_t size) {
      std::string text;
      while (text.size() < size) text.push_back(letters[random() % letters.size()]);
      return text;
    };
    std::vector<std::string> stops;
    for (size_t i = random() % 4; i > 0; --i) stops.push_back(Repaired(random_text(1 + random() % 6)));
    const bool include = random() % 2 == 0;
    std::vector<int32_t> tokens;
    for (int i = 0; i < 25; ++i) tokens.push_back(static_cast<int32_t>(random() % 8 ? 256 + random() % 40 : 'a'));
    const std::string text = Repaired(tokenizer_->Decode(tokens));
    size_t end = text.size() + 1, length = 0;  // of the first complete stop
    for (const std::string& stop : stops) {
      const size_t found = text.find(stop);
      if (found == std::string::npos) continue;
      if (found + stop.size() < end || (found + stop.size() == end && stop.size() > length)) {
        end = found + stop.size();
        length = stop.size();
      }
    }
    const bool stops_here = end <= text.size();
    const std::string expected = !stops_here ? text : text.substr(0, include ? end : end - length);
    StreamDecoder decoder(*tokenizer_, stops, include);
    std::string out;
    for (const int32_t token : tokens) {
      const std::string piece = decoder.Push(token);
      ASSERT_EQ(Repaired(piece), piece) << "seed " << seed << ": half a character";
      out += piece;
      ASSERT_EQ(expected.substr(0, out.size()), out) << "seed " << seed;
    }
    out += decoder.Flush();
    ASSERT_EQ(out, expected) << "seed " << seed;
    ASSERT_EQ(decoder.stopped(), stops_here) << "seed " << seed;
    if (stops_here) {
      ASSERT_EQ(decoder.matched(), text.substr(end - length, length)) << "seed " << seed;
    }
  }
}

TEST_F(StreamDecoderTest, LongStreamsTakeLinearTime) {
  const std::string long_stop = std::string(100'000, 'a') + "b";
  StreamDecoder decoder(*tokenizer_, {long_stop, "aac"}, false);
  const auto start = std::chrono::steady_clock::now();
  size_t emitted = 0;
  for (int i = 0; i < 400'000; ++i) emitted += decoder.Push('a').size();
  EXPECT_EQ(emitted, 300'000u);  // all but a longest prefix of the stop string
  EXPECT_EQ(decoder.Push('b'), "");
  EXPECT_TRUE(decoder.stopped());
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5);
}

}  // namespace
}  // namespace loupe
