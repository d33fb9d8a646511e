// One streaming call: takes events from a ResponseStream and writes them as they come. At most one write is outstanding,
// and while it is, events merge in the ResponseStream: a slow reader holds back nobody and costs no memory. A write that
// its reader does not take within kSlowReader ends the call.
//
// Threads: gRPC calls the On... methods, the step thread wakes the pump through a small pool, so that it never writes to
// a socket itself. `mutex_` orders them; `self_` keeps the call alive until OnDone and the last posted pump are through.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "boost/asio/post.hpp"
#include "boost/asio/steady_timer.hpp"
#include "boost/asio/thread_pool.hpp"
#include "grpcpp/grpcpp.h"
#include "server/api_keys.h"
#include "server/convert_proto.h"
#include "server/grpc_call_log.h"

namespace loupe {

inline constexpr std::chrono::seconds kSlowReader{60};  // as long as a write over HTTP may take

template <class Response>
class GrpcStream : public grpc::ServerWriteReactor<Response>, public std::enable_shared_from_this<GrpcStream<Response>> {
 public:
  GrpcStream(boost::asio::thread_pool& pool, GrpcCallLog log, grpc::CallbackServerContext* call)
      : pool_(pool), log_(std::move(log)), call_(call), timer_(pool) {}

  // What the call costs is charged to `account`; null: to nobody.
  void SetAccount(std::shared_ptr<KeyAccount> account) {
    if (account != nullptr) log_.SetKey(account->name());
    account_ = std::move(account);
  }

  // `handle` goes when the call is done.
  void KeepUntilDone(std::shared_ptr<void> handle) { kept_.push_back(std::move(handle)); }

  // Answers of n samples are taken apart; calls get ids from `request_id`.
  void SetParsers(const AnswerParserOptions& options, int n, std::string request_id) {
    for (int i = 0; i < n; ++i) parsers_.emplace_back(options);
    request_id_ = std::move(request_id);
  }

  // `echo`: text that each of the n samples begins with; `scored`: it waits for the log-probabilities of its tokens.
  void Begin(std::shared_ptr<ResponseStream> stream, std::string echo, bool scored, int n) {
    self_ = this->shared_from_this();
    stream_ = std::move(stream);
    echo_ = std::move(echo);
    scored_ = scored;
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
      if (!ok) LeaveLocked();
    }
    Pump();
  }
  void OnCancel() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      LeaveLocked();
    }
    Pump();
  }
  void OnDone() override {
    if (stream_ != nullptr) stream_->OnReady({});
    {
      std::lock_guard<std::mutex> lock(mutex_);
      timer_.cancel();
    }
    log_.Done();
    kept_.clear();
    const auto self = std::move(self_);  // the last reference may go here
  }

 private:
  void Pump() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (writing_ || finished_ || cancelling_ || stream_ == nullptr) return;
    while (outbox_.empty() || left_) {
      std::optional<Event> event = stream_->TryNext();
      if (!event) break;
      Take(*std::move(event));
    }
    // Nobody listens; the events are only counted until the engine has ended the request, which takes a step.
    if (left_) outbox_.clear(), late_.clear();
    if (outbox_.empty() && stream_->done() && AnyAnswer()) outbox_ = std::exchange(late_, {});
    if (!outbox_.empty()) {
      response_ = std::move(outbox_.front());
      outbox_.pop_front();
      writing_ = true;
      write_began_ = std::chrono::steady_clock::now();
      if (!watching_) WatchReaderLocked();
      this->StartWrite(&response_);
      return;
    }
    if (stream_->done()) FinishLocked(FinalStatus());
  }

  // Looks now and then, for a timer a write would cost more than the write.
  void WatchReaderLocked() {
    watching_ = true;
    timer_.expires_after(kSlowReader / 4);
    std::weak_ptr<GrpcStream> weak = self_;
    timer_.async_wait([weak](boost::system::error_code cancelled) {
      const auto self = weak.lock();
      if (cancelled || self == nullptr) return;
      self->CheckReader();
    });
  }
  void CheckReader() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (finished_) return;
      if (!writing_ || std::chrono::steady_clock::now() - write_began_ < kSlowReader) return WatchReaderLocked();
      cancelling_ = true;  // nothing finishes the call meanwhile, so its context stays
    }
    call_->TryCancel();  // may call OnCancel at once
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancelling_ = false;
    }
    Pump();
  }

  void LeaveLocked() {
    left_ = true;
    if (stream_ != nullptr) stream_->Cancel();
  }

  void Take(Event event) {
    Response response;
    if (const auto* started = std::get_if<Started>(&event)) {
      *response.mutable_started() = StartedToProto(*started);
      outbox_.push_back(std::move(response));
      if (!echo_.empty() && !scored_) Echo({});
      return;
    }
    if (const auto* scored = std::get_if<PromptScored>(&event)) return Echo(scored->tokens);
    if (const auto* delta = std::get_if<Delta>(&event)) {
      *response.mutable_delta() = DeltaToProto(*delta);
      if (!parsers_.empty())
        FillPieces(parsers_[static_cast<size_t>(delta->index)].Push(delta->text), request_id_, response.mutable_delta());
      outbox_.push_back(std::move(response));
      return;
    }
    auto& finished = std::get<Finished>(event);
    if (!parsers_.empty()) FinishParser(&finished);
    log_.Add(finished);
    if (account_ != nullptr) account_->Charge(finished);
    End end{finished.reason, finished.reason == FinishReason::kDeadline && finished.usage.completion_tokens == 0,
            finished.stop_reason == "drain", finished.error};
    ends_.push_back(std::move(end));
    if (finished.reason == FinishReason::kError) return;
    *response.mutable_finished() = FinishedToProto(finished);
    (ends_.back().too_late ? late_ : outbox_).push_back(std::move(response));
  }

  // The last pieces of an answer; a call is what it ended for then.
  void FinishParser(Finished* finished) {
    AnswerParser& parser = parsers_[static_cast<size_t>(finished->index)];
    if (auto pieces = parser.Finish(); !pieces.empty()) {
      Response rest;
      rest.mutable_delta()->set_index(finished->index);
      FillPieces(std::move(pieces), request_id_, rest.mutable_delta());
      outbox_.push_back(std::move(rest));
    }
    if (parser.num_calls() > 0 && finished->reason == FinishReason::kStop) finished->reason = FinishReason::kToolCalls;
  }

  void Echo(const std::vector<TokenLogprobs>& scored) {
    for (int i = 0; i < num_samples_; ++i) {
      for (v1::Delta& delta : EchoToProto(i, echo_, scored)) {
        Response response;
        *response.mutable_delta() = std::move(delta);
        outbox_.push_back(std::move(response));
      }
    }
  }

  // Some sample has more to say than that the deadline came before its first token.
  bool AnyAnswer() const {
    return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return !end.too_late; });
  }

  // An error or a cancel fails the call; a deadline does only if it came before the first token of every sample.
  absl::Status FinalStatus() const {
    absl::Status status;
    if (!AnyAnswer()) status = absl::DeadlineExceededError("the deadline passed before the first token");
    for (const End& end : ends_) {
      if (end.reason == FinishReason::kError) return end.error;
      if (end.reason != FinishReason::kCancelled) continue;
      status = end.drained ? absl::UnavailableError("the server shut down before the answer was complete")
                           : absl::CancelledError("the request was cancelled");
    }
    return status;
  }

  void FinishLocked(const absl::Status& status) {
    finished_ = true;
    log_.SetStatus(status);
    this->Finish(ToGrpcStatus(status));
  }

  struct End {
    FinishReason reason;
    bool too_late;  // the deadline came before the first token
    bool drained;
    absl::Status error;
  };

  boost::asio::thread_pool& pool_;
  GrpcCallLog log_;
  grpc::CallbackServerContext* const call_;  // lives until OnDone
  std::shared_ptr<KeyAccount> account_;
  boost::asio::steady_timer timer_;             // guarded by mutex_
  bool watching_ = false, cancelling_ = false;  // guarded by mutex_
  std::chrono::steady_clock::time_point write_began_;  // guarded by mutex_
  std::vector<std::shared_ptr<void>> kept_;
  std::shared_ptr<GrpcStream> self_;
  std::mutex mutex_;
  std::shared_ptr<ResponseStream> stream_;
  std::vector<AnswerParser> parsers_;  // one a sample; empty: answers are text
  std::string request_id_;
  std::string echo_;
  bool scored_ = false;
  int num_samples_ = 1;
  std::deque<Response> outbox_;  // guarded by mutex_: at most Started and the echoes, or the Finished of all samples
  std::deque<Response> late_;    // Finished of samples that the deadline caught before their first token
  Response response_;            // being written
  bool writing_ = false, finished_ = false;  // guarded by mutex_
  bool left_ = false;                        // the client is gone
  std::vector<End> ends_;
};

}  // namespace loupe
