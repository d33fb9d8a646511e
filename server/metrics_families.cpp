#include "server/metrics_families.h"

#include "server/logging.h"
#include "server/process_stats.h"
#include "server/version.h"

namespace loupe {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using Labels = prometheus::Labels;
using Buckets = std::vector<double>;

// Seconds. Steps of at most 2.5x everywhere and 1.5x where people notice.
const Buckets kFirstToken = {.005, .01, .02, .035, .05, .075, .1,  .15, .2, .3, .4, .5,
                             .75,  1,   1.5, 2,    3,   5,    7.5, 10,  20, 40, 80, 160};
const Buckets kInterToken = {.0005, .001, .0015, .002, .003, .004, .005, .0075, .01, .0125, .015, .02,
                             .025,  .03,  .04,   .05,  .075, .1,   .15,  .2,    .3,  .5,    1,    2.5};
const Buckets kEndToEnd = {.05, .1, .2, .3, .5, .8, 1,   1.5, 2,   2.5, 5,    10,
                           15,  20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Buckets kTokens = {1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                         2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000};
const Buckets kPowersOfTwo = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
const Buckets kRatio = {.05, .1, .15, .2, .25, .3, .35, .4, .45, .5, .6, .7, .8, .9, .95, 1};

const char* const kApiNames[] = {"openai_chat", "openai_completion", "grpc_generate", "grpc_chat"};
const char* const kCodeNames[] = {"2xx", "4xx", "5xx"};
const char* const kRejectNames[] = {"invalid", "too_long", "queue_full", "kv_exhausted", "loading", "draining", "no_key", "key_limit"};
const char* const kStepPhaseNames[] = {"prefill", "decode", "mixed"};

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

// The registry merges families of one name, so labels may be added one by one.
prometheus::Gauge& Metrics::Families::AddGauge(const std::string& name, const std::string& help, const Labels& labels) {
  return BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
}

prometheus::Counter& Metrics::Families::AddCounter(const std::string& name, const std::string& help,
                                                   const Labels& labels) {
  return BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
}

prometheus::Histogram& Metrics::Families::AddHistogram(const std::string& name, const std::string& help,
                                                       const Labels& labels, const Buckets& buckets) {
  return BuildHistogram().Name(name).Help(help).Register(registry).Add(labels, buckets);
}

Metrics::Families::Families(const std::string& model_name) : model(model_name) {
  AddRequests();
  AddLatencies();
  AddSteps();
  AddCache();
  AddProcess();
}

void Metrics::Families::AddRequests() {
  for (int api = 0; api < kNumApis; ++api) {
    for (int code = 0; code < kNumCodes; ++code) {
      for (int reason = 0; reason < kNumFinishReasons; ++reason) {
        requests[api][code][reason] =
            &AddCounter("loupe_requests_total", "HTTP requests and gRPC calls answered, one each however many samples they had.",
                        {{"model", model},
                         {"api", kApiNames[api]},
                         {"code", kCodeNames[code]},
                         {"finish_reason", FinishReasonName(static_cast<FinishReason>(reason))}});
      }
    }
  }
  for (int reason = 0; reason < kNumRejectReasons; ++reason) {
    rejected[reason] = &AddCounter("loupe_requests_rejected_total", "Requests refused before they were queued.",
                                   {{"reason", kRejectNames[reason]}});
  }
  running = &AddGauge("loupe_requests_running", "Samples that hold cache.");
  waiting = &AddGauge("loupe_requests_waiting", "Prompts in the queue, with all their samples.");
  queue_tokens = &AddGauge("loupe_queue_prompt_tokens", "Prompt tokens in the queue.");
  queue_age = &AddGauge("loupe_queue_oldest_age_seconds", "How long the oldest prompt in the queue has waited.");
  http_in_flight = &AddGauge("loupe_http_requests_in_flight", "HTTP requests being answered on the main listener.");
  grpc_in_flight = &AddGauge("loupe_grpc_streams_in_flight", "gRPC calls being answered.");
  prompt_computed.counter =
      &AddCounter("loupe_prompt_tokens_total", "Prompt tokens, by where their cache entries came from.",
                  {{"model", model}, {"source", "computed"}});
  prompt_recomputed.counter =
      &AddCounter("loupe_prompt_tokens_total", "Prompt tokens, by where their cache entries came from.",
                  {{"model", model}, {"source", "recomputed"}});
  generated.counter = &AddCounter("loupe_generation_tokens_total", "Tokens generated.", {{"model", model}});
  preemptions.counter = &AddCounter("loupe_preemptions_total", "Running samples that gave up their cache for others.",
                                    {{"kind", "recompute"}});
}

void Metrics::Families::AddLatencies() {
  const Labels of_model = {{"model", model}};
  first_token = &AddHistogram("loupe_time_to_first_token_seconds", "From arrival to the first token of a sample.",
                              {{"model", model}, {"cache", "miss"}}, kFirstToken);
  next_token = &AddHistogram("loupe_inter_token_latency_seconds", "Every gap between two tokens of a sample.", of_model,
                             kInterToken);
  per_output_token =
      &AddHistogram("loupe_time_per_output_token_seconds",
                    "Mean gap of a sample: (duration - time to first token) / (tokens - 1).", of_model, kInterToken);
  for (int reason = 0; reason < kNumFinishReasons; ++reason) {
    duration[reason] = &AddHistogram(
        "loupe_request_duration_seconds",
        "From arrival to the end of a sample: n samples of a prompt, and the prompts of a list, count one each.",
        {{"model", model}, {"finish_reason", FinishReasonName(static_cast<FinishReason>(reason))}}, kEndToEnd);
  }
  const auto phase = [&](const char* name) {
    return &AddHistogram("loupe_request_phase_seconds", "Where the time of a sample went; tokenize is once a request.", {{"phase", name}},
                         kEndToEnd);
  };
  phase_queue = phase("queue");
  phase_tokenize = phase("tokenize");
  phase_prefill = phase("prefill");
  phase_decode = phase("decode");
  prompt_tokens = &AddHistogram("loupe_request_prompt_tokens", "Length of a prompt, once however many samples it has.", of_model, kTokens);
  output_tokens = &AddHistogram("loupe_request_output_tokens", "Tokens generated for a sample.", of_model, kTokens);
  retention = &AddHistogram("loupe_kv_retention_ratio", "Entries kept over entries seen, at the end of a sample.",
                            of_model, kRatio);
}

void Metrics::Families::AddSteps() {
  for (int i = 0; i < kNumStepPhases; ++i) {
    const char* phase = kStepPhaseNames[i];
    Step& step = steps[i];
    step.steps = &AddCounter("loupe_scheduler_steps_total", "Steps of the engine.", {{"phase", phase}});
    step.seconds = &AddHistogram("loupe_step_seconds", "Duration of a step.", {{"phase", phase}}, kInterToken);
    step.requests =
        &AddHistogram("loupe_step_batch_requests", "Sequences in a step.", {{"phase", phase}}, kPowersOfTwo);
    step.tokens = &AddHistogram("loupe_step_tokens", "Rows in a step: prompt tokens and one a decoding sequence.",
                                {{"phase", phase}}, kPowersOfTwo);
    AddTraffic(&step, phase);
  }
}

// The CPU backend reads DRAM. Only combinations that occur are registered.
void Metrics::Families::AddTraffic(Step* step, const char* phase) {
  const auto traffic = [&](const char* op, const char* data, const char* format, const char* kernel) {
    return &AddCounter(
        "loupe_memory_traffic_bytes_total", "Bytes moved between memory and the compute units, modelled from shapes.",
        {{"memory", "dram"}, {"op", op}, {"data", data}, {"format", format}, {"kernel", kernel}, {"phase", phase}});
  };
  step->weight_read = traffic("read", "weights", "model", "matmul");
  step->kv_read = traffic("read", "kv", "dense", "attend");
  step->kv_write = traffic("write", "kv", "dense", "append_kv");
  const auto full = [&](const char* op) {
    return &AddCounter("loupe_memory_traffic_full_cache_bytes_total",
                       "The same steps if every entry were kept in the model's own dtype, modelled.",
                       {{"memory", "dram"}, {"op", op}, {"phase", phase}});
  };
  step->full_read = full("read");
  step->full_write = full("write");
}

void Metrics::Families::AddCache() {
  const Labels tier = {{"tier", "device"}};
  const Labels tier_policy = {{"tier", "device"}, {"policy", "full"}};
  kv_resident = &AddGauge("loupe_kv_resident_bytes", "Cache pages in use.", tier_policy);
  kv_capacity = &AddGauge("loupe_kv_capacity_bytes", "Cache arena.", tier);
  kv_slabs = &AddGauge("loupe_kv_slab_bytes", "Arena slabs taken: pages in use and free pages beside them.", tier);
  kv_pinned = &AddGauge("loupe_kv_pool_pinned_ratio",
                        "Share of the arena that running requests need and cannot give up.", tier);
  kv_tokens = &AddGauge("loupe_kv_resident_tokens", "Tokens whose entries are in the cache.", tier_policy);
  kv_entries = &AddGauge("loupe_kv_resident_entries", "Entries in the cache, summed over lists.", tier_policy);
  kv_pages = &AddGauge("loupe_kv_resident_pages", "Pages in use.", tier);
  kv_exact_equivalent = &AddGauge("loupe_kv_exact_equivalent_bytes",
                                  "What the resident tokens would cost in the model's own dtype.", tier);
  reserve_failures.counter =
      &AddCounter("loupe_kv_reserve_failures_total", "Times a step found too little free cache and had to preempt.");
  entries_dropped.counter = &AddCounter("loupe_kv_entries_dropped_total", "Entries that policies dropped.");
  encode_faults.counter = &AddCounter("loupe_kv_encode_faults_total", "Keys and values that were not finite when they were to be coded.");
  cache_info = &BuildGauge()
                    .Name("loupe_cache_config_info")
                    .Help("Page size in tokens and capacity in pages of block_size tokens, for routers.")
                    .Register(registry);
  cache_info_now = &cache_info->Add({{"block_size", "64"}, {"num_gpu_blocks", "0"}});
  cache_info_now->Set(1);
  weight_bytes = &AddGauge("loupe_weight_resident_bytes", "Weights in memory.");
}

void Metrics::Families::AddProcess() {
  AddGauge("loupe_build_info", "Which build this is.",
           {{"version", kVersion}, {"commit", kCommit}, {"cuda", "none"}, {"compiler", kCompiler}, {"backend", "cpu"}})
      .Set(1);
  model_info = &BuildGauge().Name("loupe_model_info").Help("The model being served.").Register(registry);
  startup_phase = &BuildGauge()
                       .Name("loupe_startup_phase_seconds")
                       .Help("How long each part of the start took.")
                       .Register(registry);
  for (const char* phase : {"load", "warm"}) startup_phases[phase] = &startup_phase->Add({{"phase", phase}});
  for (int i = 0; i < kNumPhases; ++i) {
    lifecycle[i] = &AddGauge("loupe_lifecycle_state", "1 for the state the process is in.",
                             {{"state", PhaseName(static_cast<Phase>(i))}});
  }
  load_bytes = &AddGauge("loupe_model_file_bytes", "Size of the model file.");
  draining = &AddGauge("loupe_draining", "1 while the process shuts down.");
  drain_remaining = &AddGauge("loupe_drain_remaining_requests", "Requests that a shutdown still waits for.");
  threads = &AddGauge("loupe_cpu_backend_threads", "Compute threads.");
  for (const char* level : kLogLevels) {
    log_messages.push_back({&AddCounter("loupe_log_messages_total", "Log lines written.", {{"level", level}}), 0});
  }
  cpu_seconds.counter = &AddCounter("process_cpu_seconds_total", "User and system CPU time.");
  rss = &AddGauge("process_resident_memory_bytes", "Resident memory.");
  virtual_memory = &AddGauge("process_virtual_memory_bytes", "Virtual memory.");
  open_fds = &AddGauge("process_open_fds", "Open file descriptors.");
  max_fds = &AddGauge("process_max_fds", "Most file descriptors that may be open.");
  start_time = &AddGauge("process_start_time_seconds", "When the process started, in Unix time.");
}

void Metrics::Families::Refresh(const EngineStats& stats) {
  running->Set(stats.requests_running);
  waiting->Set(stats.requests_waiting);
  queue_tokens->Set(static_cast<double>(stats.queue_prompt_tokens));
  queue_age->Set(stats.queue_oldest_age_s);
  prompt_computed.Follow(static_cast<double>(stats.prompt_tokens));
  prompt_recomputed.Follow(static_cast<double>(stats.recomputed_tokens));
  generated.Follow(static_cast<double>(stats.generated_tokens));
  preemptions.Follow(static_cast<double>(stats.preemptions));
  reserve_failures.Follow(static_cast<double>(stats.kv.reserve_failures));
  entries_dropped.Follow(static_cast<double>(stats.kv.entries_dropped));
  encode_faults.Follow(static_cast<double>(stats.kv.encode_faults));
  weight_bytes->Set(static_cast<double>(stats.weight_bytes));
  const KvStats& kv = stats.kv;
  kv_resident->Set(static_cast<double>(kv.resident_bytes));
  kv_capacity->Set(static_cast<double>(kv.capacity_bytes));
  kv_slabs->Set(static_cast<double>(kv.slab_bytes));
  kv_pinned->Set(kv.capacity_bytes > 0 ? static_cast<double>(kv.resident_bytes) / static_cast<double>(kv.capacity_bytes)
                                       : 0);
  kv_entries->Set(static_cast<double>(kv.resident_entries));
  kv_pages->Set(static_cast<double>(kv.pages));
  kv_tokens->Set(kv_lists > 0 ? static_cast<double>(kv.resident_entries) / static_cast<double>(kv_lists) : 0);
  kv_exact_equivalent->Set(static_cast<double>(kv.resident_entries * kv_entry_bytes));
  const int64_t block_bytes = 64 * kv_lists * kv_entry_bytes;
  if (block_bytes > 0 && kv.capacity_bytes > 0) {
    prometheus::Gauge& now =
        cache_info->Add({{"block_size", "64"}, {"num_gpu_blocks", std::to_string(kv.capacity_bytes / block_bytes)}});
    now.Set(1);
    if (&now != cache_info_now) cache_info->Remove(cache_info_now);
    cache_info_now = &now;
  }
}

void Metrics::Families::RefreshProcess() {
  const auto counts = LogMessageCounts();
  for (size_t i = 0; i < counts.size(); ++i) log_messages[i].Follow(static_cast<double>(counts[i]));
  const ProcessStats stats = ReadProcessStats();
  cpu_seconds.Follow(stats.cpu_seconds);
  rss->Set(static_cast<double>(stats.resident_bytes));
  virtual_memory->Set(static_cast<double>(stats.virtual_bytes));
  open_fds->Set(static_cast<double>(stats.open_fds));
  max_fds->Set(static_cast<double>(stats.max_fds));
  start_time->Set(stats.start_unix_s);
}

}  // namespace loupe
