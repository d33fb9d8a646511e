// What a list's attention output loses when only some entries of the context stay: computed from keys, values and
// queries of a full pass, so that nothing propagates from layer to layer. The rows are those of a continuation; each
// sees the entries that stay and the continuation up to itself. f32 products, double sums. Any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace loupe {

// One list and the query heads of its group. Context and continuation together have n entries, the last m are the
// continuation's, one a row.
struct ListRows {
  int heads = 0, dim = 0;           // R, D
  float scale = 0;                  // of q . k
  std::vector<float> keys, values;  // [n, D]
  std::span<const float> queries;   // [m, R, D]

  int entries() const { return static_cast<int>(keys.size()) / dim; }
  int rows() const { return static_cast<int>(queries.size()) / (heads * dim); }
};

// Means over rows; the heads of the group make one vector.
struct LocalError {
  double squared = 0;        // |o - o_full|^2
  double cosine = 0;         // of o and o_full
  double squared_first = 0;  // over the first rows alone
  double cosine_first = 0;
};

// One error a set. A set holds indexes below n - m, the context's entries that stay. Only rows of `counted` ([m], not
// all false) enter the means; of the first `first_rows` rows, those counted enter the second pair, or all if there is
// none. `entropy` gets the mean over counted rows and heads of the full attention's entropy over the log of what a row
// sees.
std::vector<LocalError> MeasureList(const ListRows& list, std::span<const std::vector<int32_t>> sets,
                                    const std::vector<bool>& counted, int first_rows, double* entropy);

}  // namespace loupe
