#include "kernels/cpu/packed_weight.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/half.h"

namespace loupe {
namespace {

constexpr int64_t kMappingBytes = int64_t{32} << 20;
constexpr int64_t kPieceAlignment = 128;
// What a model may sensibly ask, and far below where 64-bit byte counts overflow.
constexpr int64_t kMaxDimension = int64_t{1} << 31;

const char* TypeName(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return "F32";
    case WeightType::kF16:
      return "F16";
    case WeightType::kBF16:
      return "BF16";
    case WeightType::kQ8_0:
      return "Q8_0";
    case WeightType::kQ4_0:
      return "Q4_0";
    case WeightType::kQ4_1:
      return "Q4_1";
  }
  return "unknown";
}

// Bytes of 32 columns of a row in the file.
int64_t FileBlockBytes(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0:
      return 2 + 32;
    case WeightType::kQ4_0:
      return 2 + 16;
    case WeightType::kQ4_1:
      return 4 + 16;
    case WeightType::kF32:
      return 128;
    default:
      return 64;
  }
}

int64_t FileRowBytes(WeightType type, int64_t cols) {
  if (IsQuantised(type)) return cols / kQuantBlock * FileBlockBytes(type);
  return cols * (type == WeightType::kF32 ? 4 : 2);
}

absl::Status CheckPart(const HostMatrix& part, int64_t cols) {
  if (part.rows < 1 || part.cols < 1 || part.rows >= kMaxDimension || part.cols >= kMaxDimension) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrix of ", part.rows, " x ", part.cols, ": both must be 1 to ", kMaxDimension - 1));
  }
  if (part.cols != cols) {
    return absl::InvalidArgumentError(absl::StrCat("stacked matrices differ in columns: ", part.cols, " and ", cols));
  }
  if (IsQuantised(part.type) && part.cols % kQuantBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a ", TypeName(part.type), " matrix has ", part.cols,
                                                   " columns, which is no multiple of ", kQuantBlock));
  }
  if (part.data == nullptr) return absl::InvalidArgumentError("matrix without data");
  return absl::OkStatus();
}

void PackQuantisedRow(WeightType type, const uint8_t* row, int64_t cols, int lane, uint8_t* strip) {
  const int64_t block_bytes = FileBlockBytes(type);
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, row += block_bytes) {
    const BlockPlace place = PlaceOf(type, b);
    uint8_t* codes = strip + place.codes + lane * 4;
    std::memcpy(strip + place.scales + lane * 2, row, 2);
    if (type == WeightType::kQ8_0) {
      for (int c = 0; c < 32; ++c) codes[c / 4 * 64 + c % 4] = row[2 + c] ^ 0x80;
      continue;
    }
    const int header = type == WeightType::kQ4_1 ? 4 : 2;
    if (type == WeightType::kQ4_1) std::memcpy(strip + place.scales + 32 + lane * 2, row + 2, 2);
    // The file keeps columns c and c + 16 in one byte, and so does the strip.
    for (int c = 0; c < 16; ++c) codes[c / 4 * 64 + c % 4] = row[header + c];
  }
}

void PackFloatRow(WeightType type, const uint8_t* row, int64_t cols, int lane, uint8_t* strip) {
  if (type == WeightType::kF32) {
    for (int64_t c = 0; c < cols; ++c) std::memcpy(strip + c * 64 + lane * 4, row + c * 4, 4);
  } else if (type == WeightType::kF16) {
    for (int64_t c = 0; c < cols; ++c) std::memcpy(strip + c * 32 + lane * 2, row + c * 2, 2);
  } else {
    for (int64_t c = 0; c < cols; ++c) std::memcpy(strip + c / 2 * 64 + lane * 4 + c % 2 * 2, row + c * 2, 2);
  }
}

void PackStrip(const HostMatrix& part, int64_t index, uint8_t* strip) {
  const int64_t row_bytes = FileRowBytes(part.type, part.cols);
  const int64_t first = index * kStripRows;
  const int lanes = static_cast<int>(std::min<int64_t>(kStripRows, part.rows - first));
  for (int lane = 0; lane < lanes; ++lane) {
    const uint8_t* row = static_cast<const uint8_t*>(part.data) + (first + lane) * row_bytes;
    if (IsQuantised(part.type)) {
      PackQuantisedRow(part.type, row, part.cols, lane, strip);
    } else {
      PackFloatRow(part.type, row, part.cols, lane, strip);
    }
  }
}

float ReadElement(const WeightPart& part, const uint8_t* strip, int lane, int64_t col) {
  uint16_t half = 0;
  switch (part.type) {
    case WeightType::kF32: {
      float value;
      std::memcpy(&value, strip + col * 64 + lane * 4, 4);
      return value;
    }
    case WeightType::kF16:
      std::memcpy(&half, strip + col * 32 + lane * 2, 2);
      return HalfToFloat(half);
    case WeightType::kBF16:
      std::memcpy(&half, strip + col / 2 * 64 + lane * 4 + col % 2 * 2, 2);
      return Bf16ToFloat(half);
    default:
      break;
  }
  const BlockPlace place = PlaceOf(part.type, col / kQuantBlock);
  std::memcpy(&half, strip + place.scales + lane * 2, 2);
  const float scale = HalfToFloat(half);
  const int c = static_cast<int>(col % kQuantBlock);
  const uint8_t* codes = strip + place.codes + lane * 4;
  if (part.type == WeightType::kQ8_0) return scale * static_cast<float>(codes[c / 4 * 64 + c % 4] - 128);
  const int code = codes[c % 16 / 4 * 64 + c % 4] >> (c / 16 * 4) & 15;
  if (part.type == WeightType::kQ4_0) return scale * static_cast<float>(code - 8);
  std::memcpy(&half, strip + place.scales + 32 + lane * 2, 2);
  return scale * static_cast<float>(code) + HalfToFloat(half);
}

}  // namespace

absl::StatusOr<WeightMemory::Piece> WeightMemory::Take(int64_t bytes) {
  bytes = (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  if (current_ == nullptr || used_ + bytes > current_->bytes()) {
    auto memory = HugeMemory::Create(std::max(bytes, kMappingBytes));
    if (!memory.ok()) return memory.status();
    // A large matrix fills its mapping; small ones go on in the mapping that has room.
    if (bytes > kMappingBytes / 2 && current_ != nullptr) return Piece{std::move(*memory), nullptr};
    current_ = std::move(*memory);
    used_ = 0;
  }
  Piece piece{current_, current_->data() + used_};
  used_ += bytes;
  return piece;
}

PackedWeight::PackedWeight(std::vector<WeightPart> parts, int64_t cols, WeightMemory::Piece memory)
    : parts_(std::move(parts)), cols_(cols), memory_(std::move(memory)) {
  for (const WeightPart& part : parts_) {
    rows_ += part.rows;
    bytes_ += part.num_strips() * part.strip_bytes;
  }
}

void PackedWeight::ReadRow(int64_t row, float* out) const {
  LOUPE_CHECK(row >= 0 && row < rows_) << "row " << row << " of " << rows_;
  const WeightPart* part = parts_.data();
  while (row >= part->first_row + part->rows) ++part;
  const int64_t in_part = row - part->first_row;
  const uint8_t* strip = part->strip(in_part / kStripRows);
  for (int64_t c = 0; c < cols_; ++c) out[c] = ReadElement(*part, strip, static_cast<int>(in_part % kStripRows), c);
}

absl::StatusOr<std::unique_ptr<Weight>> PackWeightCpu(std::span<const HostMatrix> parts, WeightMemory& memory,
                                                      CpuContext context) {
  if (parts.empty()) return absl::InvalidArgumentError("a weight needs at least one matrix");
  std::vector<WeightPart> packed;
  int64_t row = 0;
  int64_t bytes = 0;
  for (const HostMatrix& part : parts) {
    const absl::Status status = CheckPart(part, parts[0].cols);
    if (!status.ok()) return status;
    packed.push_back({part.type, row, part.rows, StripBytes(part.type, part.cols), nullptr});
    row += part.rows;
    bytes += packed.back().num_strips() * packed.back().strip_bytes;
  }
  absl::StatusOr<WeightMemory::Piece> piece = memory.Take(bytes);
  if (!piece.ok()) return piece.status();
  if (piece->data == nullptr) piece->data = piece->owner->data();
  uint8_t* at = piece->data;
  for (size_t i = 0; i < parts.size(); ++i) {
    packed[i].strips = at;
    const int64_t strip_bytes = packed[i].strip_bytes;
    context.pool.Run([&](int thread) {
      const auto [begin, end] = context.pool.Share(packed[i].num_strips(), thread);
      for (int64_t s = begin; s < end; ++s) PackStrip(parts[i], s, at + s * strip_bytes);
    });
    at += packed[i].num_strips() * strip_bytes;
  }
  return std::unique_ptr<Weight>(new PackedWeight(std::move(packed), parts[0].cols, *std::move(piece)));
}

}  // namespace loupe
