// What calibration knows of a model's lists for policy spherical: what each list loses at some bits or some share of its
// entries, and the mean keys that codes subtract. Budgets are no part of it: one profile serves them all. Pure data,
// immutable once loaded, any thread.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace loupe {

// Bits at which keys and values were measured, and shares of the entries that are not protected, kept at 4 bits.
inline constexpr std::array<int, 3> kProfileBits = {2, 3, 4};
inline constexpr std::array<double, 6> kProfileShares = {0.5, 0.25, 0.125, 0.0625, 0.03, 0};

// In nats of KL to the full cache when that list alone is changed; protected entries stay as they are.
struct ListCosts {
  std::array<double, kProfileBits.size()> key{}, value{};
  std::array<double, kProfileShares.size()> share{};
};

struct SphericalProfile {
  std::string name;          // by which requests ask for it
  std::string fingerprint;   // of the file's text
  std::string model;         // architecture and name, for people
  std::string weights_hash;  // of the model that it was made for
  int num_layers = 0, num_kv_heads = 0, head_dim = 0;
  std::vector<float> mean_keys;  // [layers * G, D], after RoPE
  std::vector<ListCosts> lists;  // [layers * G]

  int num_lists() const { return num_layers * num_kv_heads; }
};

// Whether the numbers fit each other. INVALID_ARGUMENT: "<field>: <what is wrong, with the numbers>".
absl::Status CheckProfile(const SphericalProfile& profile);

}  // namespace loupe
