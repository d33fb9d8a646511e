// Counters of the engine as plain numbers: lower layers count, the server prints.
#pragma once

#include <cstdint>
#include <string>

#include "kvcache/kv_cache.h"

namespace loupe {

struct EngineStats {
  int requests_running = 0;  // samples that hold cache
  int requests_waiting = 0;
  int64_t queue_prompt_tokens = 0;
  double queue_oldest_age_s = 0;
  int64_t prompt_tokens = 0;       // computed, since start
  int64_t recomputed_tokens = 0;   // computed again after a preemption
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  int64_t steps = 0;
  double last_step_age_s = 0;  // for liveness: grows while work waits and no step ends
  int64_t weight_bytes = 0;    // resident weights
  int64_t graph_bytes = 0;     // device memory of recorded steps
  std::string failure;         // why nothing will ever be computed again; empty: all is well
  KvStats kv;
};

enum class StepPhase : uint8_t { kPrefill, kDecode, kMixed };

struct StepReport {
  StepPhase phase = StepPhase::kDecode;
  int num_sequences = 0;
  int num_rows = 0;
  int prompt_rows = 0;
  double seconds = 0;
  int64_t weight_read_bytes = 0;  // modelled memory traffic of the step
  int64_t kv_read_bytes = 0;
  int64_t kv_write_bytes = 0;
};

}  // namespace loupe
