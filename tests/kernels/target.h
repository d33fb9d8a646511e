// Where a kernel test runs: an instruction set of the CPU, or the GPU. One test body serves all; a machine without a
// GPU leaves the GPU's out, and the test Cuda.IsThere says so.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/check.h"

namespace loupe::testing {

// "portable", "avx2", "avx512", "cuda", or "cuda_deterministic".
using Target = std::string;

inline bool IsCuda(const Target& target) { return target.starts_with("cuda"); }
inline bool BuiltWithCuda() { return std::strstr(BuiltDevices(), "cuda") != nullptr; }

inline absl::StatusOr<std::unique_ptr<Backend>> TryBackend(const Target& target, bool exact, int num_threads) {
  BackendOptions options;
  options.device = IsCuda(target) ? "cuda" : "cpu";
  if (!IsCuda(target)) options.isa = target;
  options.deterministic = target == "cuda_deterministic";
  options.exact = exact;
  options.num_threads = num_threads;
  return MakeBackend(options);
}

// The targets that this machine can run. `bit_equal`: of the GPU's, the one whose bits do not depend on a row's
// company.
inline std::vector<Target> UsableTargets(bool bit_equal = false) {
  std::vector<Target> targets;
  for (const char* name : {"portable", "avx2", "avx512", bit_equal ? "cuda_deterministic" : "cuda"}) {
    if (IsCuda(name) && !BuiltWithCuda()) continue;
    if (TryBackend(name, false, 1).ok()) targets.push_back(name);
  }
  return targets;
}

// Kept for the process: making a GPU backend takes a while.
inline Backend& BackendOf(const Target& target, bool exact = false, int num_threads = 1) {
  static auto* const made = new std::map<std::tuple<Target, bool, int>, std::unique_ptr<Backend>>;
  std::unique_ptr<Backend>& backend = (*made)[{target, exact, IsCuda(target) ? 1 : num_threads}];
  if (!backend) {
    auto fresh = TryBackend(target, exact, num_threads);
    LOUPE_CHECK(fresh.ok()) << target << ": " << fresh.status().ToString();
    backend = *std::move(fresh);
  }
  return *backend;
}

// Arrays of the host as the backend's ops see them: the very memory on the CPU, copies elsewhere. Finish waits for the
// ops and brings the outputs back.
class DeviceArrays {
 public:
  explicit DeviceArrays(Backend& backend)
      : backend_(backend), stream_(backend.NewStream()), direct_(backend.Info().host_memory) {}
  Stream& stream() { return *stream_; }

  // `element_bytes`: of tensors of structs, whose type is kBytes.
  Tensor In(Tensor host, int64_t element_bytes = 0) { return Take(host, element_bytes, false); }
  Tensor Out(Tensor host, int64_t element_bytes = 0) { return Take(host, element_bytes, true); }
  void Finish() {
    for (const Piece& piece : pieces_) {
      if (piece.out) backend_.Copy(piece.host, piece.device->data(), piece.bytes, *stream_);
    }
    const absl::Status status = stream_->Synchronize();
    LOUPE_CHECK(status.ok()) << status.ToString();
  }

 private:
  struct Piece {
    void* host;
    std::unique_ptr<DeviceBuffer> device;
    int64_t bytes;
    bool out;
  };

  Tensor Take(Tensor host, int64_t element_bytes, bool out) {
    if (direct_ || !host.defined() || host.rows() == 0) return host;
    if (element_bytes == 0) element_bytes = DTypeBytes(host.dtype);
    const int64_t bytes = ((host.rows() - 1) * host.row_stride + host.row_elements()) * element_bytes;
    auto device = backend_.Allocate(bytes);
    LOUPE_CHECK(device.ok()) << device.status().ToString();
    backend_.Copy((*device)->data(), host.data, bytes, *stream_);
    pieces_.push_back({host.data, *std::move(device), bytes, out});
    host.data = pieces_.back().device->data();
    return host;
  }

  Backend& backend_;
  std::unique_ptr<Stream> stream_;
  const bool direct_;
  std::vector<Piece> pieces_;
};

// How a target orders the elements of a page's planes: index of dimension `d` of entry `e`.
inline int64_t ElementIndex(const Target& target, const PageClass& page_class, bool key, int e, int d, int dim) {
  if (IsCuda(target)) return (int64_t{d / 8} * page_class.entries() + e) * 8 + d % 8;
  return key ? int64_t{e / 16} * dim * 16 + d * 16 + e % 16 : int64_t{e} * dim + d;
}

}  // namespace loupe::testing
