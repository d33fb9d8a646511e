// Profiles for tests: costs as real ones look, which differ by orders of magnitude from list to list.
#pragma once

#include <cmath>
#include <memory>
#include <random>

#include "kvcache/policies/spherical_profile.h"

namespace loupe::testing {

inline ListCosts RandomCosts(std::mt19937* random) {
  std::normal_distribution<double> normal;
  const double key = 1e-3 * std::exp(1.5 * normal(*random)), value = 3e-4 * std::exp(normal(*random));
  const double most = 2e-3 * std::exp(2 * normal(*random)), power = 0.5 + std::exp(0.3 * normal(*random));
  ListCosts costs;
  for (size_t b = 0; b < kProfileBits.size(); ++b) {
    costs.key[b] = key * std::pow(3.5, -static_cast<double>(b)), costs.value[b] = value * std::pow(3.5, -static_cast<double>(b));
  }
  for (size_t s = 0; s < kProfileShares.size(); ++s) {
    costs.share[s] = costs.key.back() + costs.value.back() + most * std::pow(1 - kProfileShares[s], 1 + power);
  }
  return costs;
}

inline SphericalProfile MakeProfile(int layers, int groups, int dim, uint32_t seed = 1) {
  std::mt19937 random(seed);
  SphericalProfile profile;
  profile.name = "test", profile.model = "a test", profile.weights_hash = "0";
  profile.num_layers = layers, profile.num_kv_heads = groups, profile.head_dim = dim;
  std::normal_distribution<float> normal;
  for (int i = 0; i < layers * groups; ++i) profile.lists.push_back(RandomCosts(&random));
  for (int i = 0; i < layers * groups * dim; ++i) profile.mean_keys.push_back(normal(random));
  return profile;
}

inline std::shared_ptr<const SphericalProfile> RandomProfile(int layers, int groups, int dim, uint32_t seed = 1) {
  return std::make_shared<const SphericalProfile>(MakeProfile(layers, groups, dim, seed));
}

}  // namespace loupe::testing
