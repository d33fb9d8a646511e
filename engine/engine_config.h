// Limits and choices of the engine. Defaults are written here and nowhere else; flags, environment and file override.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kvcache/policies/options.h"

namespace loupe {

struct EngineConfig {
  BackendOptions backend;
  int64_t kv_device_bytes = 0;   // 0: auto, 25 % of RAM on the CPU, 90 % of the free memory of a GPU
  int max_context = 0;           // 0: the model's
  int max_sequences = 64;        // samples computed at a time
  int max_step_tokens = 512;     // rows of a step
  int max_queue = 256;           // requests waiting; more are refused with RESOURCE_EXHAUSTED
  std::optional<KvOptions> kv;   // for requests that bring none; none: auto
  bool allow_baselines = false;  // kv policies that only serve as comparison
  std::vector<std::string> strategy_files;  // of PolyKV; the first is the one that requests get without naming one
  std::string artifact_folder;   // artifacts in it that were made for the model load too, of kinds of which no file is given; empty: none
  std::string chat_template;     // text that replaces the model's own; empty: the model's
};

}  // namespace loupe
