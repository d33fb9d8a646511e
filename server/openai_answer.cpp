#include "server/openai_answer.h"

#include "absl/strings/str_cat.h"
#include "server/http_json.h"
#include "server/http_status.h"

namespace loupe {
namespace {

namespace asio = boost::asio;

// Why an end is no answer but an error; OK if it is an answer. Only before the first token can a status still say so.
absl::Status FailureOf(const Finished& finished, const ApiRequest& request, const Answer& answer) {
  if (finished.reason == FinishReason::kError) {
    return finished.error.ok() ? absl::InternalError("the engine gave up without saying why") : finished.error;
  }
  if (finished.usage.completion_tokens > 0 || answer.completion_tokens() > 0) return absl::OkStatus();
  if (finished.reason == FinishReason::kDeadline) {
    return absl::DeadlineExceededError(absl::StrCat("no token within the ", request.timeout_ms,
                                                    " ms of timeout_ms; allow more time or send a shorter prompt"));
  }
  if (finished.reason == FinishReason::kCancelled && finished.stop_reason == "drain") {
    return absl::UnavailableError("the server is shutting down; ask another one");
  }
  return absl::OkStatus();
}

// Takes what is waiting in all streams. Not OK: the request as a whole failed.
absl::Status TakeEvents(const ApiRequest& request, const StreamSet& set, Answer* answer, std::string* frames,
                        bool started) {
  int prompt = 0;
  for (const auto& stream : set.streams()) {
    while (auto event = stream->TryNext()) {
      if (const auto* delta = std::get_if<Delta>(&*event)) answer->Add(prompt, *delta, frames);
      if (auto* scored = std::get_if<PromptScored>(&*event)) answer->Add(prompt, std::move(*scored));
      const auto* finished = std::get_if<Finished>(&*event);
      if (finished == nullptr) continue;
      set.Charge(*finished);
      const bool can_fail =
          finished->reason == FinishReason::kError || (!started && (frames == nullptr || frames->empty()));
      const absl::Status failure = can_fail ? FailureOf(*finished, request, *answer) : absl::OkStatus();
      if (!failure.ok()) return failure;
      answer->Add(prompt, *finished, frames);
    }
    ++prompt;
  }
  return absl::OkStatus();
}

asio::awaitable<bool> WriteFrames(std::string frames, HttpExchange& exchange) {
  if (!exchange.started()) {
    HttpResponse head;
    head.content_type = "text/event-stream; charset=utf-8";
    head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
    const bool started = co_await exchange.StartStream(std::move(head));
    if (!started) co_return false;
  }
  const bool written = co_await exchange.Write(std::move(frames));
  co_return written;
}

asio::awaitable<AnswerOutcome> Fail(absl::Status failure, std::string frames, HttpExchange& exchange) {
  AnswerOutcome outcome;
  outcome.status = HttpStatusOf(failure);
  outcome.reason = outcome.status == 408   ? FinishReason::kDeadline
                   : outcome.status == 503 ? FinishReason::kCancelled
                                           : FinishReason::kError;
  exchange.log["error"] = std::string(failure.message());
  if (exchange.started() || !frames.empty()) {
    frames += SseFrame(ErrorObject(failure)) + kSseDone;
    co_await WriteFrames(std::move(frames), exchange);
  } else {
    HttpResponse response = ErrorResponse(failure);
    co_await exchange.Respond(std::move(response));
  }
  co_return outcome;
}

// The end of a complete answer. (gcc 12: every co_await is a statement of its own.)
asio::awaitable<bool> Complete(const ApiRequest& request, const Answer& answer, std::string frames,
                               HttpExchange& exchange) {
  bool sent = false;
  if (request.stream) {
    frames += answer.LastFrames();
    sent = co_await WriteFrames(std::move(frames), exchange);
  } else {
    HttpResponse whole;
    whole.body = DumpJson(answer.Whole());
    sent = co_await exchange.Respond(std::move(whole));
  }
  co_return sent;
}

AnswerOutcome Gone() { return {499, FinishReason::kCancelled}; }

}  // namespace

StreamSet::~StreamSet() {
  for (const auto& stream : streams_) {
    stream->OnReady({});
    if (stream->done()) continue;
    stream->Cancel();
    if (account_ != nullptr) account_->ChargeAtEnd(stream);
  }
}

void StreamSet::OnReady(const std::function<void()>& wake) {
  for (const auto& stream : streams_) stream->OnReady(wake);
}

asio::awaitable<AnswerOutcome> RunAnswer(const ApiRequest& request, Answer& answer, StreamSet& streams,
                                         HttpExchange& exchange, std::chrono::milliseconds ping) {
  streams.OnReady(exchange.Waker());
  auto last_write = std::chrono::steady_clock::now();
  for (;;) {
    std::string frames;
    absl::Status failure =
        TakeEvents(request, streams, &answer, request.stream ? &frames : nullptr, exchange.started());
    if (exchange.client_gone()) co_return Gone();
    if (!failure.ok()) {
      const AnswerOutcome outcome = co_await Fail(std::move(failure), std::move(frames), exchange);
      co_return outcome;
    }
    if (answer.finished()) {
      const bool sent = co_await Complete(request, answer, std::move(frames), exchange);
      if (!sent) co_return Gone();
      co_return AnswerOutcome{200, answer.choices().front().end.reason};
    }
    const bool silent = std::chrono::steady_clock::now() - last_write >= ping;
    if (request.stream && frames.empty() && silent) frames = kSsePing;
    if (!frames.empty()) {
      const bool written = co_await WriteFrames(std::move(frames), exchange);
      if (!written) co_return Gone();
      last_write = std::chrono::steady_clock::now();
      continue;
    }
    // Only a stream has something to say while the engine is silent.
    const SteadyTime until = request.stream ? last_write + ping : SteadyTime::max();
    co_await exchange.Wait(until);
  }
}

}  // namespace loupe
