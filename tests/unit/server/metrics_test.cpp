#include "server/metrics.h"

#include <cstdio>
#include <fstream>
#include <set>

#include "gtest/gtest.h"
#include "server/management.h"
#include "server/process_stats.h"

namespace loupe {
namespace {

// The value of one series, NaN if it is not on the page.
double ValueOf(const std::string& page, const std::string& series) {
  const size_t at = page.find("\n" + series + " ");
  return at == std::string::npos ? std::nan("") : std::stod(page.substr(at + series.size() + 2));
}

TEST(Metrics, EverythingIsThereBeforeAnythingHappens) {
  Metrics metrics("m");
  const std::string page = metrics.Page(nullptr, Phase::kLoading);
  for (const char* name : {"loupe_requests_total",
                           "loupe_requests_rejected_total",
                           "loupe_requests_running",
                           "loupe_requests_waiting",
                           "loupe_queue_prompt_tokens",
                           "loupe_queue_oldest_age_seconds",
                           "loupe_time_to_first_token_seconds",
                           "loupe_inter_token_latency_seconds",
                           "loupe_time_per_output_token_seconds",
                           "loupe_request_duration_seconds",
                           "loupe_request_phase_seconds",
                           "loupe_request_prompt_tokens",
                           "loupe_request_output_tokens",
                           "loupe_prompt_tokens_total",
                           "loupe_generation_tokens_total",
                           "loupe_preemptions_total",
                           "loupe_scheduler_steps_total",
                           "loupe_step_seconds",
                           "loupe_step_batch_requests",
                           "loupe_step_tokens",
                           "loupe_http_requests_in_flight",
                           "loupe_grpc_streams_in_flight",
                           "loupe_kv_resident_bytes",
                           "loupe_kv_capacity_bytes",
                           "loupe_kv_pool_pinned_ratio",
                           "loupe_kv_resident_tokens",
                           "loupe_kv_exact_equivalent_bytes",
                           "loupe_kv_retention_ratio",
                           "loupe_memory_traffic_bytes_total",
                           "loupe_memory_traffic_full_cache_bytes_total",
                           "loupe_build_info",
                           "loupe_lifecycle_state",
                           "loupe_startup_phase_seconds",
                           "loupe_draining",
                           "loupe_drain_remaining_requests",
                           "loupe_log_messages_total",
                           "loupe_cpu_backend_threads",
                           "loupe_cache_config_info",
                           "process_cpu_seconds_total",
                           "process_resident_memory_bytes",
                           "process_open_fds",
                           "process_max_fds",
                           "process_start_time_seconds",
                           "process_virtual_memory_bytes"}) {
    EXPECT_NE(page.find(std::string("# TYPE ") + name + " "), std::string::npos) << name;
  }
  EXPECT_EQ(ValueOf(page, R"(loupe_requests_total{api="openai_chat",code="2xx",finish_reason="stop",model="m"})"), 0);
  EXPECT_EQ(ValueOf(page, R"(loupe_lifecycle_state{state="loading"})"), 1);
  EXPECT_EQ(ValueOf(page, R"(loupe_lifecycle_state{state="ready"})"), 0);
}

TEST(Metrics, CountsWhatHappened) {
  Metrics metrics("m");
  metrics.OnFirstToken(0.06);
  metrics.OnNextToken(0.003);
  metrics.OnNextToken(0.004);
  StepReport step;
  step.phase = StepPhase::kMixed;
  step.num_rows = 9;
  step.num_sequences = 3;
  step.weight_read_bytes = 1000;
  step.kv_read_bytes = 200;
  step.kv_write_bytes = 30;
  metrics.OnStep(step);
  Finished finished;
  finished.reason = FinishReason::kDeadline;
  finished.usage.prompt_tokens = 7;
  finished.usage.completion_tokens = 3;
  finished.usage.kv.entries_kept = 3;
  finished.usage.kv.entries_dropped = 1;
  finished.timings.total = 1.0;
  finished.timings.first_token = 0.5;
  metrics.OnFinished(finished);
  metrics.CountRequest(Api::kGrpcChat, CodeClass::kServerError, FinishReason::kError);
  metrics.CountRejected(RejectReason::kQueueFull);
  metrics.HttpStarted();
  EngineStats stats;
  stats.requests_running = 2;
  stats.generated_tokens = 40;
  stats.prompt_tokens = 50;
  stats.kv.capacity_bytes = 1000;
  stats.kv.resident_bytes = 250;
  const std::string page = metrics.Page(&stats, Phase::kDraining);
  EXPECT_EQ(ValueOf(page, R"(loupe_time_to_first_token_seconds_count{cache="miss",model="m"})"), 1);
  EXPECT_EQ(ValueOf(page, R"(loupe_inter_token_latency_seconds_count{model="m"})"), 2);
  EXPECT_EQ(ValueOf(page, R"(loupe_time_per_output_token_seconds_sum{model="m"})"), 0.25);
  EXPECT_EQ(ValueOf(page, R"(loupe_request_duration_seconds_count{finish_reason="deadline",model="m"})"), 1);
  EXPECT_EQ(ValueOf(page, R"(loupe_kv_retention_ratio_sum{model="m"})"), 0.75);
  EXPECT_EQ(ValueOf(page, R"(loupe_scheduler_steps_total{phase="mixed"})"), 1);
  EXPECT_EQ(ValueOf(page, R"(loupe_step_tokens_sum{phase="mixed"})"), 9);
  EXPECT_EQ(
      ValueOf(
          page,
          R"(loupe_memory_traffic_bytes_total{data="weights",format="model",kernel="matmul",memory="dram",op="read",phase="mixed"})"),
      1000);
  EXPECT_EQ(ValueOf(page, R"(loupe_memory_traffic_full_cache_bytes_total{memory="dram",op="read",phase="mixed"})"),
            1200);
  EXPECT_EQ(ValueOf(page, R"(loupe_requests_total{api="grpc_chat",code="5xx",finish_reason="error",model="m"})"), 1);
  EXPECT_EQ(ValueOf(page, R"(loupe_requests_rejected_total{reason="queue_full"})"), 1);
  EXPECT_EQ(ValueOf(page, "loupe_http_requests_in_flight"), 1);
  EXPECT_EQ(ValueOf(page, "loupe_requests_running"), 2);
  EXPECT_EQ(ValueOf(page, R"(loupe_generation_tokens_total{model="m"})"), 40);
  EXPECT_EQ(ValueOf(page, R"(loupe_kv_pool_pinned_ratio{tier="device"})"), 0.25);
  EXPECT_EQ(ValueOf(page, "loupe_draining"), 1);
  EXPECT_EQ(ValueOf(page, "loupe_drain_remaining_requests"), 2);
}

TEST(Metrics, TotalsKeptElsewhereAreFollowed) {
  Metrics metrics("m");
  EngineStats stats;
  for (const int64_t total : {5, 5, 12}) {
    stats.generated_tokens = total;
    EXPECT_EQ(ValueOf(metrics.Page(&stats, Phase::kReady), R"(loupe_generation_tokens_total{model="m"})"),
              static_cast<double>(total));
  }
}

TEST(Metrics, RoutingPageHasOneSeriesEach) {
  Metrics metrics("m");
  EngineStats stats;
  stats.requests_waiting = 4;
  const std::string page = metrics.RoutingPage(&stats);
  std::set<std::string> names;
  for (size_t at = page.find("# TYPE "); at != std::string::npos; at = page.find("# TYPE ", at + 1)) {
    names.insert(page.substr(at + 7, page.find(' ', at + 7) - at - 7));
  }
  EXPECT_EQ(names, (std::set<std::string>{"loupe_requests_waiting", "loupe_requests_running",
                                          "loupe_kv_pool_pinned_ratio", "loupe_cache_config_info"}));
  EXPECT_EQ(ValueOf(page, "loupe_requests_waiting"), 4);
}

TEST(Metrics, PromtoolFindsNothing) {
  Metrics metrics("m");
  EngineStats stats;
  const std::string path = testing::TempDir() + "loupe_metrics_page.txt";
  std::ofstream(path) << metrics.Page(&stats, Phase::kReady);
  FILE* tool = popen(("promtool check metrics < " + path + " 2>&1").c_str(), "r");
  ASSERT_NE(tool, nullptr);
  std::string said;
  for (int c = fgetc(tool); c != EOF; c = fgetc(tool)) said.push_back(static_cast<char>(c));
  EXPECT_EQ(pclose(tool), 0) << said << " (promtool comes with Debian's package prometheus)";
  EXPECT_EQ(said, "");
}

TEST(Metrics, Reasons) {
  EXPECT_EQ(RejectReasonOf(absl::InvalidArgumentError("context_length_exceeded: 9 > 8")), RejectReason::kTooLong);
  EXPECT_EQ(RejectReasonOf(absl::InvalidArgumentError("n: is 0")), RejectReason::kInvalid);
  EXPECT_EQ(RejectReasonOf(absl::ResourceExhaustedError("queue")), RejectReason::kQueueFull);
  EXPECT_EQ(RejectReasonOf(absl::UnavailableError("draining")), RejectReason::kDraining);
  EXPECT_EQ(CodeClassOf(204), CodeClass::kOk);
  EXPECT_EQ(CodeClassOf(499), CodeClass::kClientError);
  EXPECT_EQ(CodeClassOf(503), CodeClass::kServerError);
}

TEST(ProcessStats, AreOfThisProcess) {
  const ProcessStats stats = ReadProcessStats();
  EXPECT_GT(stats.resident_bytes, 1 << 20);
  EXPECT_GT(stats.virtual_bytes, stats.resident_bytes);
  EXPECT_GE(stats.open_fds, 3);
  EXPECT_GE(stats.max_fds, stats.open_fds);
  EXPECT_NEAR(stats.start_unix_s, static_cast<double>(time(nullptr)), 600);
  EXPECT_LT(stats.cpu_seconds, 600);
}

TEST(Management, StallsOnlyWhileWorkWaits) {
  EngineStats stats;
  stats.last_step_age_s = 1000;
  EXPECT_FALSE(IsStalled(stats)) << "idle";
  stats.requests_waiting = 1;
  EXPECT_TRUE(IsStalled(stats));
  stats.last_step_age_s = 59;
  EXPECT_FALSE(IsStalled(stats));
}

class ManagementTest : public testing::Test {
 protected:
  ManagementTest() {
    context_.lifecycle = &lifecycle_;
    context_.metrics = &metrics_;
  }
  nlohmann::json Ready(int* status) {
    const HttpResponse response = Readiness(context_);
    *status = response.status;
    return nlohmann::json::parse(response.body);
  }
  Lifecycle lifecycle_;
  Metrics metrics_{"m"};
  ServerContext context_;
};

TEST_F(ManagementTest, ReadinessFollowsTheLifecycle) {
  int status = 0;
  lifecycle_.Set(Phase::kLoading, "reading the model");
  lifecycle_.SetProgress(0.25);
  auto json = Ready(&status);
  EXPECT_EQ(status, 503);
  EXPECT_EQ(json["phase"], "loading");
  EXPECT_EQ(json["progress"], 0.25);
  EXPECT_EQ(json["reason"], "reading the model");
  lifecycle_.Set(Phase::kReady);
  json = Ready(&status);
  EXPECT_EQ(status, 200);
  EXPECT_EQ(json["progress"], 1.0);
  lifecycle_.Set(Phase::kDraining, "shutting down");
  json = Ready(&status);
  EXPECT_EQ(status, 503);
  EXPECT_EQ(json["phase"], "draining");
}

}  // namespace
}  // namespace loupe
