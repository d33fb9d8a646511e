// What attention is checked against: lists kept as plain entries, written into a hand-made arena through AppendKv, and
// the softmax over them in double precision. Unused slots of the arena hold NaN, so that reading one shows. Used by the
// tests of the attention kernels; a failed expectation is gtest's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/spherical_reference.h"
#include "tests/kernels/target.h"

namespace loupe {

using testing::BackendOf;
using testing::DeviceArrays;
using testing::IsCuda;
using testing::Target;

// Rounds to the nearest IEEE half by arithmetic, independent of the code under test.
inline double RoundToHalf(double x) {
  if (x == 0) return x;
  const int exponent = std::max(std::ilogb(x), -14);
  const double step = std::ldexp(1.0, exponent - 10);
  return std::clamp(std::nearbyint(x / step) * step, -65504.0, 65504.0);
}

struct TestEntry {
  std::vector<float> k, v;
  float beta = 0;
  std::vector<double> stored_k, stored_v;  // as the page keeps them
};

// Memory of pages, 128-byte units handed out one after the other. In bytes it is NaN at first.
class TestArena {
 public:
  TestArena(const Target& target, int64_t bytes) : target_(target), stream_(backend().NewStream()) {
    auto memory = backend().Allocate(bytes);
    LOUPE_CHECK(memory.ok()) << memory.status().ToString();
    memory_ = *std::move(memory);
    const std::vector<uint8_t> poison(static_cast<size_t>(bytes), 0xff);
    backend().Copy(memory_->data(), poison.data(), bytes, *stream_);
    Wait();
  }
  Backend& backend() const { return BackendOf(target_); }
  const Target& target() const { return target_; }
  void* data() { return memory_->data(); }
  PageRef NewPage(const PageClass& page_class, int head_dim) {
    const int64_t bytes = MakePageLayout(page_class, head_dim).bytes;
    const PageRef ref = MakePageRef(static_cast<uint32_t>(used_ / kPageAlignment), 0, page_class);
    used_ += bytes;
    EXPECT_LE(used_, memory_->bytes()) << "the test's arena is too small";
    return ref;
  }
  uint8_t* Page(const PageRef& ref) { return static_cast<uint8_t*>(data()) + int64_t{ref.unit} * kPageAlignment; }
  // Bytes of a page from `offset` on.
  std::vector<uint8_t> Read(const PageRef& ref, int64_t offset, int64_t bytes) {
    std::vector<uint8_t> out(static_cast<size_t>(bytes));
    backend().Copy(out.data(), Page(ref) + offset, bytes, *stream_);
    Wait();
    return out;
  }
  void Write(const PageRef& ref, int64_t offset, const void* from, int64_t bytes) {
    backend().Copy(Page(ref) + offset, from, bytes, *stream_);
    Wait();
  }
  void Wait() {
    const absl::Status status = stream_->Synchronize();
    LOUPE_CHECK(status.ok()) << status.ToString();
  }

 private:
  const Target target_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBuffer> memory_;
  int64_t used_ = 0;
};

// A list as the test knows it: its entries and its pages.
struct TestList {
  std::vector<TestEntry> entries;
  std::vector<int32_t> numbers;  // of the entries, 64 a page
  std::vector<PageRef> pages;

  int32_t end() const { return numbers.empty() ? 0 : numbers.back() + 1; }
};

struct TestRow {
  int sequence = 0;
  bool prompt = false;
  std::vector<float> q;                      // [H, D]
  std::vector<int32_t> begin, end;           // [G]
};

struct Expected {
  std::vector<double> out;    // [H, D]
  std::vector<double> scale;  // [H, D]: sum of p |v|, what rounding errors are relative to
  std::vector<double> logit_span;  // [H]: largest sum |q k| * scale of an entry
};

// One call of Attend with everything that it can be given.
class AttendCase {
 public:
  AttendCase(const Target& target, int head_dim, int heads_per_group, int num_groups, uint64_t seed,
             int64_t arena_bytes = int64_t{8} << 20)
      : dim(head_dim), heads(heads_per_group), groups(num_groups), arena(target, arena_bytes), random(seed) {}

  const int dim, heads, groups;
  TestArena arena;
  std::mt19937_64 random;
  std::vector<TestList> lists;  // [B * G]
  std::vector<TestList> extra;  // [B * G] or empty
  std::vector<TestRow> rows;    // prompt rows first
  std::vector<float> sinks;     // [H] or empty
  std::vector<std::vector<float>> mean_keys;  // [G][D] or empty: for coded pages, to be set before the first one
  float scale = 0.125f;

  float Normal() { return std::normal_distribution<float>(0, 1)(random); }
  int Below(int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); }
  std::vector<float> Normals(int n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& y : x) y = Normal();
    return x;
  }

  // Adds a page with `count` random entries.
  void AddPage(TestList* list, const PageClass& page_class, int count, int g = 0) {
    std::vector<TestEntry> entries;
    for (int i = 0; i < count; ++i) {
      TestEntry entry{Normals(dim), Normals(dim), 0, {}, {}};
      if (page_class.log_weights) {
        const int kind = Below(8);
        entry.beta = kind == 0 ? -std::numeric_limits<float>::infinity() : kind < 4 ? 0.f : Normal();
      }
      entries.push_back(entry);
    }
    AddPage(list, page_class, entries, g);
  }
  void AddPage(TestList* list, const PageClass& page_class, const std::vector<TestEntry>& entries, int g = 0) {
    list->pages.push_back(arena.NewPage(page_class, dim));
    Append(list, entries, g);
  }
  void Append(TestList* list, const TestEntry& entry) { Append(list, std::vector<TestEntry>{entry}); }

  // Writes entries behind the last of the last page of a list of kv head `g`.
  void Append(TestList* list, const std::vector<TestEntry>& entries, int g = 0) {
    if (entries.empty()) return;
    PageRef& page = list->pages.back();
    const int first = page.count;
    std::vector<float> k, v, betas;
    std::vector<PageRef> slots;
    for (const TestEntry& entry : entries) {
      k.insert(k.end(), entry.k.begin(), entry.k.end());
      v.insert(v.end(), entry.v.begin(), entry.v.end());
      betas.push_back(entry.beta);
      slots.push_back(page);
      ++page.count;
    }
    const auto n = static_cast<int64_t>(entries.size());
    DeviceArrays arrays(arena.backend());
    AppendKvArgs args;
    args.k = arrays.In(Rows(k, n));
    args.v = arrays.In(Rows(v, n));
    args.slots = arrays.In(MakeTensor(slots.data(), DType::kBytes, n, 1), sizeof(PageRef));
    args.arena = arena.data();
    std::vector<float> mean = MeanOf(g);
    if (!mean.empty()) args.mean_keys = arrays.In(MakeTensor(mean.data(), DType::kF32, 1, dim));
    arena.backend().AppendKv(args, arrays.stream());
    arrays.Finish();
    if (page.log_weights != 0) {
      const int64_t offset = MakePageLayout(page.page_class(), dim).log_weight_offset + 4 * first;
      for (const uint8_t byte : arena.Read(page, offset, 4 * n)) EXPECT_EQ(byte, 0) << "a fresh slot has no log-weight";
      arena.Write(page, offset, betas.data(), 4 * n);
    }
    const PageFormat format = page.page_class().format;
    for (const TestEntry& entry : entries) {
      list->entries.push_back(entry);
      list->numbers.push_back(static_cast<int32_t>(list->pages.size() - 1) * kPageEntries + first +
                              static_cast<int32_t>(&entry - entries.data()));
      list->entries.back().stored_k = Stored(entry.k, format.key, mean);
      list->entries.back().stored_v = Stored(entry.v, format.value, {});
    }
  }
  std::vector<float> MeanOf(int g) const { return mean_keys.empty() ? std::vector<float>{} : mean_keys[static_cast<size_t>(g)]; }
  static std::vector<double> Stored(const std::vector<float>& x, Codec codec, const std::vector<float>& mean) {
    if (IsCoded(codec)) return testing::DecodeSpherical(testing::EncodeSpherical(x, mean, codec), mean);
    std::vector<double> stored;
    for (const float y : x) stored.push_back(codec == Codec::kF32 ? static_cast<double>(y) : RoundToHalf(static_cast<double>(y)));
    return stored;
  }
  // [n, 1, D]
  Tensor Rows(std::vector<float>& x, int64_t n) const {
    Tensor t = MakeTensor(x.data(), DType::kF32, n, 1, dim);
    t.rank = 3;
    return t;
  }

  bool mixed_formats = false;  // every page of a random list is coded as chance has it
  bool coded = false;          // with spherical codes among them
  PageFormat RandomFormat() {
    const int codecs = coded ? kNumCodecs : 2;
    const auto key = static_cast<Codec>(Below(codecs));
    return {key, static_cast<Codec>(Below(codecs))};
  }

  // `count` entries the way a cache holds them: full pages, then a tail that may be a small page. With `ragged`, some
  // pages inside are not full.
  TestList RandomList(int count, bool ragged, bool log_weights, int g = 0) {
    TestList list;
    while (count > 0) {
      const bool weights = log_weights && Below(2) == 0;
      const bool small = count <= kSmallPageEntries ? Below(4) != 0 : ragged && Below(8) == 0;
      const int room = small ? kSmallPageEntries : kPageEntries;
      int n = std::min(room, count);
      if (ragged && Below(3) == 0) n = 1 + Below(n);
      AddPage(&list, {mixed_formats ? RandomFormat() : PageFormat{}, small, weights}, n, g);
      count -= n;
    }
    return list;
  }

  // A row that sees everything; restrict it afterwards.
  TestRow& AddRow(int sequence, bool prompt) {
    TestRow row;
    row.sequence = sequence;
    row.prompt = prompt;
    row.q = Normals(heads * groups * dim);
    for (int g = 0; g < groups; ++g) {
      row.begin.push_back(0);
      row.end.push_back(List(sequence, g).end());
    }
    rows.push_back(row);
    return rows.back();
  }
  const TestList& List(int sequence, int g) const { return lists[static_cast<size_t>(sequence * groups + g)]; }

  Expected Oracle(const TestRow& row) const;
  // The double-precision probability of each entry of the list for query head `h` of group g, extra pages and sink in
  // the denominator.
  std::vector<double> Probabilities(const TestRow& row, int g, int h) const;

  struct Result {
    std::vector<float> out;                // [T, H, D]
    std::vector<float> mass, probability;  // as AttendArgs says
  };
  Result Attend(int threads, bool exact, bool probabilities = false);

 private:
  struct Weighted {
    const TestEntry* entry;
    double logit, span;
    bool seen;
  };
  std::vector<Weighted> Logits(const TestRow& row, int g, int h) const;
  std::vector<double> Softmax(const std::vector<Weighted>& logits, int head) const;
};

inline std::vector<AttendCase::Weighted> AttendCase::Logits(const TestRow& row, int g, int h) const {
  std::vector<Weighted> logits;
  const float* q = row.q.data() + (g * heads + h) * dim;
  const auto add = [&](const TestEntry& entry, bool seen) {
    double dot = 0, span = 0;
    const double* k = entry.stored_k.data();
    for (int d = 0; d < dim; ++d) {
      const double x = static_cast<double>(q[d]) * k[d];
      dot += x, span += std::abs(x);
    }
    logits.push_back({&entry, dot * scale + static_cast<double>(entry.beta), span * scale, seen});
  };
  const TestList& list = List(row.sequence, g);
  for (size_t e = 0; e < list.entries.size(); ++e) {
    const int at = list.numbers[e];
    add(list.entries[e], at >= row.begin[static_cast<size_t>(g)] && at < row.end[static_cast<size_t>(g)]);
  }
  if (!extra.empty()) {
    for (const TestEntry& entry : extra[static_cast<size_t>(row.sequence * groups + g)].entries) add(entry, true);
  }
  return logits;
}

inline std::vector<double> AttendCase::Probabilities(const TestRow& row, int g, int h) const {
  return Softmax(Logits(row, g, h), g * heads + h);
}

inline std::vector<double> AttendCase::Softmax(const std::vector<Weighted>& logits, int head) const {
  double top = -std::numeric_limits<double>::infinity();
  if (!sinks.empty()) top = static_cast<double>(sinks[static_cast<size_t>(head)]);
  const double sink = top;
  for (const Weighted& x : logits) top = x.seen ? std::max(top, x.logit) : top;
  std::vector<double> p(logits.size(), 0.0);
  if (std::isinf(top)) return p;
  double total = std::exp(sink - top);
  for (const Weighted& x : logits) total += x.seen ? std::exp(x.logit - top) : 0;
  for (size_t i = 0; i < p.size(); ++i) p[i] = logits[i].seen ? std::exp(logits[i].logit - top) / total : 0;
  return p;
}

inline Expected AttendCase::Oracle(const TestRow& row) const {
  Expected expected;
  for (int g = 0; g < groups; ++g) {
    for (int h = 0; h < heads; ++h) {
      const std::vector<Weighted> logits = Logits(row, g, h);
      const std::vector<double> p = Softmax(logits, g * heads + h);
      std::vector<double> out(static_cast<size_t>(dim), 0.0), size = out;
      double span = 0;
      for (size_t e = 0; e < p.size(); ++e) {
        if (logits[e].seen) span = std::max(span, logits[e].span);
        const double* values = logits[e].entry->stored_v.data();
        for (size_t d = 0; d < out.size() && p[e] > 0; ++d) {
          const double v = values[d];
          out[d] += p[e] * v, size[d] += p[e] * std::abs(v);
        }
      }
      expected.out.insert(expected.out.end(), out.begin(), out.end());
      expected.scale.insert(expected.scale.end(), size.begin(), size.end());
      expected.logit_span.push_back(span);
    }
  }
  return expected;
}

inline AttendCase::Result AttendCase::Attend(int threads, bool exact, bool probabilities) {
  const int64_t num_rows = static_cast<int64_t>(rows.size()), width = int64_t{heads} * groups * dim;
  std::vector<float> q;
  std::vector<int32_t> sequence, begin, end, list_begin{0}, extra_counts;
  std::vector<PageRef> pages, extra_pages;
  int64_t prompt_rows = 0;
  for (const TestRow& row : rows) {
    q.insert(q.end(), row.q.begin(), row.q.end());
    sequence.push_back(row.sequence);
    begin.insert(begin.end(), row.begin.begin(), row.begin.end());
    end.insert(end.end(), row.end.begin(), row.end.end());
    prompt_rows += row.prompt;
  }
  for (const TestList& list : lists) {
    pages.insert(pages.end(), list.pages.begin(), list.pages.end());
    list_begin.push_back(static_cast<int32_t>(pages.size()));
  }
  int64_t room = 0;
  for (const TestList& list : extra) room = std::max(room, static_cast<int64_t>(list.pages.size()) + 1);
  for (const TestList& list : extra) {
    extra_counts.push_back(static_cast<int32_t>(list.pages.size()));
    for (int64_t i = 0; i < room; ++i) {
      extra_pages.push_back(i < extra_counts.back() ? list.pages[static_cast<size_t>(i)] : PageRef{});
    }
  }
  const auto num_pages = static_cast<int64_t>(pages.size());
  pages.emplace_back();  // so that an empty table still has an address
  Result result;
  result.out.assign(static_cast<size_t>(num_rows * width), std::nanf(""));
  const auto pages_room = static_cast<int64_t>(pages.size());
  const auto tensor3 = [](void* data, int64_t a, int64_t b, int64_t c) {
    Tensor t = MakeTensor(data, DType::kF32, a, b, c);
    t.rank = 3;
    return t;
  };
  Backend& backend = BackendOf(arena.target(), exact, threads);
  DeviceArrays arrays(backend);
  AttendArgs args;
  args.q = arrays.In(tensor3(q.data(), num_rows, int64_t{heads} * groups, dim));
  args.row_sequence = arrays.In(MakeTensor(sequence.data(), DType::kI32, num_rows));
  args.pages = arrays.In(MakeTensor(pages.data(), DType::kBytes, pages_room), sizeof(PageRef));
  args.pages.shape[0] = num_pages;
  args.list_begin = arrays.In(MakeTensor(list_begin.data(), DType::kI32, static_cast<int64_t>(list_begin.size())));
  args.visible_begin = arrays.In(MakeTensor(begin.data(), DType::kI32, num_rows, groups));
  args.visible_end = arrays.In(MakeTensor(end.data(), DType::kI32, num_rows, groups));
  if (!extra.empty()) {
    const auto num_extra = static_cast<int64_t>(extra.size());
    args.extra_pages = arrays.In(MakeTensor(extra_pages.data(), DType::kBytes, num_extra, room), sizeof(PageRef));
    args.extra_counts = arrays.In(MakeTensor(extra_counts.data(), DType::kI32, num_extra));
  }
  args.arena = arena.data();
  args.scale = scale;
  args.coded = coded;
  std::vector<float> means;
  for (int g = 0; g < groups && !mean_keys.empty(); ++g) {
    means.insert(means.end(), mean_keys[static_cast<size_t>(g)].begin(), mean_keys[static_cast<size_t>(g)].end());
  }
  if (!means.empty()) args.mean_keys = arrays.In(MakeTensor(means.data(), DType::kF32, groups, dim));
  if (!sinks.empty()) args.sinks = arrays.In(MakeTensor(sinks.data(), DType::kF32, static_cast<int64_t>(sinks.size())));
  args.prompt_rows = static_cast<int>(prompt_rows);
  args.out = arrays.Out(tensor3(result.out.data(), num_rows, int64_t{heads} * groups, dim));
  if (probabilities) {
    result.mass.assign(static_cast<size_t>(num_pages * heads), -1.f);
    result.probability.assign(static_cast<size_t>(num_pages * heads * kPageEntries), -1.f);
    args.page_mass = arrays.Out(MakeTensor(result.mass.data(), DType::kF32, num_pages, heads));
    args.entry_probability = arrays.Out(MakeTensor(result.probability.data(), DType::kF32, num_pages, kPageEntries, heads));
  }
  backend.Attend(args, arrays.stream());
  arrays.Finish();
  return result;
}

}  // namespace loupe
