// -log softmax at one token of each row.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/cpu_ops.h"

namespace loupe {

void SurprisalCpu(const SurprisalArgs& args, CpuContext context) {
  const int64_t vocab = args.logits.row_elements();
  context.pool.Run([&](int thread) {
    const auto [begin, end] = context.pool.Share(args.logits.rows(), thread);
    for (int64_t row = begin; row < end; ++row) {
      const float* x = args.logits.row<float>(row);
      const float top = *std::max_element(x, x + vocab);
      double sum = 0;
      for (int64_t id = 0; id < vocab; ++id) sum += std::exp(static_cast<double>(x[id] - top));
      args.out.as<float>()[row] = static_cast<float>(std::log(sum) + static_cast<double>(top - x[args.ids.as<int32_t>()[row]]));
    }
  });
}

}  // namespace loupe
