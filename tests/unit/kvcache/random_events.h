// Random life of a cache under a test: requests arrive, prefill in chunks, decode together, fork, are cancelled before,
// during and between steps. Every step is checked by the harness; at the end nothing may be left.
#pragma once

#include "tests/unit/kvcache/kv_harness.h"

namespace loupe {

struct EventOptions {
  int steps = 150;
  int concurrent = 8;
  int prompt_max = 220;
  bool forks = true;
  const RandomSubsetPolicy* policy = nullptr;  // of about three quarters of the requests
};

struct EventCounts {
  int refused = 0;
  int abandoned = 0;
  int cancelled = 0;
  int forked = 0;
  int finished_prefills = 0;
};

EventCounts RunRandomEvents(KvHarness& harness, const EventOptions& options);

}  // namespace loupe
