// How requests come in: checks on the client's thread, samples on the step thread.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_core.h"
#include "engine/validate.h"

namespace loupe {

absl::Status EngineCore::Check(const Request& request) const {
  if (absl::Status s = ValidatePrompt(request.prompt, vocab_size_); !s.ok()) return s;
  if (absl::Status s = ValidateRequest(request, vocab_size_); !s.ok()) return s;
  // A prompt that fills the context leaves no room for a token, unless none is asked for.
  const int64_t room = request.sampling.max_tokens == 0 ? 0 : 1;
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  if (tokens + room > limits_.max_context) {
    return absl::InvalidArgumentError(absl::StrCat(
        "context_length_exceeded: the prompt has ", tokens, " tokens, the context holds ", limits_.max_context,
        room > 0 ? " and one must be left for the answer" : "", "; shorten the prompt (the KV cache has ",
        limits_.kv_device_bytes, " bytes)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ResponseStream>> EngineCore::Submit(Request request) {
  std::vector<Request> one;
  one.push_back(std::move(request));
  auto streams = SubmitAll(std::move(one));
  if (!streams.ok()) return streams.status();
  return std::move(streams->front());
}

absl::StatusOr<std::vector<std::shared_ptr<ResponseStream>>> EngineCore::SubmitAll(std::vector<Request> requests) {
  std::vector<Submission> submissions;
  std::vector<std::shared_ptr<ResponseStream>> handles;
  if (absl::Status s = ValidatePromptLogprobs(requests); !s.ok()) return s;
  for (Request& request : requests) {
    if (absl::Status s = Check(request); !s.ok()) return s;
    auto kv = chooser_->Choose(request);
    if (!kv.ok()) return kv.status();
    const uint64_t number = submitted_.fetch_add(1, std::memory_order_relaxed);
    if (!request.sampling.seed) {
      request.sampling.seed = static_cast<uint64_t>(UniformAt(parts_.seed, number) * 0x1p53);
    }
    if (request.id.empty()) request.id = absl::StrCat("request-", number);
    if (request.arrival == SteadyTime{}) request.arrival = parts_.clock->Now();
    auto stream = std::make_shared<ResponseStream>(request.id, request.n);
    submissions.push_back({std::move(request), stream, *std::move(kv)});
    // The reader's end: when its last copy goes, nobody waits for the answer any more.
    ResponseStream* raw = stream.get();
    handles.emplace_back(raw, [keep = std::move(stream)](ResponseStream* s) { s->Cancel(); });
  }
  if (absl::Status s = queue_.Push(std::move(submissions)); !s.ok()) return s;
  return handles;
}

void EngineCore::AddRequest(Submission submission) {
  auto state = std::make_shared<RequestState>();
  state->request = std::move(submission.request);
  state->stream = std::move(submission.stream);
  const Request& request = state->request;
  state->seed = request.sampling.seed.value_or(0);
  const int room = limits_.max_context - static_cast<int>(request.prompt.size());
  const int asked = request.sampling.max_tokens;
  state->context_bound = asked < 0 || asked > room;
  state->max_tokens = state->context_bound ? room : asked;
  state->unfinished = request.n;
  if (submission.kv.may_be_full) {
    int64_t free = cache_->bytes_free();
    for (const auto* list : {&running_, &waiting_}) {
      for (const SequencePtr& s : *list) free -= NeededBytes(*s);
    }
    const int prompt = static_cast<int>(request.prompt.size());
    KvChooser::Decide(cache_->BytesForTokens(prompt + state->max_tokens), free, prompt, &submission.kv);
  }
  state->kv = std::move(submission.kv);
  SequencePtr first;
  for (int i = 0; i < request.n; ++i) {
    auto sequence = std::make_unique<EngineSequence>(state, i, next_order_++, *parts_.tokenizer, end_ids_);
    if (i == 0) {
      first = std::move(sequence);
    } else {
      state->siblings.push_back(std::move(sequence));
    }
  }
  Enqueue(std::move(first));
}

void EngineCore::Enqueue(SequencePtr sequence) {
  const Rank rank = sequence->rank();
  const auto at = std::find_if(waiting_.begin(), waiting_.end(), [&](const SequencePtr& s) { return rank.Before(s->rank()); });
  waiting_.insert(at, std::move(sequence));
}

}  // namespace loupe
