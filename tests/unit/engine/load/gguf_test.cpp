#include "engine/load/gguf.h"

#include <functional>
#include <limits>

#include "gtest/gtest.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

using testing::Bytes;
using testing::GgufWriter;
using testing::LengthAndText;

GgufWriter SmallFile() {
  GgufWriter w;
  w.U32("some.count", 7);
  w.Strings("some.list", {"a", "", "long text"});
  w.Tensor("first", {32, 2}, 8, std::string(68, '\1'));
  w.Tensor("second", {5}, 0, std::string(20, '\2'));
  return w;
}

TEST(GgufTest, ReadsWhatTheWriterWrote) {
  for (uint32_t version : {2u, 3u}) {
    GgufWriter w = SmallFile();
    w.version = version;
    w.Raw("a.u8", 0, Bytes<uint8_t>(200));
    w.Raw("a.i64", 11, Bytes<int64_t>(-5));
    w.Raw("a.u64", 10, Bytes<uint64_t>(std::numeric_limits<uint64_t>::max()));
    w.Raw("a.f64", 12, Bytes(0.25));
    w.F32("a.f32", 0.5f);
    w.Bool("a.bool", true);
    w.Ints("a.ints", {3, -4});
    const std::string file = w.Build();
    auto gguf = Gguf::Parse(file);
    ASSERT_TRUE(gguf.ok()) << gguf.status();
    EXPECT_EQ(gguf->version(), version);
    EXPECT_EQ(*gguf->Int("some.count", 0, 10), 7);
    EXPECT_EQ(*gguf->Int("a.u8", 0, 255), 200);
    EXPECT_EQ(*gguf->Int("a.i64", -10, 10), -5);
    EXPECT_FALSE(gguf->Int("a.u64", 0, std::numeric_limits<int64_t>::max()).ok());
    EXPECT_EQ(*gguf->Number("a.f64"), 0.25);
    EXPECT_EQ(*gguf->Number("a.f32"), 0.5);
    EXPECT_EQ(*gguf->Number("a.i64"), -5.0);
    EXPECT_TRUE(*gguf->BoolOr("a.bool", false));
    EXPECT_TRUE(*gguf->BoolOr("a.absent", true));
    EXPECT_EQ(*gguf->Ints("a.ints"), (std::vector<int64_t>{3, -4}));
    EXPECT_EQ(*gguf->Strings("some.list"), (std::vector<std::string>{"a", "", "long text"}));
    EXPECT_EQ(*gguf->IntOr("a.absent", 3, 0, 1), 3);
    const GgufTensor* first = gguf->FindTensor("first");
    ASSERT_TRUE(first);
    EXPECT_STREQ(first->type->name, "Q8_0");
    EXPECT_EQ(first->bytes, 68);
    EXPECT_EQ(file.substr(static_cast<size_t>(first->offset), 68), std::string(68, '\1'));
    const GgufTensor* second = gguf->FindTensor("second");
    ASSERT_TRUE(second);
    EXPECT_EQ(file.substr(static_cast<size_t>(second->offset), 20), std::string(20, '\2'));
    EXPECT_FALSE(gguf->FindTensor("third"));
  }
}

TEST(GgufTest, HonoursTheAlignmentOfTheFile) {
  GgufWriter w = SmallFile();
  w.U32("general.alignment", 256);
  w.alignment = 256;
  const std::string file = w.Build();
  auto gguf = Gguf::Parse(file);
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ(gguf->FindTensor("first")->offset % 256, 0);
  EXPECT_EQ(gguf->FindTensor("second")->offset, gguf->FindTensor("first")->offset + 256);
}

TEST(GgufTest, AccessNamesTheKeyAndWhatIsWrong) {
  GgufWriter w = SmallFile();
  w.F32("a.nan", std::numeric_limits<float>::quiet_NaN());
  const std::string file = w.Build();
  auto gguf = Gguf::Parse(file);
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ(gguf->Int("nope", 0, 1).status().message(), "key 'nope' is missing");
  EXPECT_EQ(gguf->Int("some.list", 0, 1).status().message(),
            "key 'some.list' is an array of string; wanted is an integer");
  EXPECT_EQ(gguf->Int("some.count", 0, 6).status().message(), "key 'some.count' is 7; allowed are 0 to 6");
  EXPECT_EQ(gguf->String("some.count").status().message(), "key 'some.count' is a uint32; wanted is a string");
  EXPECT_EQ(gguf->Number("a.nan").status().message(), "key 'a.nan' is not a finite number");
  EXPECT_FALSE(gguf->Strings("some.count").ok());
  EXPECT_FALSE(gguf->Ints("some.list").ok());
  EXPECT_FALSE(gguf->BoolOr("some.count", true).ok());
}

struct Broken {
  const char* name;
  std::function<void(GgufWriter&)> damage;
  const char* message;  // part of the error
};

class GgufBrokenTest : public ::testing::TestWithParam<Broken> {};

TEST_P(GgufBrokenTest, IsRefusedByName) {
  GgufWriter w = SmallFile();
  GetParam().damage(w);
  const std::string file = w.Build();
  auto gguf = Gguf::Parse(file);
  ASSERT_FALSE(gguf.ok());
  EXPECT_EQ(gguf.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(gguf.status().message()).find(GetParam().message), std::string::npos) << gguf.status();
}

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    Damage, GgufBrokenTest,
    ::testing::Values(
        Broken{"OldVersion", [](auto& w) { w.version = 1; }, "GGUF version 1; supported are 2 and 3"},
        Broken{"BigEndian", [](auto& w) { w.version = 3u << 24; }, "big-endian"},
        Broken{"HugeTensorCount", [](auto& w) { w.num_tensors = kHuge; }, "claims 18446744073709551615 tensors"},
        Broken{"HugeKeyCount", [](auto& w) { w.num_keys = kHuge / 2; }, "keys; at most 65536"},
        Broken{"MoreKeysThanThere", [](auto& w) { w.num_keys = 60000; }, "key "},
        Broken{"MoreTensorsThanThere", [](auto& w) { w.num_tensors = 60000; }, "tensor "},
        Broken{"DuplicateKey", [](auto& w) { w.U32("some.count", 1); }, "key 'some.count' occurs twice"},
        Broken{"EmptyKey", [](auto& w) { w.U32("", 1); }, "is empty or no plain UTF-8 text"},
        Broken{"KeyIsNoText", [](auto& w) { w.U32("\xff\xfe", 1); }, "'\\xff\\xfe', is empty or no plain UTF-8"},
        Broken{"KeyWithNewline", [](auto& w) { w.U32("a\nb", 1); }, "no plain UTF-8"},
        Broken{"LongKey", [](auto& w) { w.U32(std::string(70000, 'k'), 1); }, "is 70000 bytes long; at most 65535"},
        Broken{"UnknownValueType", [](auto& w) { w.Raw("bad", 13, "xx"); }, "key 'bad' has type 13"},
        Broken{"NestedArray", [](auto& w) { w.Raw("bad", 9, Bytes<uint32_t>(9) + Bytes<uint64_t>(1)); },
               "key 'bad' is an array of arrays"},
        Broken{"UnknownElementType", [](auto& w) { w.Raw("bad", 9, Bytes<uint32_t>(99) + Bytes<uint64_t>(1)); },
               "key 'bad' is an array of type 99"},
        Broken{"HugeArray", [](auto& w) { w.Raw("bad", 9, Bytes<uint32_t>(5) + Bytes<uint64_t>(kHuge / 4)); },
               "key 'bad' claims 4611686018427387903 elements"},
        Broken{"HugeStringArray",
               [](auto& w) { w.Raw("bad", 9, Bytes<uint32_t>(8) + Bytes<uint64_t>(uint64_t{1} << 61)); },
               "key 'bad' claims"},
        Broken{"StringBeyondFile", [](auto& w) { w.Raw("bad", 8, Bytes<uint64_t>(1 << 20)); },
               "key 'bad' is 1048576 bytes"},
        Broken{"StringOfAllBits", [](auto& w) { w.Raw("bad", 8, Bytes(kHuge)); },
               "key 'bad' is 18446744073709551615 bytes"},
        Broken{"ElementBeyondFile",
               [](auto& w) {
                 w.Raw("bad", 9, Bytes<uint32_t>(8) + Bytes<uint64_t>(2) + LengthAndText("x") + Bytes<uint64_t>(9999));
               },
               "element 1 of 2: key 'bad'"},
        Broken{"AlignmentOfThree", [](auto& w) { w.U32("general.alignment", 24); },
               "'general.alignment' is 24; it must be"},
        Broken{"AlignmentOfZero", [](auto& w) { w.U32("general.alignment", 0); },
               "'general.alignment' is 0; allowed are 1"},
        Broken{"AlignmentIsText", [](auto& w) { w.String("general.alignment", "32"); },
               "'general.alignment' is a string"}),
    [](const auto& c) { return std::string(c.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Tensors, GgufBrokenTest,
    ::testing::Values(
        Broken{"DuplicateTensor", [](auto& w) { w.Tensor("first", {1}, 0, "1234"); }, "tensor 'first' occurs twice"},
        Broken{"EmptyName", [](auto& w) { w.Tensor("", {1}, 0, "1234"); }, "the name of tensor 2"},
        Broken{"LongName", [](auto& w) { w.Tensor(std::string(256, 'n'), {1}, 0, "1234"); },
               "is 256 bytes long; at most 255"},
        Broken{"NoDimensions", [](auto& w) { w.Tensor("bad", {}, 0, "1234"); }, "tensor 'bad' has 0 dimensions"},
        Broken{"FiveDimensions",
               [](auto& w) {
                 w.Tensor("bad", {1, 1, 1, 1, 1}, 0, "1234");
               },
               "tensor 'bad' has 5 dimensions"},
        Broken{"ZeroExtent",
               [](auto& w) {
                 w.Tensor("bad", {4, 0}, 0, "");
               },
               "dimension 1 of 2 is 0"},
        Broken{"NegativeExtent", [](auto& w) { w.Tensor("bad", {-1}, 0, ""); },
               "dimension 0 of 1 is 18446744073709551615"},
        Broken{"OverflowingProduct",
               [](auto& w) {
                 w.Tensor("bad", {1ll << 40, 1ll << 40}, 0, "");
               },
               "zero or too large"},
        Broken{"LargerThanFile", [](auto& w) { w.Tensor("bad", {1ll << 50}, 0, ""); }, "do not fit into a file of"},
        Broken{"UnknownType", [](auto& w) { w.Tensor("bad", {1}, 77, "1234"); }, "tensor 'bad' has type number 77"},
        Broken{"PartialBlock", [](auto& w) { w.Tensor("bad", {33}, 8, std::string(68, 'x')); },
               "rows of 33 elements are no multiple"},
        Broken{"OddOffset", [](auto& w) { w.tensors[1].offset = 33; },
               "tensor 'second': offset 33 is no multiple of the alignment 32"},
        Broken{"OffsetBeyondFile", [](auto& w) { w.tensors[1].offset = 1 << 20; },
               "tensor 'second': 20 bytes at offset 1048576 end beyond"},
        Broken{"OffsetOfAllBits", [](auto& w) { w.tensors[1].offset = kHuge - 31; }, "tensor 'second'"},
        Broken{"Overlap", [](auto& w) { w.tensors[1].offset = 32; }, "tensors 'first' and 'second' overlap"},
        Broken{"DataMissing", [](auto& w) { w.tensors[1].data.clear(); }, "tensor 'second'"}),
    [](const auto& c) { return std::string(c.param.name); });

// Cutting a good file anywhere gives an error; nothing is read beyond the end (the sanitizer build sees to that).
TEST(GgufTest, RefusesEveryPrefixOfAFile) {
  const std::string file = testing::MakeTinyModel().file();
  ASSERT_TRUE(Gguf::Parse(file).ok());
  auto whole = Gguf::Parse(file);
  size_t end = 0;  // of the last tensor; what follows is padding
  for (const GgufTensor& t : whole->tensors()) end = std::max(end, static_cast<size_t>(t.offset + t.bytes));
  for (size_t length = 0; length < end; length += length < 600 ? 1 : 997) {
    const std::string prefix = file.substr(0, length);
    EXPECT_FALSE(Gguf::Parse(prefix).ok()) << length << " of " << file.size() << " bytes";
  }
}

TEST(GgufTest, SaysWhatAFileBeginsWith) {
  const auto status = Gguf::Parse(std::string("PK\3\4 a zip archive")).status();
  EXPECT_EQ(std::string(status.message()), "not a GGUF file: it begins with 'PK\\003\\004' in place of 'GGUF'");
}

TEST(QuoteNameTest, EscapesAndCutsBetweenCharacters) {
  EXPECT_EQ(QuoteName("a.b"), "'a.b'");
  EXPECT_EQ(QuoteName("a\n\"b"), "'a\\n\\\"b'");
  EXPECT_EQ(QuoteName("\xff"), "'\\xff'");
  std::string text(79, 'x');
  text += "ä and more";
  EXPECT_EQ(QuoteName(text), "'" + std::string(79, 'x') + "…'");
}

TEST(IsUtf8Test, AcceptsWellFormedTextOnly) {
  for (const char* good : {"", "plain", "\u00e9", "\u20ac", "\U0001F600", "\uFFFD"}) EXPECT_TRUE(IsUtf8(good)) << good;
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "a\xc3("}) {
    EXPECT_FALSE(IsUtf8(bad)) << QuoteName(bad);
  }
}

}  // namespace
}  // namespace loupe
