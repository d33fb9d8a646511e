#include "server/metrics.h"

#include "absl/strings/match.h"
#include "engine/load/load_model.h"
#include "nlohmann/json.hpp"
#include "prometheus/text_serializer.h"
#include "server/logging.h"
#include "server/metrics_families.h"

namespace loupe {

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kToolCalls:
      return "tool_calls";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

RejectReason RejectReasonOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return RejectReason::kQueueFull;
    case absl::StatusCode::kUnavailable:
      return RejectReason::kDraining;
    case absl::StatusCode::kUnauthenticated:
      return RejectReason::kNoKey;
    default:
      break;
  }
  return absl::StartsWith(std::string(status.message()), "context_length_exceeded") ? RejectReason::kTooLong
                                                                                    : RejectReason::kInvalid;
}

CodeClass CodeClassOf(int http_status) {
  if (http_status < 400) return CodeClass::kOk;
  return http_status < 500 ? CodeClass::kClientError : CodeClass::kServerError;
}

Metrics::Metrics(const std::string& model_name) : families_(std::make_unique<Families>(model_name)) {}
Metrics::~Metrics() = default;

void Metrics::OnStep(const StepReport& step) {
  Families::Step& f = families_->steps[static_cast<size_t>(step.phase)];
  f.steps->Increment();
  f.seconds->Observe(step.seconds);
  f.requests->Observe(step.num_sequences);
  f.tokens->Observe(step.num_rows);
  f.weight_read->Increment(static_cast<double>(step.weight_read_bytes));
  f.kv_read->Increment(static_cast<double>(step.kv_read_bytes));
  f.kv_write->Increment(static_cast<double>(step.kv_write_bytes));
  // Policy full is the only one, so the counterfactual is what happened.
  f.full_read->Increment(static_cast<double>(step.weight_read_bytes + step.kv_read_bytes));
  f.full_write->Increment(static_cast<double>(step.kv_write_bytes));
}

void Metrics::OnFirstToken(double seconds_since_arrival) { families_->first_token->Observe(seconds_since_arrival); }
void Metrics::OnNextToken(double seconds_since_last) { families_->next_token->Observe(seconds_since_last); }

void Metrics::OnPreempted(const Preemption& preemption) {
  const nlohmann::ordered_json fields = {{"request_id", preemption.request_id},
                                         {"sample", preemption.index},
                                         {"cause", preemption.cause == Preemption::Cause::kPriority ? "priority" : "memory"},
                                         {"priority", preemption.priority},
                                         {"tokens", preemption.num_tokens},
                                         {"bytes", preemption.bytes}};
  LogEvent("preempted", fields);
}

void Metrics::OnFinished(const Finished& finished) {
  if (finished.index == 0) rate_.Add();
  const Timings& t = finished.timings;
  const int tokens = finished.usage.completion_tokens;
  families_->duration[static_cast<size_t>(finished.reason)]->Observe(t.total);
  families_->phase_queue->Observe(t.queue);
  families_->phase_prefill->Observe(t.prefill);
  families_->phase_decode->Observe(t.decode);
  if (tokens > 1) families_->per_output_token->Observe((t.total - t.first_token) / (tokens - 1));
  if (finished.index == 0) families_->prompt_tokens->Observe(finished.usage.prompt_tokens);
  families_->output_tokens->Observe(tokens);
  const KvReport& kv = finished.usage.kv;
  const int64_t seen = kv.entries_kept + kv.entries_dropped;
  if (seen > 0) families_->retention->Observe(static_cast<double>(kv.entries_kept) / static_cast<double>(seen));
}

void Metrics::SetModel(const LoadedModel& model, double load_s) {
  {
    const std::lock_guard lock(families_->scrape_mutex);
    const ModelConfig& c = model.config;
    families_->kv_lists = int64_t{c.num_layers} * c.num_kv_heads;
    families_->kv_entry_bytes = int64_t{2} * 2 * c.head_dim;  // key and value of 2 bytes an element
    families_->load_bytes->Set(static_cast<double>(model.file_bytes));
    families_->threads->Set(model.backend ? model.backend->Info().num_threads : 0);
    families_->model_info
        ->Add({{"model", families_->model},
               {"architecture", c.architecture},
               {"parameters", std::to_string(c.parameters)},
               {"layers", std::to_string(c.num_layers)},
               {"context", std::to_string(c.max_context)}})
        .Set(1);
  }
  SetStartupPhase("load", load_s);
}

void Metrics::SetStartupPhase(const std::string& phase, double seconds) {
  const std::lock_guard lock(families_->scrape_mutex);
  prometheus::Gauge*& gauge = families_->startup_phases[phase];
  if (gauge == nullptr) gauge = &families_->startup_phase->Add({{"phase", phase}});
  gauge->Set(seconds);
}

void Metrics::CountRequest(Api api, CodeClass code, FinishReason reason) {
  families_->requests[static_cast<int>(api)][static_cast<int>(code)][static_cast<int>(reason)]->Increment();
}

void Metrics::CountRejected(RejectReason reason) { families_->rejected[static_cast<int>(reason)]->Increment(); }
void Metrics::ObserveTokenize(double seconds) { families_->phase_tokenize->Observe(seconds); }
void Metrics::HttpStarted() { families_->http_in_flight->Increment(); }
void Metrics::HttpFinished() { families_->http_in_flight->Decrement(); }
void Metrics::GrpcStarted() { families_->grpc_in_flight->Increment(); }
void Metrics::GrpcFinished() { families_->grpc_in_flight->Decrement(); }

std::string Metrics::Page(const EngineStats* stats, Phase phase) {
  const std::lock_guard lock(families_->scrape_mutex);
  if (stats != nullptr) families_->Refresh(*stats);
  for (int i = 0; i < kNumPhases; ++i) families_->lifecycle[i]->Set(static_cast<Phase>(i) == phase ? 1 : 0);
  families_->draining->Set(phase == Phase::kDraining ? 1 : 0);
  const bool counts = phase == Phase::kDraining && stats != nullptr;
  families_->drain_remaining->Set(counts ? stats->requests_running + stats->requests_waiting : 0);
  families_->RefreshProcess();
  return prometheus::TextSerializer().Serialize(families_->registry.Collect());
}

std::string Metrics::RoutingPage(const EngineStats* stats) {
  const std::lock_guard lock(families_->scrape_mutex);
  if (stats != nullptr) families_->Refresh(*stats);
  std::vector<prometheus::MetricFamily> page;
  for (prometheus::MetricFamily& family : families_->registry.Collect()) {
    for (const char* name : {"loupe_requests_waiting", "loupe_requests_running", "loupe_kv_pool_pinned_ratio",
                             "loupe_cache_config_info"}) {
      if (family.name != name) continue;
      page.push_back(std::move(family));
      break;
    }
  }
  return prometheus::TextSerializer().Serialize(page);
}

}  // namespace loupe
