// Thousands of random transactions on lists whose entries are stored in several formats (recode, keep, overwrite, append, with
// forks, closes, abandoned steps and an arena that is often full) beside an obvious model: for every list a plain vector of
// (position, key, value, format). After each of them attention over the list equals a double-precision oracle over the model,
// whose codes are the reference's; a refused one changes nothing; at the end nothing is left.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "kvcache/kv_cache.h"
#include "kvcache/page_format.h"
#include "tests/kernels/spherical_reference.h"

namespace loupe {
namespace {

constexpr int kGroups = 2, kHeads = 4, kDim = 64;
constexpr int kGroupHeads = kHeads / kGroups;
constexpr PageFormat kDenseHere{Codec::kF32, Codec::kF32};
constexpr PageFormat kS8{Codec::kS8, Codec::kS8}, kS4{Codec::kS4, Codec::kS4}, kS3{Codec::kS3, Codec::kS3}, kS2{Codec::kS2, Codec::kS2},
    kS4V2{Codec::kS4, Codec::kS2};

struct Entry {
  int position;
  std::vector<float> k, v;
  PageFormat format;
};

struct Model {
  std::vector<std::vector<Entry>> lists = std::vector<std::vector<Entry>>(kGroups);
  int tokens = 0;
  PageFormat landing;
};

class Lands final : public Policy {
 public:
  explicit Lands(const PageFormat& format) : format_(format) {}
  std::string_view name() const override { return "lands"; }
  bool keeps_everything() const override { return true; }
  std::optional<PageFormat> landing_format(bool) const override { return format_; }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>*) const override {}
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

 private:
  PageFormat format_;
};

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : random_(seed), dense_(kDenseHere), coded_(kS8) {
    backend_ = MakeBackend({.device = "cpu", .num_threads = 1, .exact = true, .isa = "portable"}).value();
    stream_ = backend_->NewStream();
    KvShape shape;
    shape.num_layers = 1, shape.num_heads = kHeads, shape.num_kv_heads = kGroups, shape.head_dim = kDim;
    KvConfig config;
    config.device_bytes = (4 + seed % 3) * kSlabBytes;
    config.max_sequences = 12;
    cache_ = KvCache::Create(config, shape, *backend_).value();
    for (float& x : means_) x = Value();
    EXPECT_TRUE(cache_->SetMeanKeys(means_).ok());
  }

  void Run(int transactions) {
    while (done_ + refused_ < transactions && !::testing::Test::HasFailure()) {
      if (models_.empty() || (models_.size() < 8 && Below(6) == 0)) Open();
      const SeqId seq = Any();
      switch (Below(10)) {
        case 0: Append(seq, 1 + Below(90), false, false); break;
        case 1: Fork(seq); break;
        case 2: Below(4) == 0 ? Close(seq) : Decode(seq, 1 + Below(50)); break;
        default: Transact(seq);
      }
    }
    for (const auto& [id, model] : models_) cache_->Close(SeqId{id});
    cache_->Audit();
    EXPECT_EQ(cache_->Stats().resident_bytes + cache_->Stats().retired_bytes, 0);
    EXPECT_EQ(cache_->Stats().resident_entries, 0);
    EXPECT_EQ(cache_->Stats().slab_bytes, 0);
    advanced_ = cache_->Stats().steps_advanced;
  }

  double error_ = 0;  // sum over elements
  int64_t advanced_ = 0;
  int done_ = 0, refused_ = 0, several_runs_ = 0, checked_ = 0, shared_ = 0;

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  float Value() { return static_cast<float>(Below(33) - 16) / 16; }
  SeqId Any() { return SeqId{std::next(models_.begin(), Below(static_cast<int>(models_.size())))->first}; }

  void Open() {
    const bool coded = Below(3) == 0;
    models_[cache_->Open(coded ? coded_ : dense_).value().value].landing = coded ? kS8 : kDenseHere;
  }
  void Close(SeqId seq) {
    cache_->Close(seq);
    models_.erase(seq.value);
  }
  void Fork(SeqId seq) {
    const auto child = cache_->Fork(seq);
    if (child.ok()) models_[child->value] = Model(models_.at(seq.value)), ++shared_;
  }

  // What an entry is once it is stored in another format.
  void Store(Entry* entry, const PageFormat& format, int group) const {
    const std::vector<float> mean(means_.begin() + group * kDim, means_.begin() + (group + 1) * kDim);
    const auto side = [](std::vector<float>* x, const std::vector<float>& less, Codec from, Codec to) {
      if (from == to || !IsCoded(to)) return;
      const std::vector<double> decoded = loupe::testing::DecodeSpherical(loupe::testing::EncodeSpherical(*x, less, to), less);
      x->assign(decoded.begin(), decoded.end());
    };
    side(&entry->k, mean, entry->format.key, format.key);
    side(&entry->v, {}, entry->format.value, format.value);
    entry->format = format;
  }

  // Steps of one row after each other: most of them are the last one moved on.
  void Decode(SeqId seq, int steps) {
    for (int i = 0; i < steps && models_.count(seq.value) > 0 && !::testing::Test::HasFailure(); ++i) {
      Append(seq, 1, true, Below(10) == 0);
    }
  }

  void Append(SeqId seq, int rows, bool decode, bool abandons) {
    KvBatch& batch = batch_;
    const std::vector<KvStepItem> items{{seq, decode ? 0 : rows, decode ? rows : 0, false}};
    if (!cache_->Reserve(items, &batch).ok()) return Close(seq);
    cache_->Audit();
    std::vector<float> k(static_cast<size_t>(rows * kGroups * kDim)), v(k.size());
    std::vector<float> q(static_cast<size_t>(rows * kHeads * kDim)), out(q.size());
    for (std::vector<float>* values : {&k, &v, &q}) {
      for (float& x : *values) x = Value();
    }
    Model model = models_.at(seq.value);
    for (int r = 0; r < rows; ++r) {
      for (int g = 0; g < kGroups; ++g) {
        const auto at = static_cast<std::ptrdiff_t>((r * kGroups + g) * kDim);
        Entry entry{model.tokens + r, {k.begin() + at, k.begin() + at + kDim}, {v.begin() + at, v.begin() + at + kDim}, kDenseHere};
        Store(&entry, model.landing, g);
        model.lists[static_cast<size_t>(g)].push_back(std::move(entry));
      }
    }
    model.tokens += rows;
    cache_->Append(batch, 0, MakeTensor(k.data(), DType::kF32, rows, kGroups, kDim), MakeTensor(v.data(), DType::kF32, rows, kGroups, kDim),
                   *stream_);
    cache_->Attend(batch, 0, MakeTensor(q.data(), DType::kF32, rows, kHeads, kDim), MakeTensor(out.data(), DType::kF32, rows, kHeads, kDim),
                   *stream_);
    const std::ptrdiff_t last = static_cast<std::ptrdiff_t>(rows - 1) * kHeads * kDim;
    Check(model, q.data() + last, out.data() + last);
    if (abandons) return cache_->Abandon(batch);
    cache_->Commit(batch, *stream_);
    cache_->Audit();
    models_.at(seq.value) = std::move(model);
  }

  // The last row sees everything.
  void Check(const Model& model, const float* q, const float* out) {
    const double scale = 1 / std::sqrt(static_cast<double>(kDim));
    ++checked_;
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> sum(kDim, 0.0);
      double total = 0;
      for (const Entry& e : model.lists[static_cast<size_t>(h / kGroupHeads)]) {
        double dot = 0;
        for (int d = 0; d < kDim; ++d) dot += static_cast<double>(q[h * kDim + d]) * static_cast<double>(e.k[static_cast<size_t>(d)]);
        const double weight = std::exp(dot * scale);
        total += weight;
        for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * static_cast<double>(e.v[d]);
      }
      for (int d = 0; d < kDim; ++d) {
        // A coordinate half way between two levels may fall to either side when it is coded a second time: seldom, and a list
        // of one entry shows it whole.
        const double got = static_cast<double>(out[h * kDim + d]), expected = sum[static_cast<size_t>(d)] / total;
        ASSERT_NEAR(got, expected, 0.1) << "head " << h << " dim " << d;
        error_ += std::abs(got - expected);
      }
    }
  }

  PageFormat AnyFormat() {
    const PageFormat formats[] = {kDenseHere, kS8, kS4, kS3, kS2, kS4V2};
    return formats[Below(6)];
  }

  // One action on one or both lists. The model's entries stand in the order of the cache's.
  void Transact(SeqId seq) {
    Model model = models_.at(seq.value);
    if (model.tokens == 0) return;
    std::vector<ListAction> actions;
    for (int g = Below(2); g < kGroups; ++g) {
      std::vector<Entry>& list = model.lists[static_cast<size_t>(g)];
      switch (Below(5)) {
        case 0: actions.push_back(Overwrite(g, &list)); break;
        case 1: actions.push_back(Recode(g, &list, model.landing, true)); break;
        case 2: actions.push_back(Recode(g, &list, model.landing, false)); break;
        default: actions.push_back(Age(g, &list, model.landing)); break;
      }
    }
    const bool retired = cache_->Stats().retired_bytes > 0;
    const auto dump = [&] {
      const std::string all = cache_->DebugDump();
      return retired ? all.substr(0, all.find("slabs free")) : all;
    };
    const std::string before = dump();
    const absl::Status status = cache_->Repack(seq, actions, *stream_);
    if (!status.ok()) {
      ASSERT_TRUE(absl::IsResourceExhausted(status)) << status.ToString();
      ASSERT_TRUE(before == dump()) << "a refused repack changed something";
      ++refused_;
      if (Below(3) == 0) Close(Any());
      return;
    }
    ++done_;
    cache_->Audit();
    for (size_t g = 0; g < kGroups; ++g) FollowOrder(seq, static_cast<int>(g), &model.lists[g]);
    models_.at(seq.value) = std::move(model);
    if (Below(3) > 0) Append(seq, 1, true, false);
  }

  static ListAction ActionOf(int g, const std::vector<Entry>& list, const std::vector<PageFormat>& wanted, const std::vector<bool>& stays,
                             const PageFormat& landing) {
    ListAction action{0, g, {}};
    for (size_t e = 0; e < list.size(); ++e) {
      if (!stays[e]) continue;
      if (wanted[e] == landing) {
        action.keep.push_back(static_cast<int32_t>(e));
        continue;
      }
      auto run = std::find_if(action.coded.begin(), action.coded.end(), [&](const CodedRun& r) { return r.format == wanted[e]; });
      if (run == action.coded.end()) run = action.coded.insert(run, {wanted[e], {}});
      run->entries.push_back(static_cast<int32_t>(e));
    }
    return action;
  }

  ListAction Apply(int g, std::vector<Entry>* list, const std::vector<PageFormat>& wanted, const std::vector<bool>& stays,
                   const PageFormat& landing) {
    const ListAction action = ActionOf(g, *list, wanted, stays, landing);
    std::vector<Entry> kept;
    for (size_t e = 0; e < list->size(); ++e) {
      if (!stays[e]) continue;
      Store(&(*list)[e], wanted[e], g);
      kept.push_back(std::move((*list)[e]));
    }
    *list = std::move(kept);
    return action;
  }

  // Every entry in any format, or each stays in its own.
  ListAction Recode(int g, std::vector<Entry>* list, const PageFormat& landing, bool anew) {
    const int percent = 60 + Below(41);
    const PageFormat one = AnyFormat(), other = AnyFormat();
    std::vector<PageFormat> wanted;
    std::vector<bool> stays;
    for (const Entry& e : *list) {
      stays.push_back(Below(100) < percent);
      wanted.push_back(anew ? (Below(3) == 0 ? AnyFormat() : Below(2) == 0 ? one : other) : e.format);
    }
    return Apply(g, list, wanted, stays, landing);
  }

  // The first entries that are as they came are coded, everything else stays.
  ListAction Age(int g, std::vector<Entry>* list, const PageFormat& landing) {
    int left = Below(100);
    const PageFormat target = AnyFormat();
    std::vector<PageFormat> wanted;
    for (const Entry& e : *list) wanted.push_back(e.format == landing && left-- > 0 ? target : e.format);
    return Apply(g, list, wanted, std::vector<bool>(list->size(), true), landing);
  }

  ListAction Overwrite(int g, std::vector<Entry>* list) {
    ListAction action{0, g, {}, {}, true, {}};
    std::vector<Entry> kept;
    for (size_t e = 0; e < list->size(); ++e) {
      if (Below(static_cast<int>(list->size())) < 2) {
        action.drop.push_back(static_cast<int32_t>(e));
      } else {
        kept.push_back((*list)[e]);
      }
    }
    *list = std::move(kept);
    return action;
  }

  // The same positions, in whatever order the cache has them, and each in a page of its format.
  void FollowOrder(SeqId seq, int g, std::vector<Entry>* list) {
    const std::vector<int32_t> positions = cache_->ListPositions(seq, 0, g);
    ASSERT_EQ(positions.size(), list->size());
    std::map<int, Entry> by_position;
    for (Entry& e : *list) by_position[e.position] = std::move(e);
    ASSERT_EQ(by_position.size(), positions.size());
    list->clear();
    for (const int32_t p : positions) {
      ASSERT_TRUE(by_position.count(p) == 1) << "position " << p << " is gone";
      list->push_back(std::move(by_position.at(p)));
    }
    size_t entry = 0;
    int runs = 0;
    PageFormat before;
    for (const PageRef& page : cache_->ListPages(seq, 0, g)) {
      const PageFormat format = page.page_class().format;
      if (entry == 0 || format != before) ++runs;
      before = format;
      for (int slot = 0; slot < page.count; ++slot) ASSERT_TRUE((*list)[entry++].format == format) << "entry " << entry - 1;
    }
    several_runs_ += runs > 1 ? 1 : 0;
  }

  std::mt19937 random_;
  Lands dense_, coded_;
  std::vector<float> means_ = std::vector<float>(kGroups * kDim);
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
  std::map<int, Model> models_;
};

TEST(CodedListsProperty, RandomTransactions) {
  double error = 0;
  int64_t advanced = 0;
  int refused = 0, several = 0, checked = 0, shared = 0;
  for (const uint32_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Fuzz fuzz(seed);
    fuzz.Run(700);
    error += fuzz.error_;
    advanced += fuzz.advanced_;
    refused += fuzz.refused_, several += fuzz.several_runs_, checked += fuzz.checked_, shared += fuzz.shared_;
  }
  EXPECT_LT(error / checked / (kHeads * kDim), 3e-4);
  EXPECT_GT(refused, 20) << "no repack ever found the arena full";
  EXPECT_GT(several, 500);
  EXPECT_GT(checked, 1000);
  EXPECT_GT(shared, 100);
  EXPECT_GT(advanced, 1000) << "hardly a step was the last one moved on";
}

}  // namespace
}  // namespace loupe
