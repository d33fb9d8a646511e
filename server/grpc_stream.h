// One streaming call: takes events from a ResponseStream and writes them as they come. At most one write is outstanding,
// and while it is, events merge in the ResponseStream: a slow reader holds back nobody and costs no memory.
//
// Threads: gRPC calls the On... methods, the step thread wakes the pump through a small pool, so that it never writes to
// a socket itself. `mutex_` orders them; `self_` keeps the call alive until OnDone and the last posted pump are through.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "boost/asio/post.hpp"
#include "boost/asio/thread_pool.hpp"
#include "grpcpp/grpcpp.h"
#include "server/convert_proto.h"
#include "server/grpc_call_log.h"

namespace loupe {

template <class Response>
class GrpcStream : public grpc::ServerWriteReactor<Response>, public std::enable_shared_from_this<GrpcStream<Response>> {
 public:
  GrpcStream(boost::asio::thread_pool& pool, GrpcCallLog log) : pool_(pool), log_(std::move(log)) {}

  // `echo`: text that each of the n samples begins with.
  void Begin(std::shared_ptr<ResponseStream> stream, std::string echo, int n) {
    self_ = this->shared_from_this();
    stream_ = std::move(stream);
    echo_ = std::move(echo);
    num_samples_ = n;
    std::weak_ptr<GrpcStream> weak = self_;
    stream_->OnReady([weak] {
      if (auto self = weak.lock()) boost::asio::post(self->pool_, [self] { self->Pump(); });
    });
  }
  // The call was refused before it began.
  void Refuse(const absl::Status& status) {
    self_ = this->shared_from_this();
    std::lock_guard<std::mutex> lock(mutex_);
    FinishLocked(status);
  }

  void OnWriteDone(bool ok) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      writing_ = false;
      if (!ok && stream_ != nullptr) stream_->Cancel();
    }
    Pump();
  }
  void OnCancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream_ != nullptr) stream_->Cancel();
  }
  void OnDone() override {
    if (stream_ != nullptr) stream_->OnReady({});
    log_.Done();
    const auto self = std::move(self_);  // the last reference may go here
  }

 private:
  void Pump() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (writing_ || finished_) return;
    while (outbox_.empty()) {
      std::optional<Event> event = stream_->TryNext();
      if (!event) break;
      Take(*std::move(event));
    }
    if (!outbox_.empty()) {
      response_ = std::move(outbox_.front());
      outbox_.pop_front();
      writing_ = true;
      this->StartWrite(&response_);
      return;
    }
    if (stream_->done()) FinishLocked(FinalStatus());
  }

  void Take(Event event) {
    Response response;
    if (const auto* started = std::get_if<Started>(&event)) {
      *response.mutable_started() = StartedToProto(*started);
      outbox_.push_back(std::move(response));
      for (int i = 0; i < num_samples_ && !echo_.empty(); ++i) {
        Response echo;
        echo.mutable_delta()->set_index(i);
        echo.mutable_delta()->set_text(echo_);
        outbox_.push_back(std::move(echo));
      }
      return;
    }
    if (const auto* delta = std::get_if<Delta>(&event)) {
      *response.mutable_delta() = DeltaToProto(*delta);
      outbox_.push_back(std::move(response));
      return;
    }
    const auto& finished = std::get<Finished>(event);
    log_.Add(finished);
    ends_.push_back({finished.reason, finished.usage.completion_tokens, finished.error});
    if (finished.reason == FinishReason::kError) return;
    if (finished.reason == FinishReason::kDeadline && finished.usage.completion_tokens == 0) return;
    *response.mutable_finished() = FinishedToProto(finished);
    outbox_.push_back(std::move(response));
  }

  // The call fails as a whole if no sample came to an answer.
  absl::Status FinalStatus() const {
    absl::Status worst;
    for (const End& end : ends_) {
      if (end.reason == FinishReason::kError) return end.error;
      if (end.reason == FinishReason::kCancelled) worst = absl::CancelledError("the request was cancelled");
      if (end.reason == FinishReason::kDeadline && end.completion_tokens == 0) {
        worst = absl::DeadlineExceededError("the deadline passed before the first token");
      }
    }
    return worst;
  }

  void FinishLocked(const absl::Status& status) {
    finished_ = true;
    log_.SetStatus(status);
    this->Finish(ToGrpcStatus(status));
  }

  struct End {
    FinishReason reason;
    int completion_tokens;
    absl::Status error;
  };

  boost::asio::thread_pool& pool_;
  GrpcCallLog log_;
  std::shared_ptr<GrpcStream> self_;
  std::mutex mutex_;
  std::shared_ptr<ResponseStream> stream_;
  std::string echo_;
  int num_samples_ = 1;
  std::deque<Response> outbox_;  // guarded by mutex_: at most Started and the echoes
  Response response_;            // being written
  bool writing_ = false, finished_ = false;  // guarded by mutex_
  std::vector<End> ends_;
};

}  // namespace loupe
