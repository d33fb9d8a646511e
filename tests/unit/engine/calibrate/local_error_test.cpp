// The local error beside plain attention in double precision.
#include "engine/calibrate/local_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace loupe {
namespace {

// Output of one row and head over the entries of `set` and the continuation up to the row.
std::vector<double> Attend(const ListRows& list, int row, int head, const std::vector<int32_t>& set, double* entropy) {
  const int context = list.entries() - list.rows();
  std::vector<int32_t> seen = set;
  for (int i = 0; i <= row; ++i) seen.push_back(context + i);
  std::vector<double> p;
  double sum = 0;
  for (const int32_t e : seen) {
    double dot = 0;
    for (int d = 0; d < list.dim; ++d) {
      dot += double{list.queries[static_cast<size_t>((row * list.heads + head) * list.dim + d)]} *
             double{list.keys[static_cast<size_t>(e * list.dim + d)]};
    }
    p.push_back(std::exp(dot * double{list.scale}));
    sum += p.back();
  }
  std::vector<double> out(static_cast<size_t>(list.dim), 0.0);
  *entropy = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    const double w = p[i] / sum;
    *entropy -= w * std::log(w) / std::log(static_cast<double>(seen.size()));
    for (int d = 0; d < list.dim; ++d)
      out[static_cast<size_t>(d)] += w * double{list.values[static_cast<size_t>(seen[i] * list.dim + d)]};
  }
  return out;
}

TEST(LocalError, EqualsPlainAttention) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto& [context, rows, heads, dim] :
       {std::array{50, 7, 3, 16}, {17, 1, 1, 8}, {64, 13, 2, 10}, {1, 4, 4, 16}}) {
    ListRows list;
    list.heads = heads, list.dim = dim, list.scale = 0.3f;
    std::vector<float> queries(static_cast<size_t>(rows * heads * dim));
    list.keys.resize(static_cast<size_t>((context + rows) * dim));
    list.values.resize(list.keys.size());
    for (auto* values : {&queries, &list.keys, &list.values}) {
      for (float& x : *values) x = normal(random);
    }
    list.queries = queries;
    std::vector<int32_t> all, half;
    for (int e = 0; e < context; ++e) {
      all.push_back(e);
      if (random() % 2) half.push_back(e);
    }
    const std::vector<std::vector<int32_t>> sets{all, half, {}};
    std::vector<bool> counted(static_cast<size_t>(rows), true);
    if (rows > 2) counted[1] = false;
    const int first = rows / 2;
    double entropy = 0;
    const std::vector<LocalError> errors = MeasureList(list, sets, counted, first, &entropy);
    double counted_rows = 0, first_rows = 0, expected_entropy = 0;
    for (int row = 0; row < rows; ++row)
      counted_rows += counted[static_cast<size_t>(row)], first_rows += row < first && counted[static_cast<size_t>(row)];
    for (size_t s = 0; s < sets.size(); ++s) {
      double squared = 0, cosine = 0, squared_first = 0;
      for (int row = 0; row < rows; ++row) {
        if (!counted[static_cast<size_t>(row)]) continue;
        double difference = 0, aa = 0, bb = 0, ab = 0;
        for (int head = 0; head < heads; ++head) {
          double h = 0, ignored = 0;
          const auto a = Attend(list, row, head, all, &h), b = Attend(list, row, head, sets[s], &ignored);
          if (s == 0) expected_entropy += h / (counted_rows * heads);
          for (size_t d = 0; d < a.size(); ++d)
            difference += (a[d] - b[d]) * (a[d] - b[d]), aa += a[d] * a[d], bb += b[d] * b[d], ab += a[d] * b[d];
        }
        squared += difference / counted_rows;
        cosine += ab / std::sqrt(aa * bb) / counted_rows;
        if (row < first) squared_first += difference / first_rows;
      }
      EXPECT_NEAR(errors[s].squared, squared, 1e-5 * (1 + squared));
      EXPECT_NEAR(errors[s].cosine, cosine, 1e-5);
      EXPECT_NEAR(errors[s].squared_first, first_rows > 0 ? squared_first : squared, 1e-5 * (1 + squared_first));
    }
    EXPECT_LT(errors[0].squared, 1e-9);
    EXPECT_NEAR(entropy, expected_entropy, 1e-5);
  }
}

}  // namespace
}  // namespace loupe
