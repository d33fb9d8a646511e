// A request inside the engine (Job) and one of its samples (Sequence). Owned and touched by the step thread alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/response_stream.h"
#include "engine/sample/sampler.h"
#include "engine/text/stream_decoder.h"
#include "kvcache/kv_cache.h"

namespace loupe {

struct Sequence;

struct Job {
  Request request;
  std::shared_ptr<ResponseStream> stream;
  std::string kv_reason;  // why this policy
  uint64_t order = 0;     // of arrival at the engine
  bool started = false;   // Started was sent
  int unfinished = 0;
  // Samples that wait for the first one's prompt, to share its pages.
  std::vector<std::unique_ptr<Sequence>> siblings;
};

struct Sequence {
  Sequence(std::shared_ptr<Job> job_in, int index_in, Sampler sampler_in, StreamDecoder decoder_in)
      : job(std::move(job_in)), index(index_in), sampler(std::move(sampler_in)), decoder(std::move(decoder_in)) {}

  std::shared_ptr<Job> job;
  const int index;
  Sampler sampler;
  StreamDecoder decoder;

  std::vector<int32_t> output;
  SeqId cache_id;        // valid while it runs
  int computed = 0;      // tokens in the cache
  int ever_computed = 0;  // most tokens that were ever in the cache: computing them again is recomputation

  bool admitted_once = false;
  SteadyTime admitted{}, first_token{}, last_token{};
  double prompt_bytes_ratio = 0;  // device bytes over full bytes at the end of prefill
  KvSequenceReport kv;            // kept when the cache gives it up

  const std::vector<int32_t>& prompt() const { return job->request.prompt; }
  int prompt_size() const { return static_cast<int>(prompt().size()); }
  int total() const { return prompt_size() + static_cast<int>(output.size()); }
  int prompt_left() const { return computed < prompt_size() ? prompt_size() - computed : 0; }
  int decode_left() const { return total() - computed - prompt_left(); }
  int32_t token(int i) const { return i < prompt_size() ? prompt()[i] : output[i - prompt_size()]; }
};

// Higher priority first, then the earlier arrival, then the lower sample.
inline bool Precedes(const Sequence& a, const Sequence& b) {
  if (a.job->request.priority != b.job->request.priority) return a.job->request.priority > b.job->request.priority;
  if (a.job->order != b.job->order) return a.job->order < b.job->order;
  return a.index < b.index;
}

}  // namespace loupe
