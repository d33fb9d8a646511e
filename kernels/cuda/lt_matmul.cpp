#include "kernels/cuda/lt_matmul.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cuda/cuda_status.h"

namespace loupe::cuda {
namespace {

// The part of cuBLASLt 13's binary interface that is used here (names and values: its public header cublasLt.h).
constexpr int kComputeF32 = 68, kTypeF32 = 0, kTypeHalf = 2;
constexpr int kDescTransposeA = 3, kPreferenceWorkspace = 1, kPreferenceReductions = 3;
constexpr int kTranspose = 1;
constexpr const char* kLibrary = "libcublasLt.so.13";

constexpr int kMaxChoices = 8;
constexpr int kTimedRuns = 4;
constexpr int64_t kDeterministicTokens = 512;  // the shape whose choice serves all in deterministic mode

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int64_t Bucket(int64_t tokens) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(tokens, 16))));
}

}  // namespace

struct LtApi {
  void* library = nullptr;
  int (*create)(void**);
  int (*destroy)(void*);
  int (*desc_create)(void**, int, int);
  int (*desc_set)(void*, int, const void*, size_t);
  int (*desc_destroy)(void*);
  int (*layout_create)(void**, int, uint64_t, uint64_t, int64_t);
  int (*layout_destroy)(void*);
  int (*preference_create)(void**);
  int (*preference_set)(void*, int, const void*, size_t);
  int (*preference_destroy)(void*);
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*);
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                void*, void*, const void*, void*, size_t, cudaStream_t);
  ~LtApi() {
    if (library) dlclose(library);
  }
};

// The descriptors of one product. Column-major, as the library thinks: out^T [rows, T] = weight [rows, cols] x^T.
struct LtMatMul::Plan {
  Plan(const LtApi& lt, const LtProduct& p) : api(lt) {
    LOUPE_CHECK_EQ(api.desc_create(&desc, kComputeF32, kTypeF32), 0);
    const int transpose = kTranspose;
    LOUPE_CHECK_EQ(api.desc_set(desc, kDescTransposeA, &transpose, sizeof transpose), 0);
    const int out_type = p.out_half ? kTypeHalf : kTypeF32;
    const auto layout = [&](void** to, int type, int64_t rows, int64_t cols, int64_t stride) {
      LOUPE_CHECK_EQ(api.layout_create(to, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), stride), 0);
    };
    layout(&weight, kTypeHalf, p.cols, p.rows, p.weight_stride);
    layout(&x, kTypeHalf, p.cols, p.tokens, p.x_stride);
    layout(&add, out_type, p.rows, p.tokens, p.add ? p.add_stride : p.out_stride);
    layout(&out, out_type, p.rows, p.tokens, p.out_stride);
  }
  ~Plan() {
    for (void* l : {weight, x, add, out}) api.layout_destroy(l);
    api.desc_destroy(desc);
  }
  const LtApi& api;
  void *desc = nullptr, *weight = nullptr, *x = nullptr, *add = nullptr, *out = nullptr;
};

absl::StatusOr<std::unique_ptr<LtMatMul>> LtMatMul::Create(void* workspace, int64_t workspace_bytes) {
  std::unique_ptr<LtMatMul> lt(new LtMatMul());
  lt->api_ = std::make_unique<LtApi>();
  LtApi& api = *lt->api_;
  api.library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!api.library) {
    return absl::FailedPreconditionError(absl::StrCat("cuBLASLt is not found (", dlerror(),
                                                      "); install cuBLAS 13, or set LD_LIBRARY_PATH to where ",
                                                      kLibrary, " lies"));
  }
  bool complete = true;
  const auto find = [&](const char* name, auto* to) {
    *to = reinterpret_cast<std::remove_pointer_t<decltype(to)>>(dlsym(api.library, name));
    complete &= *to != nullptr;
  };
  find("cublasLtCreate", &api.create);
  find("cublasLtDestroy", &api.destroy);
  find("cublasLtMatmulDescCreate", &api.desc_create);
  find("cublasLtMatmulDescSetAttribute", &api.desc_set);
  find("cublasLtMatmulDescDestroy", &api.desc_destroy);
  find("cublasLtMatrixLayoutCreate", &api.layout_create);
  find("cublasLtMatrixLayoutDestroy", &api.layout_destroy);
  find("cublasLtMatmulPreferenceCreate", &api.preference_create);
  find("cublasLtMatmulPreferenceSetAttribute", &api.preference_set);
  find("cublasLtMatmulPreferenceDestroy", &api.preference_destroy);
  find("cublasLtMatmulAlgoGetHeuristic", &api.heuristic);
  find("cublasLtMatmul", &api.matmul);
  if (!complete) return absl::FailedPreconditionError(absl::StrCat(kLibrary, " lacks a function that is needed"));
  if (const int code = api.create(&lt->handle_); code != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cublasLtCreate failed with code ", code));
  }
  lt->workspace_ = workspace, lt->workspace_bytes_ = workspace_bytes;
  return lt;
}

LtMatMul::~LtMatMul() {
  if (handle_) api_->destroy(handle_);
}

int LtMatMul::Call(const LtProduct& p, const Algorithm& algorithm, cudaStream_t stream) {
  const Plan plan(*api_, p);
  const float one = 1, beta = p.add ? 1 : 0;
  return api_->matmul(handle_, plan.desc, &one, p.weight, plan.weight, p.x, plan.x, &beta, p.add ? p.add : p.out,
                      plan.add, p.out, plan.out, algorithm.data, workspace_, static_cast<size_t>(workspace_bytes_),
                      stream);
}

LtMatMul::Algorithm LtMatMul::Choose(const LtProduct& p, bool deterministic, cudaStream_t stream) {
  LtProduct shape = p;
  if (deterministic) shape.tokens = kDeterministicTokens;
  const Plan plan(*api_, shape);
  void* preference = nullptr;
  LOUPE_CHECK_EQ(api_->preference_create(&preference), 0);
  const auto bytes = static_cast<uint64_t>(workspace_bytes_);
  LOUPE_CHECK_EQ(api_->preference_set(preference, kPreferenceWorkspace, &bytes, sizeof bytes), 0);
  if (deterministic) {
    const uint32_t none = 0;
    LOUPE_CHECK_EQ(api_->preference_set(preference, kPreferenceReductions, &none, sizeof none), 0);
  }
  Heuristic choices[kMaxChoices];
  int found = 0;
  const int code = api_->heuristic(handle_, plan.desc, plan.weight, plan.x, plan.add, plan.out, preference, kMaxChoices,
                                   choices, &found);
  api_->preference_destroy(preference);
  LOUPE_CHECK(code == 0 && found > 0) << "cuBLASLt has no way to multiply " << p.tokens << " rows by " << p.rows
                                      << " x " << p.cols << " (code " << code << ")";
  const auto algorithm = [&](int i) {
    Algorithm a;
    std::copy_n(choices[i].algorithm, 8, a.data);
    return a;
  };
  if (!timing_ || deterministic) return algorithm(0);
  cudaEvent_t begin, end;
  LOUPE_CUDA(cudaEventCreate(&begin));
  LOUPE_CUDA(cudaEventCreate(&end));
  int best = 0;
  float best_ms = INFINITY;
  for (int i = 0; i < found; ++i) {
    const Algorithm candidate = algorithm(i);
    if (Call(p, candidate, stream) != 0) continue;  // warm-up
    LOUPE_CUDA(cudaEventRecord(begin, stream));
    for (int run = 0; run < kTimedRuns; ++run) Call(p, candidate, stream);
    LOUPE_CUDA(cudaEventRecord(end, stream));
    LOUPE_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    LOUPE_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (ms < best_ms) best_ms = ms, best = i;
  }
  LOUPE_CUDA(cudaEventDestroy(begin));
  LOUPE_CUDA(cudaEventDestroy(end));
  return algorithm(best);
}

void LtMatMul::Run(const LtProduct& p, bool deterministic, cudaStream_t stream) {
  const Key key(deterministic ? kDeterministicTokens : Bucket(p.tokens), p.rows, p.cols, p.out_half, deterministic);
  auto found = chosen_.find(key);
  if (found == chosen_.end()) found = chosen_.emplace(key, Choose(p, deterministic, stream)).first;
  const int code = Call(p, found->second, stream);
  LOUPE_CHECK(code == 0 || IsSticky(cudaPeekAtLastError()))
      << "cuBLASLt failed with code " << code << " on " << p.tokens << " rows by " << p.rows << " x " << p.cols;
}

}  // namespace loupe::cuda
