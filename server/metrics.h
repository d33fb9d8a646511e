// The Prometheus side of the server: lower layers count in plain structs, this turns them into families. All families
// and label combinations exist with 0 from the start, so no panel is ever absent. Thread-safe; the step thread calls
// the observer's methods, which only add to atomics or to a histogram under its own short lock.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "engine/engine_stats.h"
#include "server/lifecycle.h"
#include "server/service_rate.h"

namespace loupe {

enum class Api { kOpenAiChat, kOpenAiCompletion, kGrpcGenerate, kGrpcChat };
enum class CodeClass { kOk, kClientError, kServerError };  // 2xx, 4xx, 5xx and what corresponds in gRPC
enum class RejectReason { kInvalid, kTooLong, kQueueFull, kKvExhausted, kLoading, kDraining, kNoKey, kKeyLimit };

// As labels and logs spell it: stop, length, tool_calls, cancelled, deadline, error.
const char* FinishReasonName(FinishReason reason);

class Metrics : public EngineObserver {
 public:
  explicit Metrics(const std::string& model_name);
  ~Metrics() override;

  void OnStep(const StepReport& step) override;
  void OnFirstToken(double seconds_since_arrival) override;
  void OnNextToken(double seconds_since_last) override;
  void OnFinished(const Finished& finished) override;
  // A line in the log; the count comes with the engine's stats.
  void OnPreempted(const Preemption& preemption) override;

  // Once, when the model is loaded, before the engine starts.
  void SetModel(const LoadedModel& model, double load_s);
  void SetStartupPhase(const std::string& phase, double seconds);

  // Edge: once a request, when its answer is complete. `code` of a request that never reached the engine is an error's.
  void CountRequest(Api api, CodeClass code, FinishReason reason);
  void CountRejected(RejectReason reason);
  void ObserveTokenize(double seconds);
  void HttpStarted();
  void HttpFinished();
  void GrpcStarted();
  void GrpcFinished();

  // The page of /metrics; the few gauges of /metrics/epp. `stats` is null before the engine exists.
  std::string Page(const EngineStats* stats, Phase phase);
  std::string RoutingPage(const EngineStats* stats);

  const ServiceRate& service_rate() const { return rate_; }

 private:
  struct Families;
  std::unique_ptr<Families> families_;
  ServiceRate rate_;
};

// Which rejection a status of Engine::Submit or of parsing stands for.
RejectReason RejectReasonOf(const absl::Status& status);
CodeClass CodeClassOf(int http_status);

}  // namespace loupe
