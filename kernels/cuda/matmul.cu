// Which kernel multiplies what: few rows are read past the weights at the speed of memory, many go to cuBLASLt. Exact
// mode and shapes that neither takes have the plain kernel.
#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/lt_matmul.h"

namespace loupe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kAlignElements = 8;  // 16 bytes of fp16

template <class T>
__global__ void AddBiasKernel(T* x, int64_t stride, const float* bias, int cols) {
  GridWait();
  GridLaunch();
  const int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (i < cols)
    x[int64_t{blockIdx.x} * stride + i] = FromFloat<T>(ToFloat(x[int64_t{blockIdx.x} * stride + i]) + bias[i]);
}

bool Aligned(const Tensor& x) {
  return x.dtype == DType::kF16 && x.row_stride % kAlignElements == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_elements() % kAlignElements == 0;
}

void MatMulMany(const MatMulArgs& args, const Tensor& x, CudaContext context) {
  const auto& weight = static_cast<const WeightCuda&>(*args.weight);
  LtProduct p;
  p.weight = weight.data(), p.weight_stride = weight.stride(), p.rows = weight.rows();
  p.cols = x.shape[1];
  p.x = x.data, p.x_stride = x.row_stride, p.tokens = x.rows();
  if (args.add.defined()) p.add = args.add.data, p.add_stride = args.add.row_stride;
  p.out = args.out.data, p.out_stride = args.out.row_stride, p.out_half = args.out.dtype == DType::kF16;
  context.lt->Run(p, context.deterministic, context.stream);
  if (!args.bias.defined()) return;
  const auto launch = [&](auto type) {
    using T = decltype(type);
    Launch(AddBiasKernel<T>, dim3(static_cast<unsigned>(x.rows()), Blocks(weight.rows(), kThreads)), kThreads, 0,
           context.stream, args.out.as<T>(), args.out.row_stride, args.bias.as<float>(),
           static_cast<int>(weight.rows()));
  };
  p.out_half ? launch(__half{}) : launch(float{});
}

bool Few(const MatMulArgs& args, CudaContext context) {
  return args.x.rows() <= kSkinnyRows && !context.deterministic && !context.exact;
}

// Without what comes before and after it, but for what few rows have fused.
void Multiply(const MatMulArgs& args, CudaContext context) {
  const auto& weight = static_cast<const WeightCuda&>(*args.weight);
  LOUPE_CHECK_EQ(args.x.row_elements(), weight.cols());
  LOUPE_CHECK_EQ(args.out.row_elements(), weight.rows());
  LOUPE_CHECK(!args.add.defined() || args.add.dtype == args.out.dtype) << "a residual of another type than the output";
  if (context.exact) return MatMulPlain(args, context);

  const auto multiply = [&](const MatMulArgs& part, const Tensor& x) {
    // Both read rows of `stride` columns, of which those past `cols` are zero on the side of the weights.
    const bool fits_lt = part.out.row_stride % kAlignElements == 0 &&
                         reinterpret_cast<uintptr_t>(part.out.data) % 16 == 0 && weight.rows() % kAlignElements == 0;
    if (Few(part, context)) {
      MatMulSkinny(part, x, context);
    } else if (fits_lt) {
      MatMulMany(part, x, context);
    } else {
      MatMulPlain(part, context);
    }
  };
  if (Aligned(args.x)) return multiply(args, args.x);

  // An input that cannot be read 16 bytes at a time is copied, in pieces that fit.
  LOUPE_CHECK(args.x.dtype == DType::kF32) << "fp16 input rows must be 16-byte aligned";
  const int64_t stride = (weight.cols() + kAlignElements - 1) / kAlignElements * kAlignElements;
  const int64_t piece = context.workspace->activation_bytes / (2 * stride);
  LOUPE_CHECK(piece > 0) << weight.cols() << " columns";
  for (int64_t first = 0; first < args.x.rows(); first += piece) {
    const int64_t rows = std::min(piece, args.x.rows() - first);
    MatMulArgs part = args;
    part.x = MakeTensor(args.x.row<float>(first), DType::kF32, rows, weight.cols());
    part.x.row_stride = args.x.row_stride;
    const auto rows_of = [&](const Tensor& t) {
      Tensor view = t;
      view.shape[0] = rows;
      view.data = t.as<char>() + first * t.row_stride * DTypeBytes(t.dtype);
      return view;
    };
    part.out = rows_of(args.out);
    if (args.add.defined()) part.add = rows_of(args.add);
    ConvertToHalf(part.x, context.workspace->activations, stride, context);
    Tensor x = MakeTensor(context.workspace->activations, DType::kF16, rows, stride);
    x.rank = 2;
    multiply(part, x);
  }
}

}  // namespace

void MatMulCuda(const MatMulArgs& args, CudaContext context) {
  if (args.x.rows() == 0) return;
  MatMulArgs product = args;
  const bool few = Few(args, context) && Aligned(args.x);
  const bool norm = args.norm.x.defined(), gate = args.gated.defined();
  const bool fused_norm = few && norm && SkinnyTakesNorm(args), fused_gate = few && gate && args.out.row_elements() % 16 == 0;
  if (norm && !fused_norm) RmsNormCuda(args.norm, context);
  if (!fused_norm) product.norm = {};
  if (!fused_gate) product.gated = {};
  Multiply(product, context);
  if (gate && !fused_gate) SiluMulCuda({args.out, args.gated}, context);
}

}  // namespace loupe::cuda
