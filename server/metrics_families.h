// The families behind Metrics, registered once with every label combination at 0. Only metrics.cpp and
// metrics_families.cpp know prometheus-cpp.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "server/metrics.h"

namespace loupe {

inline constexpr int kNumApis = 4, kNumCodes = 3, kNumFinishReasons = 6, kNumRejectReasons = 8, kNumPhases = 6,
                     kNumStepPhases = 3;

struct Metrics::Families {
  explicit Families(const std::string& model_name);

  // A counter that follows a total kept elsewhere.
  struct Follower {
    prometheus::Counter* counter = nullptr;
    double last = 0;
    void Follow(double total) {
      if (total > last) counter->Increment(total - last);
      last = total;
    }
  };

  struct Step {
    prometheus::Counter* steps = nullptr;
    prometheus::Histogram *seconds = nullptr, *requests = nullptr, *tokens = nullptr;
    prometheus::Counter *weight_read = nullptr, *kv_read = nullptr, *kv_write = nullptr;
    prometheus::Counter *full_read = nullptr, *full_write = nullptr;
  };

  prometheus::Gauge& AddGauge(const std::string& name, const std::string& help, const prometheus::Labels& labels = {});
  prometheus::Counter& AddCounter(const std::string& name, const std::string& help,
                                  const prometheus::Labels& labels = {});
  prometheus::Histogram& AddHistogram(const std::string& name, const std::string& help,
                                      const prometheus::Labels& labels, const std::vector<double>& buckets);
  // Copies the engine's numbers into the gauges. Called with scrape_mutex held.
  void Refresh(const EngineStats& stats);
  void RefreshProcess();

  prometheus::Registry registry;
  std::string model;
  std::mutex scrape_mutex;  // one page at a time: followers and one-hot gauges change together

  prometheus::Counter* requests[kNumApis][kNumCodes][kNumFinishReasons];
  prometheus::Counter* rejected[kNumRejectReasons];
  prometheus::Gauge *running, *waiting, *queue_tokens, *queue_age, *http_in_flight, *grpc_in_flight;
  prometheus::Histogram *first_token, *next_token, *per_output_token, *duration[kNumFinishReasons];
  prometheus::Histogram *phase_queue, *phase_tokenize, *phase_prefill, *phase_decode;
  prometheus::Histogram *prompt_tokens, *output_tokens, *retention;
  Follower prompt_computed, prompt_recomputed, generated, preemptions, reserve_failures, entries_dropped, encode_faults;
  std::array<Step, kNumStepPhases> steps;
  prometheus::Gauge *kv_resident, *kv_capacity, *kv_pinned, *kv_tokens, *kv_entries, *kv_pages, *kv_slabs,
      *kv_exact_equivalent;
  prometheus::Gauge *weight_bytes, *threads, *load_bytes, *drain_remaining, *draining;
  prometheus::Gauge* lifecycle[kNumPhases];
  prometheus::Family<prometheus::Gauge>*model_info, *startup_phase, *cache_info;
  prometheus::Gauge* cache_info_now = nullptr;
  std::map<std::string, prometheus::Gauge*> startup_phases;
  std::vector<Follower> log_messages;
  Follower cpu_seconds;
  prometheus::Gauge *rss, *virtual_memory, *open_fds, *max_fds, *start_time;

  int64_t kv_lists = 0;        // of a sequence; 0 until the model is known
  int64_t kv_entry_bytes = 0;  // of one entry in the model's own dtype

 private:
  void AddRequests();
  void AddLatencies();
  void AddSteps();
  void AddTraffic(Step* step, const char* phase);
  void AddCache();
  void AddProcess();
};

}  // namespace loupe
