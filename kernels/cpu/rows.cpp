// The ops that move or scale single rows: embedding, gathering, and the drivers of norm, activation and rotation, whose
// inner loops are in row_kernels.inc. Each is a small fraction of a step, bound by memory in cache; rows are shared
// among the threads once there is enough to do. A row is always computed whole by one thread.
#include <cmath>
#include <cstring>

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/scratch.h"

namespace loupe {
namespace {

// Elements below which waking the team costs more than it saves.
constexpr int64_t kSmallJob = 16384;

const RowKernels& KernelsOf(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return kAvx512Rows;
    case Isa::kAvx2:
      return kAvx2Rows;
    default:
      return kPortableRows;
  }
}

// Calls work(row) for all rows, on the caller alone if `elements` is small.
template <class Work>
void ForRows(CpuContext& context, int64_t rows, int64_t elements, const Work& work) {
  if (elements < kSmallJob || rows == 1) {
    for (int64_t row = 0; row < rows; ++row) work(row);
    return;
  }
  context.pool.Run([&](int thread) {
    const auto [begin, end] = context.pool.Share(rows, thread);
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

bool SameAs(const std::vector<int32_t>& kept, const int32_t* now, int64_t n) {
  return kept.size() == static_cast<size_t>(n) && std::memcmp(kept.data(), now, kept.size() * sizeof(int32_t)) == 0;
}
bool SameAs(const std::vector<float>& kept, const float* now, int64_t n) {
  return kept.size() == static_cast<size_t>(n) && std::memcmp(kept.data(), now, kept.size() * sizeof(float)) == 0;
}

// Angles are computed in double: at position 100,000 an f32 angle would be off by .004.
void FillRotations(RotationTable& table, const RopeArgs& args, CpuContext& context) {
  const int64_t rows = args.x.rows();
  const int64_t pairs = args.frequencies.rows();
  const int32_t* positions = args.positions.as<int32_t>();
  const float* frequencies = args.frequencies.as<float>();
  if (SameAs(table.positions, positions, rows) && SameAs(table.frequencies, frequencies, pairs)) return;
  table.positions.assign(positions, positions + rows);
  table.frequencies.assign(frequencies, frequencies + pairs);
  table.cosine.resize(static_cast<size_t>(rows * pairs));
  table.sine.resize(static_cast<size_t>(rows * pairs));
  constexpr int64_t kCostOfSine = 16;  // in elements
  ForRows(context, rows, rows * pairs * kCostOfSine, [&](int64_t row) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(positions[row]) * static_cast<double>(frequencies[i]);
      table.cosine[static_cast<size_t>(row * pairs + i)] = static_cast<float>(std::cos(angle));
      table.sine[static_cast<size_t>(row * pairs + i)] = static_cast<float>(std::sin(angle));
    }
  });
}

}  // namespace

void EmbedCpu(const EmbedArgs& args, CpuContext context) {
  const auto& table = static_cast<const PackedWeight&>(*args.table);
  const int64_t rows = args.ids.rows();
  LOUPE_CHECK_EQ(args.out.row_elements(), table.cols());
  LOUPE_CHECK_EQ(args.out.rows(), rows);
  const int32_t* ids = args.ids.as<int32_t>();
  ForRows(context, rows, rows * table.cols() * 8,
          [&](int64_t row) { table.ReadRow(ids[row], args.out.row<float>(row)); });
}

void GatherRowsCpu(const GatherRowsArgs& args, CpuContext context) {
  const int64_t rows = args.rows.rows();
  const int64_t width = args.x.row_elements();
  LOUPE_CHECK_EQ(args.out.row_elements(), width);
  LOUPE_CHECK_GE(args.out.rows(), rows);
  const int32_t* from = args.rows.as<int32_t>();
  ForRows(context, rows, rows * width, [&](int64_t i) {
    LOUPE_CHECK(from[i] >= 0 && from[i] < args.x.rows()) << "row " << from[i] << " of " << args.x.rows();
    std::memcpy(args.out.row<float>(i), args.x.row<float>(from[i]), static_cast<size_t>(width) * sizeof(float));
  });
}

void RmsNormCpu(const RmsNormArgs& args, CpuContext context) {
  const int64_t rows = args.x.rows();
  const int64_t width = args.x.row_elements();
  const int64_t n = args.weight.rows();
  LOUPE_CHECK(n > 0 && width % n == 0) << "rows of " << width << " against a weight of " << n;
  LOUPE_CHECK_EQ(args.out.rows(), rows);
  LOUPE_CHECK_EQ(args.out.row_elements(), width);
  const auto norm = KernelsOf(context.isa).rms_norm;
  ForRows(context, rows, rows * width, [&](int64_t row) {
    for (int64_t at = 0; at < width; at += n) {
      norm(args.x.row<float>(row) + at, args.weight.as<float>(), args.eps, n, args.out.row<float>(row) + at);
    }
  });
}

void SiluMulCpu(const SiluMulArgs& args, CpuContext context) {
  const int64_t rows = args.out.rows();
  const int64_t width = args.out.row_elements();
  LOUPE_CHECK_EQ(args.gate_up.rows(), rows);
  LOUPE_CHECK_EQ(args.gate_up.row_elements(), 2 * width);
  const auto silu_mul = KernelsOf(context.isa).silu_mul;
  ForRows(context, rows, rows * width * 2, [&](int64_t row) {
    const float* gate = args.gate_up.row<float>(row);
    silu_mul(gate, gate + width, width, args.out.row<float>(row));
  });
}

void RopeCpu(const RopeArgs& args, CpuContext context) {
  const int64_t rows = args.x.rows();
  const int64_t heads = args.x.shape[1];
  const int64_t head_dim = args.x.shape[2];
  const int64_t pairs = args.frequencies.rows();
  LOUPE_CHECK_EQ(args.positions.rows(), rows);
  LOUPE_CHECK_LE(2 * pairs, head_dim);
  LOUPE_CHECK(context.scratch != nullptr) << "Rope without scratch";
  RotationTable& table = context.scratch->rotations;
  FillRotations(table, args, context);
  const RowKernels& kernels = KernelsOf(context.isa);
  const auto rotate = args.interleaved ? kernels.rotate_interleaved : kernels.rotate_halves;
  ForRows(context, rows, rows * heads * head_dim, [&](int64_t row) {
    const float* cosine = table.cosine.data() + row * pairs;
    const float* sine = table.sine.data() + row * pairs;
    for (int64_t head = 0; head < heads; ++head) {
      rotate(args.x.row<float>(row) + head * head_dim, cosine, sine, args.scale, pairs);
    }
  });
}

}  // namespace loupe
