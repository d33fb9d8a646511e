// Memory that the host fills or reads and the device uses: one piece on backends that share the host's memory, a pinned
// host side and a device side elsewhere. Grows, keeps its contents on the host side, never shrinks. Step thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace loupe {

class MirroredBuffer {
 public:
  // At least `bytes`. The backend's RESOURCE_EXHAUSTED is passed on; nothing changes then.
  absl::Status Ensure(Backend& backend, int64_t bytes) {
    if (bytes <= this->bytes()) return absl::OkStatus();
    const int64_t size = std::max(bytes, 2 * this->bytes());
    auto host = backend.AllocateHost(size);
    if (!host.ok()) return host.status();
    std::unique_ptr<DeviceBuffer> device;
    if (!backend.Info().host_memory) {
      auto taken = backend.Allocate(size);
      if (!taken.ok()) return taken.status();
      device = *std::move(taken);
    }
    if (host_) std::memcpy((*host)->data(), host_->data(), static_cast<size_t>(host_->bytes()));
    host_ = *std::move(host);
    device_ = std::move(device);
    return absl::OkStatus();
  }

  int64_t bytes() const { return host_ ? host_->bytes() : 0; }
  template <class T>
  T* host() const {
    return host_ ? static_cast<T*>(host_->data()) : nullptr;
  }
  template <class T>
  T* device() const {
    return device_ ? static_cast<T*>(device_->data()) : host<T>();
  }

  // The host side's [begin, begin + bytes) to the device, or back; nothing to do where both are one.
  void Upload(Backend& backend, int64_t begin, int64_t bytes, Stream& stream) const {
    if (device_ && bytes > 0) backend.Copy(device<char>() + begin, host<char>() + begin, bytes, stream);
  }
  void Download(Backend& backend, int64_t begin, int64_t bytes, Stream& stream) const {
    if (device_ && bytes > 0) backend.Copy(host<char>() + begin, device<char>() + begin, bytes, stream);
  }

 private:
  std::unique_ptr<DeviceBuffer> host_, device_;
};

}  // namespace loupe
