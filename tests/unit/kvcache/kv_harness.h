// Drives a KvCache and the CPU backend directly, beside an obvious model: for every sequence and list a plain vector of
// (position, key, value). After every step the attention output is compared with a double-precision oracle over the
// model, and the cache's books with what the model says. Shared by unit and property tests.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// Keeps a different random subset in every list, after prefill and again after every seventh token. A pure function of
// list and positions, so that the model can tell what has to remain.
class RandomSubsetPolicy final : public Policy {
 public:
  explicit RandomSubsetPolicy(uint32_t seed, Signals signals = {}) : seed_(seed), signals_(signals) {}
  std::string_view name() const override { return "random-subset"; }
  Signals signals() const override { return signals_; }
  int decode_interval() const override { return 1; }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override;
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override;

  // Whether the entry at `position` stays when the sequence ends at `last`.
  bool Keeps(bool after_prefill, int list_seed, int position, int last) const;
  static bool ActsAt(int last) { return last % 7 == 3; }

 private:
  void Act(bool after_prefill, std::span<const ListView> lists, std::vector<ListAction>* actions) const;
  uint32_t seed_;
  Signals signals_;
};

struct HarnessOptions {
  int layers = 2;
  int groups = 2;
  int heads_per_group = 2;
  int head_dim = 16;
  std::vector<int> windows = {};
  bool sinks = false;
  int64_t arena_bytes = int64_t{64} << 20;
  int max_sequences = 64;
  bool exact = true;  // f32 arithmetic; otherwise the backend's fast path for prompt rows
  uint32_t seed = 1;

  PageFormat format() const { return exact ? PageFormat{Codec::kF32, Codec::kF32} : PageFormat{}; }
  int64_t entry_bytes() const { return CodecBytes(format().key, head_dim) + CodecBytes(format().value, head_dim); }
};

enum class StepEnd { kCommit, kAbandonAtOnce, kAbandonMidway };

class KvHarness {
 public:
  explicit KvHarness(const HarnessOptions& options);

  // `policy` null: the full cache.
  SeqId Open(const RandomSubsetPolicy* policy = nullptr);
  absl::StatusOr<SeqId> Fork(SeqId parent);
  void Close(SeqId seq);
  // Runs a step and checks it. RESOURCE_EXHAUSTED if Reserve refuses; nothing may have changed then.
  absl::Status Step(const std::vector<KvStepItem>& items, StepEnd end = StepEnd::kCommit);
  // Books of the cache against the model.
  void CheckBooks();
  // Without forks and without a refusal the page bytes follow from the lists' lengths alone.
  int64_t ExpectedBytes() const;

  KvCache& cache() { return *cache_; }
  Backend& backend() { return *backend_; }
  Stream& stream() { return *stream_; }
  std::mt19937& random() { return random_; }
  int Uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  int num_open() const { return static_cast<int>(model_.size()); }
  const HarnessOptions& options() const { return options_; }
  // [H * D] attention of one row over the entries that it sees.
  std::vector<double> Oracle(SeqId seq, int layer, const float* q, int position) const;
  // The same over all entries of further sequences and one entry whose key and value are zero.
  std::vector<double> OracleWithZeroEntry(SeqId seq, int layer, const float* q, int position, const std::vector<SeqId>& extra) const;
  int64_t rows_checked() const { return rows_checked_; }
  int failed_repacks() const { return failed_repacks_; }

 private:
  struct Entry {
    int position;
    std::vector<float> k, v;
  };
  struct ModelSequence {
    const RandomSubsetPolicy* policy = nullptr;
    bool prefill_pending = false;
    int num_tokens = 0;
    std::vector<std::vector<Entry>> lists;
  };
  struct Row {
    int item;
    int position;
  };

  std::vector<float> RandomValues(size_t count);
  std::vector<Row> RowsOf(const std::vector<KvStepItem>& items) const;
  void RunLayer(KvBatch& batch, int layer, const std::vector<KvStepItem>& items, const std::vector<Row>& rows);
  void FollowPolicy(const KvStepItem& item);
  std::vector<Entry> Thinned(const ModelSequence& model, int list, bool after_prefill) const;
  bool HoldsExactly(SeqId seq, int list, const std::vector<Entry>& entries) const;
  std::vector<double> Softmax(int layer, const float* q, const std::vector<std::vector<const Entry*>>& seen) const;
  std::vector<std::vector<const Entry*>> Seen(SeqId seq, int layer, int position) const;
  void ForgetRows(const std::vector<KvStepItem>& items);

  HarnessOptions options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  std::mt19937 random_;
  std::vector<std::vector<float>> sinks_;
  std::map<int, ModelSequence> model_;
  KvBatch batch_;
  int64_t rows_checked_ = 0;
  int failed_repacks_ = 0;
};

}  // namespace loupe
