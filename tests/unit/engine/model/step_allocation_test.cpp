// A step of a steady server takes no memory: every allocation of this binary is counted, and decode steps after the first
// few make none, whatever the number of sequences, until a list needs a new page.
#include <atomic>
#include <cstdlib>
#include <new>

#include "engine/load/load_model.h"
#include "gtest/gtest.h"
#include "tests/support/tiny_model.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOUPE_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LOUPE_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef LOUPE_COUNTS_ALLOCATIONS
#define LOUPE_COUNTS_ALLOCATIONS 1
#endif

#if LOUPE_COUNTS_ALLOCATIONS
namespace {
std::atomic<int64_t> g_allocations{0};
}
void* operator new(size_t bytes) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t align) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t a = static_cast<size_t>(align);
  if (void* p = std::aligned_alloc(a, (bytes + a - 1) / a * a)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
#endif

namespace loupe {
namespace {

#if LOUPE_COUNTS_ALLOCATIONS
TEST(StepAllocations, SteadyDecodeStepsMakeNone) {
  const std::string path = ::testing::TempDir() + "loupe_step_allocation.gguf";
  testing::MakeTinyModel().Write(path);
  EngineConfig config;
  config.backend.device = "cpu";
  config.backend.num_threads = 2;
  auto model = LoadModel(path, config);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  KvConfig kv;
  kv.device_bytes = int64_t{64} << 20;
  auto cache = KvCache::Create(kv, model->decoder->kv_shape(), *model->backend).value();
  const auto stream = model->backend->NewStream();
  for (const int sequences : {1, 3, 8}) {
    std::vector<KvStepItem> items;
    for (int i = 0; i < sequences; ++i) items.push_back({cache->Open().value(), 0, 1, false});
    std::vector<int32_t> ids(items.size(), 5), rows;
    for (size_t i = 0; i < items.size(); ++i) rows.push_back(static_cast<int32_t>(i));
    std::vector<float> logits(items.size() * static_cast<size_t>(model->config.vocab_size));
    KvBatch batch;
    int64_t allocations = 0;
    for (int step = 0; step < 60; ++step) {
      // A new page at entry 16 (the small one is full) may cost; from 24 to 60 everything is in place.
      const int64_t before = g_allocations.load();
      ASSERT_TRUE(cache->Reserve(items, &batch).ok());
      DecoderStep pass;
      pass.ids = MakeTensor(ids.data(), DType::kI32, sequences);
      pass.cache = cache.get();
      pass.batch = &batch;
      pass.logit_rows = MakeTensor(rows.data(), DType::kI32, sequences);
      pass.logits = MakeTensor(logits.data(), DType::kF32, sequences, model->config.vocab_size);
      model->decoder->Forward(pass, *stream);
      cache->Commit(batch, *stream);
      if (step >= 24) allocations += g_allocations.load() - before;
    }
    EXPECT_EQ(allocations, 0) << sequences << " sequences";
    for (const KvStepItem& item : items) cache->Close(item.seq);
  }
}
#endif

}  // namespace
}  // namespace loupe
