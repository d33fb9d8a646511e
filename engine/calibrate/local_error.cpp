#include "engine/calibrate/local_error.h"

#include <algorithm>
#include <cmath>

#include "kernels/check.h"

namespace loupe {
namespace {

constexpr int kLanes = 8;  // rows computed side by side

// Eight (row, head) pairs of a list: their attention weights over all entries, entry by entry, and their outputs.
struct Block {
  std::vector<float> weights;  // [n][lanes]
  int row[kLanes];
  int head[kLanes];
  int used = 0;
};

void Scores(const ListRows& list, Block* block) {
  const int dim = list.dim, n = list.entries();
  std::vector<float> q(static_cast<size_t>(dim * kLanes), 0.f);  // [D][lanes]
  for (int lane = 0; lane < block->used; ++lane) {
    const float* from = list.queries.data() + (block->row[lane] * list.heads + block->head[lane]) * dim;
    for (int d = 0; d < dim; ++d) q[static_cast<size_t>(d * kLanes + lane)] = from[d] * list.scale;
  }
  for (int e = 0; e < n; ++e) {
    const float* key = list.keys.data() + static_cast<int64_t>(e) * dim;
    float sum[kLanes] = {};
    for (int d = 0; d < dim; ++d) {
      const float* column = q.data() + d * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) sum[lane] += column[lane] * key[d];
    }
    std::copy_n(sum, kLanes, block->weights.data() + static_cast<int64_t>(e) * kLanes);
  }
}

// Scores become weights; a row sees all entries before its own and that one. Returns the sum of entropies over the log
// of what is seen.
double Softmax(const ListRows& list, Block* block) {
  const int n = list.entries(), context = n - list.rows();
  double entropy = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int seen = lane < block->used ? context + block->row[lane] + 1 : 0;
    float* w = block->weights.data() + lane;
    float highest = -1e30f;
    for (int e = 0; e < seen; ++e) highest = std::max(highest, w[e * kLanes]);
    double sum = 0, weighted = 0;
    for (int e = 0; e < seen; ++e) {
      const float x = w[e * kLanes] - highest, p = std::exp(x);
      w[e * kLanes] = p;
      sum += double{p}, weighted += double{p} * double{x};
    }
    for (int e = seen; e < n; ++e) w[e * kLanes] = 0;
    if (seen < 2) continue;
    entropy += (std::log(sum) - weighted / sum) / std::log(static_cast<double>(seen));
  }
  return entropy;
}

// The part of AddValues for kTile dimensions from d0 on, whose sums stay in registers.
template <int kTile, class Entries>
void AddTile(const ListRows& list, const Block& block, const Entries& entry, int count, int d0, float* out) {
  float sum[kTile][kLanes] = {};
  for (int i = 0; i < count; ++i) {
    const int64_t e = entry(i);
    const float* w = block.weights.data() + e * kLanes;
    const float* v = list.values.data() + e * list.dim + d0;
    for (int d = 0; d < kTile; ++d) {
      for (int lane = 0; lane < kLanes; ++lane) sum[d][lane] += v[d] * w[lane];
    }
  }
  for (int d = 0; d < kTile; ++d) {
    for (int lane = 0; lane < kLanes; ++lane) out[(d0 + d) * kLanes + lane] += sum[d][lane];
  }
}

// Adds weight * value of some entries to out [D][lanes], and their weights to mass [lanes].
template <class Entries>
void AddValues(const ListRows& list, const Block& block, const Entries& entry, int count, float* out, float* mass) {
  int d = 0;
  for (; d + 4 <= list.dim; d += 4) AddTile<4>(list, block, entry, count, d, out);
  for (; d < list.dim; ++d) AddTile<1>(list, block, entry, count, d, out);
  for (int i = 0; i < count; ++i) {
    const int64_t e = entry(i);
    for (int lane = 0; lane < kLanes; ++lane) mass[lane] += block.weights[static_cast<size_t>(e * kLanes + lane)];
  }
}

// Products of two outputs, summed over the heads of a row.
struct RowProducts {
  double full = 0, kept = 0, both = 0, difference = 0;
};

}  // namespace

std::vector<LocalError> MeasureList(const ListRows& list, std::span<const std::vector<int32_t>> sets,
                                    const std::vector<bool>& counted, int first_rows, double* entropy) {
  const int n = list.entries(), m = list.rows(), context = n - m;
  std::vector<int> rows;
  for (int row = 0; row < m; ++row) {
    if (counted[static_cast<size_t>(row)]) rows.push_back(row);
  }
  const int pairs = static_cast<int>(rows.size()) * list.heads;
  const size_t out_values = static_cast<size_t>(list.dim * kLanes);
  std::vector<std::vector<RowProducts>> products(sets.size(), std::vector<RowProducts>(static_cast<size_t>(m)));
  Block block;
  block.weights.resize(static_cast<size_t>(n) * kLanes);
  double entropies = 0;
  for (int first = 0; first < pairs; first += kLanes) {
    block.used = std::min(kLanes, pairs - first);
    for (int lane = 0; lane < block.used; ++lane)
      block.row[lane] = rows[static_cast<size_t>((first + lane) / list.heads)],
      block.head[lane] = (first + lane) % list.heads;
    Scores(list, &block);
    entropies += Softmax(list, &block);
    std::vector<float> own(out_values, 0.f), full, kept;  // of the continuation, of everything, of a set
    float own_mass[kLanes] = {}, full_mass[kLanes], kept_mass[kLanes];
    AddValues(
        list, block, [&](int i) { return context + i; }, m, own.data(), own_mass);
    full = own;
    std::copy_n(own_mass, kLanes, full_mass);
    AddValues(
        list, block, [](int i) { return i; }, context, full.data(), full_mass);
    for (size_t s = 0; s < sets.size(); ++s) {
      const std::vector<int32_t>& set = sets[s];
      kept = own;
      std::copy_n(own_mass, kLanes, kept_mass);
      AddValues(
          list, block, [&](int i) { return set[static_cast<size_t>(i)]; }, static_cast<int>(set.size()), kept.data(),
          kept_mass);
      for (int lane = 0; lane < block.used; ++lane) {
        RowProducts& p = products[s][static_cast<size_t>(block.row[lane])];
        for (int d = 0; d < list.dim; ++d) {
          const size_t at = static_cast<size_t>(d * kLanes + lane);
          const double a = double{full[at]} / double{full_mass[lane]}, b = double{kept[at]} / double{kept_mass[lane]};
          p.full += a * a, p.kept += b * b, p.both += a * b, p.difference += (a - b) * (a - b);
        }
      }
    }
  }
  const double total = static_cast<double>(std::count(counted.begin(), counted.end(), true));
  LOUPE_CHECK(total > 0) << "no row counts";
  const auto first_end = counted.begin() + std::min(first_rows, m);
  const double of_first = static_cast<double>(std::count(counted.begin(), first_end, true));
  std::vector<LocalError> errors(sets.size());
  for (size_t s = 0; s < sets.size(); ++s) {
    LocalError& e = errors[s];
    for (int row = 0; row < m; ++row) {
      if (!counted[static_cast<size_t>(row)]) continue;
      const RowProducts& p = products[s][static_cast<size_t>(row)];
      const double cosine = p.both / std::sqrt(std::max(p.full * p.kept, 1e-60));
      e.squared += p.difference / total, e.cosine += cosine / total;
      if (row < first_rows) e.squared_first += p.difference / of_first, e.cosine_first += cosine / of_first;
    }
    if (of_first == 0) e.squared_first = e.squared, e.cosine_first = e.cosine;
  }
  *entropy = entropies / (total * list.heads);
  return errors;
}

}  // namespace loupe
