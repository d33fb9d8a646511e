// Waits for the engine's events of one HTTP request and writes the answer: frames as they come, or one object at the
// end. Ends what is left of the request when the client leaves. Runs on the connection's strand.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "boost/asio/awaitable.hpp"
#include "engine/response_stream.h"
#include "server/api_keys.h"
#include "server/http_message.h"
#include "server/openai_response.h"

namespace loupe {

// The engine's streams of one HTTP request, one a prompt. Whatever is unfinished when this goes is cancelled. What they
// cost is charged to `account`, if there is one, also when nobody reads them to their end.
class StreamSet {
 public:
  explicit StreamSet(std::vector<std::shared_ptr<ResponseStream>> streams, std::shared_ptr<KeyAccount> account = nullptr)
      : streams_(std::move(streams)), account_(std::move(account)) {}
  StreamSet(StreamSet&&) = default;
  StreamSet& operator=(StreamSet&&) = delete;
  ~StreamSet();

  void OnReady(const std::function<void()>& wake);
  void Charge(const Finished& finished) const {
    if (account_ != nullptr) account_->Charge(finished);
  }
  const std::vector<std::shared_ptr<ResponseStream>>& streams() const { return streams_; }

 private:
  std::vector<std::shared_ptr<ResponseStream>> streams_;
  std::shared_ptr<KeyAccount> account_;
};

struct AnswerOutcome {
  int status = 200;  // as the client saw it; 499: it left
  FinishReason reason = FinishReason::kStop;
};

// `ping` is how long a stream may be silent before a comment is sent, so that no proxy takes it for dead.
boost::asio::awaitable<AnswerOutcome> RunAnswer(const ApiRequest& request, Answer& answer, StreamSet& streams,
                                                HttpExchange& exchange,
                                                std::chrono::milliseconds ping = std::chrono::seconds(15));

}  // namespace loupe
