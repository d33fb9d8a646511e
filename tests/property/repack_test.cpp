// Ten thousand random transactions (keep, merge, overwrite, with forks, closes and an arena that is often full) beside an
// obvious model: for every list a plain vector of (position, key, value, log-weight). After each of them attention over the
// list equals a double-precision oracle over the model; a refused one changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "kvcache/kv_cache.h"

namespace loupe {
namespace {

constexpr int kGroups = 2, kHeads = 4, kDim = 128;  // f32 pages of 64 KiB: 32 a slab
constexpr int kGroupHeads = kHeads / kGroups;

struct Entry {
  int position;
  std::vector<double> k, v;
  double beta = 0;
};

struct Model {
  std::vector<std::vector<Entry>> lists = std::vector<std::vector<Entry>>(kGroups);
  int tokens = 0;
};

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : random_(seed) {
    backend_ = MakeBackend({.device = "cpu", .num_threads = 1, .exact = true, .isa = ""}).value();
    stream_ = backend_->NewStream();
    KvShape shape;
    shape.num_layers = 1, shape.num_heads = kHeads, shape.num_kv_heads = kGroups, shape.head_dim = kDim;
    KvConfig config;
    config.device_bytes = 2 * kSlabBytes;
    config.max_sequences = 12;
    cache_ = KvCache::Create(config, shape, *backend_).value();
  }

  void Run(int transactions) {
    while (done_ + refused_ < transactions && !testing::Test::HasFailure()) {
      if (models_.empty() || (models_.size() < 8 && Below(6) == 0)) Open();
      const SeqId seq = Any();
      switch (Below(10)) {
        case 0: Append(seq, 1 + Below(90), false); break;
        case 1: Fork(seq); break;
        case 2: Below(2) == 0 ? Close(seq) : Append(seq, 1, true); break;
        default: Transact(seq);
      }
    }
    for (const auto& [id, model] : models_) cache_->Close(SeqId{id});
    cache_->Audit();
    EXPECT_EQ(cache_->Stats().resident_bytes + cache_->Stats().retired_bytes, 0);
    EXPECT_EQ(cache_->Stats().resident_entries, 0);
  }

  int done_ = 0, refused_ = 0, merged_ = 0, overwritten_ = 0;

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  float Value() { return static_cast<float>(Below(33) - 16) / 16; }
  SeqId Any() { return SeqId{std::next(models_.begin(), Below(static_cast<int>(models_.size())))->first}; }

  void Open() { models_[cache_->Open().value().value] = {}; }
  void Close(SeqId seq) {
    cache_->Close(seq);
    models_.erase(seq.value);
  }
  void Fork(SeqId seq) {
    const auto child = cache_->Fork(seq);
    if (child.ok()) models_[child->value] = Model(models_.at(seq.value));
  }

  void Append(SeqId seq, int rows, bool decode) {
    KvBatch batch;
    const std::vector<KvStepItem> items{{seq, decode ? 0 : rows, decode ? rows : 0, false}};
    if (!cache_->Reserve(items, &batch).ok()) return Close(seq);
    std::vector<float> k(static_cast<size_t>(rows * kGroups * kDim)), v(k.size());
    std::vector<float> q(static_cast<size_t>(rows * kHeads * kDim)), out(q.size());
    for (std::vector<float>* values : {&k, &v, &q}) {
      for (float& x : *values) x = Value();
    }
    Model& model = models_.at(seq.value);
    for (int r = 0; r < rows; ++r) {
      for (int g = 0; g < kGroups; ++g) {
        const auto at = static_cast<std::ptrdiff_t>((r * kGroups + g) * kDim);
        model.lists[static_cast<size_t>(g)].push_back(
            {model.tokens + r, {k.begin() + at, k.begin() + at + kDim}, {v.begin() + at, v.begin() + at + kDim}, 0});
      }
    }
    model.tokens += rows;
    cache_->Append(batch, 0, MakeTensor(k.data(), DType::kF32, rows, kGroups, kDim), MakeTensor(v.data(), DType::kF32, rows, kGroups, kDim),
                   *stream_);
    cache_->Attend(batch, 0, MakeTensor(q.data(), DType::kF32, rows, kHeads, kDim), MakeTensor(out.data(), DType::kF32, rows, kHeads, kDim),
                   *stream_);
    cache_->Commit(batch, *stream_);
    const std::ptrdiff_t last = static_cast<std::ptrdiff_t>(rows - 1) * kHeads * kDim;
    Check(model, q.data() + last, out.data() + last);
  }

  // The last row sees everything.
  void Check(const Model& model, const float* q, const float* out) const {
    const double scale = 1 / std::sqrt(static_cast<double>(kDim));
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> sum(kDim, 0.0);
      double total = 0;
      for (const Entry& e : model.lists[static_cast<size_t>(h / kGroupHeads)]) {
        double dot = 0;
        for (int d = 0; d < kDim; ++d) dot += static_cast<double>(q[h * kDim + d]) * e.k[static_cast<size_t>(d)];
        const double weight = std::exp(dot * scale + e.beta);
        total += weight;
        for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * e.v[d];
      }
      for (int d = 0; d < kDim; ++d) {
        ASSERT_NEAR(static_cast<double>(out[h * kDim + d]), sum[static_cast<size_t>(d)] / total, 1e-4) << "head " << h << " dim " << d;
      }
    }
  }

  // One action on one or both lists. The model's entries stand in the order of the cache's.
  void Transact(SeqId seq) {
    Model model = models_.at(seq.value);
    if (model.tokens == 0) return;
    std::vector<ListAction> actions;
    for (int g = Below(2); g < kGroups; ++g) {
      ListAction action{0, g, {}, {}, false, {}};
      std::vector<Entry>& list = model.lists[static_cast<size_t>(g)];
      const int kind = Below(4);
      if (kind == 0) {
        Merge(&list, &action);
      } else if (kind == 1) {
        Overwrite(&list, &action);
      } else {
        Keep(&list, &action);
      }
      actions.push_back(std::move(action));
    }
    // Pages that an earlier step gave up are free from here on, which is no change of the repack's.
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
    for (size_t g = 0; g < kGroups; ++g) FollowOrder(cache_->ListPositions(seq, 0, static_cast<int>(g)), &model.lists[g]);
    models_.at(seq.value) = std::move(model);
    if (Below(3) > 0) Append(seq, 1, true);
  }

  void Keep(std::vector<Entry>* list, ListAction* action) {
    const int percent = 40 + Below(61);
    std::vector<Entry> kept;
    for (size_t e = 0; e < list->size(); ++e) {
      if (Below(100) >= percent) continue;
      action->keep.push_back(static_cast<int32_t>(e));
      kept.push_back((*list)[e]);
    }
    *list = std::move(kept);
  }

  void Overwrite(std::vector<Entry>* list, ListAction* action) {
    action->overwrite = true;
    std::vector<Entry> kept;
    for (size_t e = 0; e < list->size(); ++e) {
      if (Below(static_cast<int>(list->size())) < 2) {
        action->drop.push_back(static_cast<int32_t>(e));
      } else {
        kept.push_back((*list)[e]);
      }
    }
    *list = std::move(kept);
    ++overwritten_;
  }

  // Runs of two to five entries become one each; some others go.
  void Merge(std::vector<Entry>* list, ListAction* action) {
    std::vector<Entry> kept;
    for (size_t e = 0; e < list->size();) {
      const size_t run = std::min(list->size() - e, static_cast<size_t>(2 + Below(4)));
      if (Below(5) == 0 && run >= 2) {
        MergedEntry merged;
        Entry mean{(*list)[e].position, std::vector<double>(kDim, 0.0), std::vector<double>(kDim, 0.0), 0};
        merged.log_weight = static_cast<float>(std::log(static_cast<double>(run)));
        mean.beta = static_cast<double>(merged.log_weight);
        merged.position = mean.position;
        for (size_t i = e; i < e + run; ++i) {
          merged.sources.push_back(static_cast<int32_t>(i));
          merged.weights.push_back(1.0f / static_cast<float>(run));
          for (size_t d = 0; d < kDim; ++d) {
            mean.k[d] += (*list)[i].k[d] / static_cast<double>(run);
            mean.v[d] += (*list)[i].v[d] / static_cast<double>(run);
          }
        }
        action->merge.push_back(std::move(merged));
        kept.push_back(std::move(mean));
        e += run;
        ++merged_;
        continue;
      }
      if (Below(6) > 0) {
        action->keep.push_back(static_cast<int32_t>(e));
        kept.push_back((*list)[e]);
      }
      ++e;
    }
    *list = std::move(kept);
  }

  // The same positions, in whatever order the cache has them.
  static void FollowOrder(const std::vector<int32_t>& positions, std::vector<Entry>* list) {
    ASSERT_EQ(positions.size(), list->size());
    std::map<int, Entry> by_position;
    for (Entry& e : *list) by_position[e.position] = std::move(e);
    ASSERT_EQ(by_position.size(), positions.size());
    list->clear();
    for (const int32_t p : positions) {
      ASSERT_TRUE(by_position.count(p) == 1) << "position " << p << " is gone";
      list->push_back(std::move(by_position.at(p)));
    }
  }

  std::mt19937 random_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::map<int, Model> models_;
};

TEST(RepackProperty, TenThousandTransactions) {
  int done = 0, refused = 0, merged = 0, overwritten = 0;
  for (const uint32_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Fuzz fuzz(seed);
    fuzz.Run(2500);
    done += fuzz.done_, refused += fuzz.refused_, merged += fuzz.merged_, overwritten += fuzz.overwritten_;
  }
  EXPECT_EQ(done + refused, 10000);
  EXPECT_GT(refused, 40) << "no repack ever found the arena full";
  EXPECT_GT(merged, 1000);
  EXPECT_GT(overwritten, 1000);
}

}  // namespace
}  // namespace loupe
