#include "engine/bench/attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/half.h"
#include "kernels/mirrored_buffer.h"
#include "kernels/spherical.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

constexpr int64_t kRotatedBytes = int64_t{512} << 20;  // far past any cache
constexpr int64_t kSeedBytes = int64_t{32} << 20;      // of random numbers, repeated over the arena
constexpr uint64_t kSourcePages = 512;                 // dense ones that coded pages come from
constexpr size_t kEncodedAtOnce = size_t{1} << 18;     // entries
constexpr int kLaunches = 60;                          // of a timed run

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Lists of random pages, `copies` sets of them.
class Lists {
 public:
  Lists(Backend& backend, const AttentionCase& c) : backend_(backend), c_(c), stream_(backend.NewStream()) {}

  absl::Status Fill() {
    per_list_ = (c_.context + kPageEntries - 1) / kPageEntries;
    const int64_t set_pages = int64_t{c_.batch} * c_.num_kv_heads * per_list_;
    std::vector<PageRef> refs;
    int64_t units = LayOut(set_pages, 0, &refs);
    copies_ = static_cast<int>(std::clamp<int64_t>(kRotatedBytes / (units * kPageAlignment), 1, kLaunches));
    for (int i = 1; i < copies_; ++i) units = LayOut(set_pages, units, &refs);
    const PageClass dense{backend_.Info().dense_format, false, false};
    dense_unit_ = units;  // what coded pages are coded from
    if (!c_.formats.empty()) units += kSourcePages * MakePageLayout(dense, c_.head_dim).bytes / kPageAlignment;
    auto arena = backend_.Allocate(units * kPageAlignment);
    if (!arena.ok()) return arena.status();
    arena_ = *std::move(arena);
    if (absl::Status s = FillArena(); !s.ok()) return s;
    if (absl::Status s = Encode(refs, dense); !s.ok()) return s;
    const int rows = c_.batch * std::max(1, c_.prompt_rows), lists = c_.batch * c_.num_kv_heads;
    const int64_t elements = int64_t{rows} * c_.num_heads * c_.head_dim;
    const DType type = backend_.Info().activations;
    absl::Status s = pages_.Ensure(backend_, static_cast<int64_t>(refs.size() * sizeof(PageRef)));
    if (s.ok()) s = numbers_.Ensure(backend_, (rows + lists + 1 + 2 * int64_t{rows} * c_.num_kv_heads) * 4);
    if (s.ok()) s = q_.Ensure(backend_, elements * DTypeBytes(type));
    if (s.ok()) s = out_.Ensure(backend_, elements * DTypeBytes(type));
    if (!s.ok()) return s;
    for (size_t i = 0; i < refs.size(); ++i) {
      const int page = static_cast<int>(i % static_cast<size_t>(per_list_));
      refs[i].count = static_cast<uint16_t>(std::min(kPageEntries, c_.context - page * kPageEntries));
      pages_.host<PageRef>()[i] = refs[i];
      const PageFormat format = refs[i].page_class().format;
      bytes_ += static_cast<double>(refs[i].count * (CodecBytes(format.key, c_.head_dim) + CodecBytes(format.value, c_.head_dim)));
    }
    bytes_ /= copies_;
    FillNumbers(rows, lists);
    for (int64_t i = 0; i < elements; ++i) {
      const float x = std::normal_distribution<float>()(random_);
      if (type == DType::kF32) {
        q_.host<float>()[i] = x;
      } else {
        q_.host<uint16_t>()[i] = FloatToHalf(x);
      }
    }
    for (const MirroredBuffer* b : {&pages_, &numbers_, &q_}) b->Upload(backend_, 0, b->bytes(), *stream_);
    return stream_->Synchronize();
  }

  int copies() const { return copies_; }
  double bytes() const { return bytes_; }  // read by a launch
  Stream& stream() { return *stream_; }

  void Attend(int copy) {
    const int rows = c_.batch * std::max(1, c_.prompt_rows), lists = c_.batch * c_.num_kv_heads;
    const int64_t set_pages = int64_t{lists} * per_list_;
    int32_t* numbers = numbers_.device<int32_t>();
    const auto heads = [&](void* data) {
      Tensor t = MakeTensor(data, backend_.Info().activations, rows, c_.num_heads, c_.head_dim);
      t.rank = 3;
      return t;
    };
    AttendArgs args;
    args.q = heads(q_.device<void>());
    args.out = heads(out_.device<void>());
    args.row_sequence = MakeTensor(numbers, DType::kI32, rows);
    args.list_begin = MakeTensor(numbers + rows, DType::kI32, lists + 1);
    args.visible_begin = MakeTensor(numbers + rows + lists + 1, DType::kI32, rows, c_.num_kv_heads);
    args.visible_end =
        MakeTensor(numbers + rows + lists + 1 + rows * c_.num_kv_heads, DType::kI32, rows, c_.num_kv_heads);
    args.pages = MakeTensor(pages_.device<PageRef>() + copy * set_pages, DType::kBytes, set_pages);
    args.arena = arena_->data();
    args.scale = 1 / std::sqrt(static_cast<float>(c_.head_dim));
    args.prompt_rows = c_.prompt_rows > 0 ? rows : 0;
    args.coded = !c_.formats.empty();
    backend_.Attend(args, *stream_);
  }

 private:
  // Pages of a set from unit `first` on, in an order that no prefetcher guesses. Each list has a run of pages of every format,
  // as the cache keeps them, whose lengths are their shares. Returns the unit behind them.
  int64_t LayOut(int64_t pages, int64_t first, std::vector<PageRef>* refs) {
    double shares = 0;
    for (const FormatShare& f : c_.formats) shares += f.share;
    std::vector<size_t> order;
    for (int64_t i = 0; i < pages; ++i) {
      PageClass page_class{backend_.Info().dense_format, false, false};
      double at = (static_cast<double>(i % per_list_) + 0.5) / per_list_ * shares;
      for (const FormatShare& f : c_.formats) {
        page_class.format = f.format;
        if (at < f.share) break;
        at -= f.share;
      }
      order.push_back(refs->size());
      refs->push_back(MakePageRef(0, kPageEntries, page_class));
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (const size_t i : order) {
      (*refs)[i].unit = static_cast<uint32_t>(first);
      first += MakePageLayout((*refs)[i].page_class(), c_.head_dim).bytes / kPageAlignment;
    }
    return first;
  }
  // Codes every page from random dense ones.
  absl::Status Encode(const std::vector<PageRef>& refs, const PageClass& dense) {
    if (c_.formats.empty()) return absl::OkStatus();
    const int64_t source_units = MakePageLayout(dense, c_.head_dim).bytes / kPageAlignment;
    std::vector<EntryTranscode> entries;
    for (size_t i = 0; i < refs.size(); ++i) {
      const auto source = static_cast<uint32_t>(dense_unit_ + static_cast<int64_t>(random_() % kSourcePages) * source_units);
      for (int slot = 0; slot < kPageEntries; ++slot) {
        entries.push_back({MakePageRef(source, slot, dense), refs[i], 0});
        entries.back().to.count = static_cast<uint16_t>(slot);
      }
      if (entries.size() < kEncodedAtOnce && i + 1 < refs.size()) continue;
      TranscodeEntriesArgs args;
      args.entries = entries.data();
      args.num_entries = static_cast<int64_t>(entries.size());
      args.head_dim = c_.head_dim;
      args.arena = arena_->data();
      backend_.TranscodeEntries(args, *stream_);
      if (absl::Status s = stream_->Synchronize(); !s.ok()) return s;
      entries.clear();
    }
    return absl::OkStatus();
  }
  absl::Status FillArena() {
    auto seed = backend_.AllocateHost(kSeedBytes);
    if (!seed.ok()) return seed.status();
    auto* words = static_cast<uint64_t*>((*seed)->data());
    // Numbers of magnitude 0.5 to 2 in fp16, small ones in f32.
    for (int64_t i = 0; i < kSeedBytes / 8; ++i) words[i] = 0x3800380038003800u | (random_() & 0x87ff87ff87ff87ffu);
    for (int64_t at = 0; at < arena_->bytes(); at += kSeedBytes) {
      backend_.Copy(static_cast<char*>(arena_->data()) + at, words, std::min(kSeedBytes, arena_->bytes() - at),
                    *stream_);
    }
    return stream_->Synchronize();
  }
  void FillNumbers(int rows, int lists) {
    int32_t* at = numbers_.host<int32_t>();
    const int per_sequence = std::max(1, c_.prompt_rows);
    for (int row = 0; row < rows; ++row) *at++ = row / per_sequence;
    for (int list = 0; list <= lists; ++list) *at++ = list * per_list_;
    at = std::fill_n(at, rows * c_.num_kv_heads, 0);
    for (int row = 0; row < rows; ++row)
      at = std::fill_n(at, c_.num_kv_heads, c_.context - per_sequence + 1 + row % per_sequence);
  }

  Backend& backend_;
  const AttentionCase c_;
  std::unique_ptr<Stream> stream_;
  std::mt19937_64 random_{1};
  std::unique_ptr<DeviceBuffer> arena_;
  MirroredBuffer pages_, numbers_, q_, out_;
  int64_t dense_unit_ = 0;
  double bytes_ = 0;
  int per_list_ = 0, copies_ = 1;
};

}  // namespace

absl::StatusOr<std::vector<FormatShare>> FormatSharesByName(const std::string& name) {
  constexpr auto kOf = [](Codec codec) { return PageFormat{codec, codec}; };
  if (name == "mixed") return std::vector<FormatShare>{{kOf(Codec::kS8), .25}, {kOf(Codec::kS4), .60}, {kOf(Codec::kS2), .15}};
  const std::optional<PageFormat> format = FormatByName(name, PageFormat{});
  if (!format) {
    return absl::InvalidArgumentError(absl::StrCat("--format is ", name, ", must be dense, s8, s4, s3, s2, s4v2 and the like, or mixed"));
  }
  if (!IsCoded(*format)) return std::vector<FormatShare>{};
  return std::vector<FormatShare>{{*format, 1}};
}

absl::StatusOr<BenchResult> BenchAttention(Backend& backend, const AttentionCase& c) {
  if (c.batch < 1 || c.context < 1 || c.prompt_rows > c.context) {
    return absl::InvalidArgumentError(absl::StrCat("attention of ", c.batch, " sequences of ", c.context,
                                                   " entries with ", c.prompt_rows, " prompt rows cannot be measured"));
  }
  if (!c.formats.empty() && c.head_dim % spherical::kDimStep != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("coded pages need heads whose size is a multiple of ", spherical::kDimStep, ", this one has ", c.head_dim));
  }
  const auto limit_before = MeasureReadBandwidth(backend);
  if (!limit_before.ok()) return limit_before.status();
  Lists lists(backend, c);
  if (absl::Status s = lists.Fill(); !s.ok()) return s;
  int launches = kLaunches;
  const auto run = [&] {
    for (int i = 0; i < launches; ++i) lists.Attend(i % lists.copies());
  };
  lists.Attend(0);
  if (absl::Status s = lists.stream().Synchronize(); !s.ok()) return s;
  const double begin = Seconds();
  lists.Attend(0);
  if (absl::Status s = lists.stream().Synchronize(); !s.ok()) return s;
  launches = static_cast<int>(std::clamp(0.1 / (Seconds() - begin), 1.0, double{kLaunches}));
  const std::unique_ptr<OpGraph> graph = backend.Record(run, lists.stream());
  std::vector<double> times;
  for (int i = 0; i <= c.repeat; ++i) {
    const double start = Seconds();
    graph ? graph->Launch(lists.stream()) : run();
    if (absl::Status s = lists.stream().Synchronize(); !s.ok()) return s;
    if (i > 0) times.push_back((Seconds() - start) / launches);
  }
  std::sort(times.begin(), times.end());
  BenchResult result;
  result.name = "attention";
  const double time = times[times.size() / 2];
  const double rows = std::max(1, c.prompt_rows);
  const double seen = c.batch * rows * (c.context - (rows - 1) / 2);
  result.time_us = time * 1e6;
  result.bytes = lists.bytes();
  result.flops = 4 * seen * c.num_heads * c.head_dim;
  result.gbps = result.bytes / time * 1e-9;
  const auto limit_after = MeasureReadBandwidth(backend);
  if (!limit_after.ok()) return limit_after.status();
  result.limit_gbps = std::max(*limit_before, *limit_after);
  result.share_of_limit = result.gbps / result.limit_gbps;
  result.tokens_per_s = c.batch * rows / time;
  return result;
}

}  // namespace loupe
