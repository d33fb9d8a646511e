// Choosing tokens: a cluster of blocks a row of logits, a few passes over it. Weights have the CPU's bits; sums have its
// values to within the rounding of doubles, so that the same draw gives the same token.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sample_block.cuh"

namespace loupe::cuda {
namespace {

constexpr int kMaxRanks = 8;  // blocks of a cluster that every device can have

struct SampleInputs {
  float* logits;
  int64_t stride;
  int vocab, ranks;
  const SampleRow* rows;
  int num_rows;
  const LogitChange* changes;
  const uint32_t* masks;
  int64_t mask_words;
  float* saved;  // a place for each change
  SampledRow* out;
};

// Ids of a row's changes are distinct, so threads do not meet.
__device__ float Changed(float x, const LogitChange& c) {
  x = __fadd_rn(x, c.bias);
  x = x > 0 ? __fdiv_rn(x, c.repetition) : __fmul_rn(x, c.repetition);
  return __fsub_rn(__fsub_rn(x, c.frequency), c.presence);
}

// Draws by ids: the chunk in which the walk ends, then the token in it.
__device__ int32_t DrawFromAll(const SampleBlock& b, const SampleRow& row, float best) {
  const float threshold = row.min_p > 0 ? fminf(best + row.temperature * logf(row.min_p), best) : -INFINITY;
  const Weighting weight{best, __fdiv_rn(1.0f, row.temperature), threshold};
  const double target = row.u * b.ChunkSums<false>(weight, nullptr);
  const int own = static_cast<int>(threadIdx.x);
  const double sum = own < b.num_chunks() ? b.shared.chunk_sums[own] : 0;
  const double before_chunk = b.Before(sum);
  const int chunk = min(b.Count(own < b.num_chunks() && target >= before_chunk + sum), b.num_chunks() - 1);
  if (own == chunk) b.shared.found_mass = target - before_chunk;
  __syncthreads();
  const double left = b.shared.found_mass;
  const int id = chunk * kChunk + own;
  const double w = id < b.vocab ? static_cast<double>(weight(b.x[id])) : 0;
  const double before = b.Before(w);
  // The token whose share holds the draw; rounding may leave a rest behind: then the last one with a weight is meant.
  int32_t found = b.Least(w > 0 && left < before + w ? id : INT_MAX);
  if (found != INT_MAX) return found;
  found = b.Most(w > 0 ? id : -1);
  if (found >= 0) return found;
  int last = -1;
  for (int i = own; i < b.vocab; i += kSampleThreads) {
    if (weight(b.x[i]) > 0) last = i;
  }
  return b.Most(last);
}

struct Crossing {
  uint64_t key;  // of the token at which the mass, best tokens first, reaches what was asked
  double mass;   // up to it, itself included
};

// Where the mass reaches `target`, or exceeds it. *gathered: so many bins from the top lie in shared memory already.
__device__ Crossing Cross(const SampleBlock& b, const Bins& bins, const Weighting& weight, double target, bool exceeds,
                          Window* gathered) {
  const auto enough = [=](double mass) { return exceeds ? mass > target : mass >= target; };
  Window window = b.MassWindow(bins, target);
  double above = 0;
  if (gathered->count > 0 && gathered->first == 0 && window.end <= gathered->end) {
    window = *gathered;
  } else if (window.count > 0) {
    above = b.Gather(bins, window, weight);
    *gathered = window;
  }
  if (window.count > 0) {
    const int begin = static_cast<int>(threadIdx.x) * kShare, end = min(begin + kShare, window.count);
    double own = 0;
    for (int i = begin; i < end; ++i) own += static_cast<double>(weight(KeyLogit(b.shared.keys[i])));
    double mass = above + b.Before(own);
    int found = INT_MAX;
    for (int i = begin; i < end && found == INT_MAX; ++i) {
      mass += static_cast<double>(weight(KeyLogit(b.shared.keys[i])));
      if (enough(mass)) found = i;
    }
    const int first = b.Least(found);
    if (first != INT_MAX) {
      if (found == first) b.shared.found_mass = mass;
      __syncthreads();
      mass = b.shared.found_mass;
      __syncthreads();
      return {b.shared.keys[first], mass};
    }
  }
  // So many alike that no window holds them, or beyond all bins: a pass for every bit of the key.
  const uint64_t key = b.LastNeeded(weight, [&](const Above& a) { return enough(a.mass); });
  return {key, b.SumAbove(key, weight).mass};
}

// The best top_k tokens: the last of them, and their mass.
__device__ Crossing CutByCount(const SampleBlock& b, const Bins& bins, const Weighting& weight, int top_k, Window* gathered) {
  const Window window = b.TopWindow(bins, top_k);
  if (window.count == 0 || (window.count < top_k && window.count < bins.seen)) {
    const uint64_t key = b.LastNeeded(weight, [=](const Above& a) { return a.count >= top_k; });
    return {key, b.SumAbove(key, weight).mass};
  }
  b.Gather(bins, window, weight);
  *gathered = window;
  const int count = min(top_k, window.count);
  double own = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSampleThreads) {
    own += static_cast<double>(weight(KeyLogit(b.shared.keys[i])));
  }
  return {b.shared.keys[count - 1], b.Sum(own)};
}

__device__ int32_t Draw(const SampleBlock& b, const SampleRow& row, float best) {
  const bool has_top_k = row.top_k > 0 && row.top_k < b.vocab;
  if (!has_top_k && row.top_p >= 1) return DrawFromAll(b, row, best);
  const Weighting weight{best, __fdiv_rn(1.0f, row.temperature), -INFINITY};
  Bins bins(best, row.temperature, has_top_k);
  Crossing kept{0, b.ChunkSums<true>(weight, &bins)};
  Window gathered{0, 0, 0};
  if (has_top_k) kept = CutByCount(b, bins, weight, row.top_k, &gathered);
  if (row.top_p < 1) {
    const Crossing by_mass = Cross(b, bins, weight, static_cast<double>(row.top_p) * kept.mass, false, &gathered);
    if (by_mass.key > kept.key) kept = by_mass;
  }
  const double least = row.min_p;
  if (least > 0 && (kept.key == 0 || static_cast<double>(weight(KeyLogit(kept.key))) < least)) {
    kept.key = b.FirstKeyOfWeight(least, weight);
    kept.mass = b.SumAbove(kept.key, weight).mass;
  }
  const Crossing drawn = Cross(b, bins, weight, row.u * kept.mass, true, &gathered);
  return KeyId(drawn.key > kept.key ? drawn.key : kept.key);
}

// The best tokens and their log-probabilities; the logarithm of the sum of all exponentials.
__device__ double FillTop(const SampleBlock& b, int num_top, float best, SampledRow* out) {
  Bins bins(best, 1.0f, true);
  const Weighting weight{best, 1.0f, -INFINITY};
  const double log_sum = static_cast<double>(best) + log(b.ChunkSums<true>(weight, &bins));
  const Window window = b.TopWindow(bins, num_top);
  const bool sorted = window.count >= num_top || window.count == bins.seen;
  if (sorted) b.Gather(bins, window, weight);
  uint64_t key = ~uint64_t{0};
  int count = 0;
  for (; count < num_top; ++count) {
    if (sorted && count >= window.count) break;
    key = sorted ? b.shared.keys[count] : b.LargestBelow(key);
    if (key == 0) break;
    if (b.rank == 0 && threadIdx.x == 0) {
      out->top_ids[count] = KeyId(key);
      out->top_logprobs[count] = static_cast<float>(static_cast<double>(KeyLogit(key)) - log_sum);
    }
  }
  if (b.rank == 0 && threadIdx.x == 0) out->num_top = count;
  b.Sync();
  return log_sum;
}

// What the logits say before anything is changed, which rows with the same logits share.
struct Facts {
  Best best;
  double log_sum;
};

__device__ Facts Look(const SampleBlock& b, const SampleRow& row, SampledRow* out) {
  Facts facts{b.FindBest(), 0};
  if (b.rank == 0 && threadIdx.x == 0) out->best = facts.best.logit, out->num_top = 0, out->logprob = 0;
  if (isfinite(facts.best.logit) && row.num_top >= 0) facts.log_sum = FillTop(b, row.num_top, facts.best.logit, out);
  return facts;
}

__device__ void ApplyMask(const SampleBlock& b, const uint32_t* mask) {
  for (int i = b.first_id(); i < b.vocab; i += b.stride()) {
    if (!(mask[i / 32] >> (i % 32) & 1)) b.x[i] = -INFINITY;
  }
  b.Sync();
}

__device__ void Choose(const SampleBlock& b, const SampleRow& row, const LogitChange* changes, const Facts& facts, SampledRow* out) {
  Best best = facts.best;
  const bool finite = isfinite(best.logit), writes = b.rank == 0 && threadIdx.x == 0;
  for (int i = b.first_id(); i < row.num_changes; i += b.stride()) {
    float& x = b.x[changes[i].id];
    b.saved[i] = x;
    x = Changed(x, changes[i]);
  }
  b.Sync();
  if (row.num_changes > 0 || row.mask >= 0) best = b.FindBest();
  int32_t id = !finite ? kNoFiniteLogit : !isfinite(best.logit) ? kNoTokenLeft : best.id;
  if (id >= 0 && row.temperature >= kGreedyBelow) id = Draw(b, row, best.logit);
  b.Sync();
  for (int i = b.first_id(); i < row.num_changes; i += b.stride()) b.x[changes[i].id] = b.saved[i];
  b.Sync();  // nobody leaves while others may read its memory
  if (!writes) return;
  out->id = id;
  if (id >= 0 && row.num_top >= 0) out->logprob = static_cast<float>(static_cast<double>(b.x[id]) - facts.log_sum);
}

__global__ void __launch_bounds__(kSampleThreads) SampleKernel(const SampleInputs p) {
  extern __shared__ __align__(16) uint8_t memory[];
  SampleShared& shared = *reinterpret_cast<SampleShared*>(memory);
  GridWait();
  GridLaunch();
  int i = static_cast<int>(blockIdx.x) / p.ranks;
  const int32_t logits = p.rows[i].logits;
  if (i > 0 && p.rows[i - 1].logits == logits) return;  // the blocks of the first such row do them all
  const int first = i;
  Facts facts;
  for (; i < p.num_rows && p.rows[i].logits == logits; ++i) {
    const SampleRow row = p.rows[i];
    const SampleBlock block{shared, p.logits + int64_t{logits} * p.stride, p.vocab, p.saved + row.first_change,
                            static_cast<int>(blockIdx.x) % p.ranks, p.ranks};
    if (i == first) {
      facts = Look(block, row, p.out + i);
      if (row.mask >= 0) ApplyMask(block, p.masks + row.mask * p.mask_words);
    } else if (block.rank == 0 && threadIdx.x == 0) {
      p.out[i] = p.out[first];
      p.out[i].logprob = 0;
    }
    Choose(block, row, p.changes + row.first_change, facts, p.out + i);
  }
}

}  // namespace

void SampleCuda(const SampleArgs& args, CudaContext context) {
  const int64_t rows = args.rows.rows(), vocab = args.logits.row_elements();
  if (rows == 0) return;
  LOUPE_CHECK(vocab <= int64_t{kMaxChunks} * kChunk) << "a vocabulary of " << vocab;
  const int64_t num_changes = args.changes.defined() ? args.changes.rows() : 0;
  LOUPE_CHECK_LE(num_changes * 4, context.workspace->activation_bytes) << "changes of logits in one step";
  SampleInputs p = {};
  p.logits = args.logits.as<float>(), p.stride = args.logits.row_stride, p.vocab = static_cast<int>(vocab);
  p.rows = args.rows.as<SampleRow>(), p.num_rows = static_cast<int>(rows);
  p.masks = args.masks.as<uint32_t>(), p.mask_words = args.masks.row_stride;
  p.changes = args.changes.as<LogitChange>(), p.saved = static_cast<float*>(context.workspace->activations);
  p.out = args.out.as<SampledRow>();
  p.ranks = context.arch >= 90 ? kMaxRanks : 1;
  while (p.ranks > 1 && rows * p.ranks > context.num_sms) p.ranks /= 2;
  static const bool set = [] {
    LOUPE_CUDA(cudaFuncSetAttribute(SampleKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SampleShared)));
    return true;
  }();
  (void)set;
  const auto blocks = static_cast<unsigned>(rows * p.ranks);
  LaunchClusters(SampleKernel, blocks, static_cast<unsigned>(p.ranks), kSampleThreads, sizeof(SampleShared), context.stream, p);
}

}  // namespace loupe::cuda
