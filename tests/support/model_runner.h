// Drives a decoder by hand, without an engine: opens sequences, feeds rows in any cut and keeps the logits of every
// row. For tests of the pass and for quality tools; one thread.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/model/decoder.h"
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kvcache/kv_cache.h"

namespace loupe::testing {

class ModelRunner {
 public:
  // What one sequence adds in a step.
  struct Item {
    SeqId seq;
    std::vector<int32_t> ids;
    bool decode = false;  // phase of these rows
  };

  ModelRunner(Backend& backend, Decoder& decoder, int max_rows, int64_t cache_bytes = int64_t{64} << 20)
      : backend_(backend), decoder_(decoder), stream_(backend.NewStream()) {
    KvConfig config;
    config.device_bytes = cache_bytes;
    config.max_step_rows = max_rows;
    auto cache = KvCache::Create(config, decoder.kv_shape(), backend);
    LOUPE_CHECK(cache.ok()) << cache.status().ToString();
    cache_ = *std::move(cache);
  }

  KvCache& cache() { return *cache_; }
  // If wanted: of the second row's token and the following ones, after a step of a single item.
  bool wants_surprisal = false;
  std::vector<float> surprisal;

  SeqId Open() {
    auto seq = cache_->Open();
    LOUPE_CHECK(seq.ok()) << seq.status().ToString();
    return *seq;
  }

  // One step. Logits of every row, item by item; only those of an item's last row if `last_only`.
  std::vector<std::vector<std::vector<float>>> Step(const std::vector<Item>& items, bool last_only = false) {
    std::vector<KvStepItem> plan;
    std::vector<int32_t> ids, wanted;
    std::vector<size_t> owner;
    for (const Item& item : items) {
      const int rows = static_cast<int>(item.ids.size());
      plan.push_back({item.seq, item.decode ? 0 : rows, item.decode ? rows : 0, false});
    }
    for (const bool decode : {false, true}) {  // prompt rows come first
      for (size_t i = 0; i < items.size(); ++i) {
        if (items[i].decode != decode) continue;
        for (size_t j = 0; j < items[i].ids.size(); ++j) {
          if (!last_only || j + 1 == items[i].ids.size()) {
            wanted.push_back(static_cast<int32_t>(ids.size()));
            owner.push_back(i);
          }
          ids.push_back(items[i].ids[j]);
        }
      }
    }
    const auto vocab = static_cast<size_t>(decoder_.config().vocab_size);
    std::vector<float> logits(wanted.size() * vocab);
    const absl::Status reserved = cache_->Reserve(plan, &batch_);
    LOUPE_CHECK(reserved.ok()) << reserved.ToString();
    DecoderStep step;
    step.ids = MakeTensor(ids.data(), DType::kI32, static_cast<int64_t>(ids.size()));
    step.cache = cache_.get();
    step.batch = &batch_;
    step.logit_rows = MakeTensor(wanted.data(), DType::kI32, static_cast<int64_t>(wanted.size()));
    step.logits =
        MakeTensor(logits.data(), DType::kF32, static_cast<int64_t>(wanted.size()), static_cast<int64_t>(vocab));
    std::vector<int32_t> target_rows, targets;
    std::vector<float> block(3 * vocab);
    for (size_t row = 0; wants_surprisal && row + 1 < ids.size(); ++row) {
      target_rows.push_back(static_cast<int32_t>(row));
      targets.push_back(ids[row + 1]);
    }
    surprisal.assign(targets.size(), -1.f);
    if (!targets.empty()) {
      const auto count = static_cast<int64_t>(targets.size());
      step.targets.rows = MakeTensor(target_rows.data(), DType::kI32, count);
      step.targets.ids = MakeTensor(targets.data(), DType::kI32, count);
      step.targets.surprisal = MakeTensor(surprisal.data(), DType::kF32, count);
      step.targets.block = MakeTensor(block.data(), DType::kF32, 3, static_cast<int64_t>(vocab));
    }
    decoder_.Forward(step, *stream_);
    LOUPE_CHECK(stream_->Synchronize().ok()) << "the device failed";
    cache_->Commit(batch_, *stream_);
    std::vector<std::vector<std::vector<float>>> out(items.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(i * vocab);
      out[owner[i]].emplace_back(begin, begin + static_cast<std::ptrdiff_t>(vocab));
    }
    return out;
  }

  // Prompt rows of one sequence in chunks; logits of every row.
  std::vector<std::vector<float>> Prefill(SeqId seq, std::span<const int32_t> ids, size_t chunk) {
    std::vector<std::vector<float>> out;
    for (size_t at = 0; at < ids.size(); at += chunk) {
      const auto part = ids.subspan(at, std::min(chunk, ids.size() - at));
      auto logits = Step({{seq, {part.begin(), part.end()}}});
      for (auto& row : logits[0]) out.push_back(std::move(row));
    }
    return out;
  }

 private:
  Backend& backend_;
  Decoder& decoder_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
};

}  // namespace loupe::testing
