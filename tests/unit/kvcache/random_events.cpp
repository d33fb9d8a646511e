#include "tests/unit/kvcache/random_events.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace loupe {
namespace {

// What the requests of a run still have to do: sequence id -> prompt rows left.
using Requests = std::map<int, int>;

std::vector<KvStepItem> PickItems(KvHarness& harness, const Requests& requests) {
  std::vector<KvStepItem> items;
  for (const auto& [id, prompt_left] : requests) {
    if (harness.Uniform(0, 5) == 0) continue;
    KvStepItem item;
    item.seq = SeqId{id};
    if (prompt_left > 0) {
      item.num_prompt_rows = std::min(prompt_left, harness.Uniform(1, 70));
      item.ends_prefill = item.num_prompt_rows == prompt_left;
      // Generated tokens that are recomputed after a preemption.
      if (item.ends_prefill && harness.Uniform(0, 3) == 0) item.num_decode_rows = harness.Uniform(1, 20);
    } else {
      item.num_decode_rows = 1;
    }
    items.push_back(item);
  }
  return items;
}

SeqId AnyOf(KvHarness& harness, const Requests& requests) {
  return SeqId{std::next(requests.begin(), harness.Uniform(0, static_cast<int>(requests.size()) - 1))->first};
}

void Cancel(KvHarness& harness, Requests* requests, EventCounts* counts) {
  const SeqId seq = AnyOf(harness, *requests);
  harness.Close(seq);
  requests->erase(seq.value);
  ++counts->cancelled;
}

}  // namespace

EventCounts RunRandomEvents(KvHarness& harness, const EventOptions& options) {
  EventCounts counts;
  Requests requests;
  for (int step = 0; step < options.steps && !testing::Test::HasFatalFailure(); ++step) {
    while (static_cast<int>(requests.size()) < options.concurrent && harness.Uniform(0, 2) > 0) {
      const bool plain = options.policy == nullptr || harness.Uniform(0, 3) == 0;
      requests[harness.Open(plain ? nullptr : options.policy).value] = harness.Uniform(1, options.prompt_max);
    }
    const std::vector<KvStepItem> items = PickItems(harness, requests);
    if (items.empty()) continue;
    const int dice = harness.Uniform(0, 19);
    const StepEnd end = dice == 0 ? StepEnd::kAbandonAtOnce : dice == 1 ? StepEnd::kAbandonMidway : StepEnd::kCommit;
    const absl::Status status = harness.Step(items, end);
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status.ToString();
      ++counts.refused;
      Cancel(harness, &requests, &counts);
    } else if (end != StepEnd::kCommit) {
      ++counts.abandoned;
    } else {
      for (const KvStepItem& item : items) {
        requests[item.seq.value] -= item.num_prompt_rows;
        counts.finished_prefills += item.ends_prefill ? 1 : 0;
      }
    }
    harness.CheckBooks();
    if (!requests.empty() && harness.Uniform(0, 14) == 0) Cancel(harness, &requests, &counts);
    if (options.forks && !requests.empty() && static_cast<int>(requests.size()) < options.concurrent && harness.Uniform(0, 5) == 0) {
      const SeqId parent = AnyOf(harness, requests);
      const auto child = harness.Fork(parent);
      if (child.ok()) requests[child->value] = requests[parent.value], ++counts.forked;
    }
  }
  for (const auto& [id, left] : requests) harness.Close(SeqId{id});
  const KvStats stats = harness.cache().Stats();
  EXPECT_EQ(stats.resident_bytes, 0) << "seed " << harness.options().seed;
  EXPECT_EQ(stats.retired_bytes, 0);
  EXPECT_EQ(stats.slab_bytes, 0);
  EXPECT_EQ(stats.resident_entries, 0);
  harness.cache().Audit();
  return counts;
}

}  // namespace loupe
