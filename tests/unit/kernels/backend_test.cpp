// Creation, memory and description of the CPU backend.
#include "kernels/backend.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/check.h"

namespace loupe {
namespace {

std::unique_ptr<Backend> Make(int threads) {
  BackendOptions options;
  options.device = "cpu";
  options.num_threads = threads;
  auto backend = MakeBackend(options);
  LOUPE_CHECK(backend.ok()) << backend.status().ToString();
  return *std::move(backend);
}

TEST(Backend, RefusesUnknownDevicesAndInstructionSets) {
  BackendOptions options;
  options.device = "tpu";
  EXPECT_EQ(MakeBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(MakeBackend(options).status().ToString().find("cpu"), std::string::npos) << "names what exists";
  options = {};
  options.device = "cpu";
  options.isa = "mmx";
  EXPECT_EQ(MakeBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
  for (const int threads : {-1, 100000}) {
    options = {};
    options.device = "cpu";
    options.num_threads = threads;
    EXPECT_EQ(MakeBackend(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Backend, DescribesItself) {
  const BackendInfo info = Make(3)->Info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_EQ(info.num_threads, 3);
  EXPECT_NE(info.detail.find("3 threads"), std::string::npos) << info.detail;
  EXPECT_GT(info.memory_bytes, int64_t{1} << 26);
  EXPECT_GT(info.memory_available_bytes, 0);
  EXPECT_LE(info.memory_available_bytes, info.memory_bytes);
  EXPECT_GE(Make(0)->Info().num_threads, 1);
}

TEST(Backend, GivesZeroedAlignedMemory) {
  auto backend = Make(1);
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, (int64_t{2} << 20) + 1}) {
    auto buffer = backend->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status().ToString();
    EXPECT_EQ((*buffer)->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % (2 << 20), 0u);
    const auto* data = static_cast<const uint8_t*>((*buffer)->data());
    for (int64_t i = 0; i < bytes; i += 511) ASSERT_EQ(data[i], 0);
    std::memset((*buffer)->data(), 1, static_cast<size_t>(bytes));
  }
}

TEST(Backend, TooMuchMemoryIsAnAnswerWithNumbers) {
  auto backend = Make(1);
  const auto buffer = backend->Allocate(int64_t{1} << 50);
  ASSERT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(buffer.status().ToString().find("1125899906842624"), std::string::npos) << buffer.status().ToString();
  EXPECT_FALSE(backend->Allocate(-1).ok());
}

}  // namespace
}  // namespace loupe
