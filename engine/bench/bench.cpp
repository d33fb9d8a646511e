#include "engine/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"

namespace loupe {
namespace {

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())))];
}

std::vector<int32_t> RandomTokens(int count, int vocab_size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab_size));
  return ids;
}

// Multiply-adds of one row through all matrices, and of its attention over `context` entries.
double FlopsOfRow(const ModelConfig& c, double context, bool with_head) {
  const double qkv = double(c.width) * c.head_dim * (c.num_heads + 2 * c.num_kv_heads);
  const double rest = double(c.num_heads) * c.head_dim * c.width + 3.0 * c.width * c.feed_forward;
  const double attention = 2.0 * context * c.num_heads * c.head_dim;
  return 2 * (c.num_layers * (qkv + rest + attention) + (with_head ? double(c.width) * c.vocab_size : 0));
}

// Sequences in a cache of their own, fed with random tokens.
class Runner {
 public:
  static absl::StatusOr<std::unique_ptr<Runner>> Create(LoadedModel& model, const BenchOptions& options, int tokens) {
    auto runner = std::unique_ptr<Runner>(new Runner(model, options));
    KvConfig config;
    config.max_sequences = options.batch;
    config.max_step_rows = std::max(options.max_step_tokens, options.batch);
    const KvShape shape = model.decoder->kv_shape();
    // A third more for page slack, and a few slabs for the page classes.
    const PageFormat format = model.backend->Info().dense_format;
    const int64_t entry_bytes = CodecBytes(format.key, shape.head_dim) + CodecBytes(format.value, shape.head_dim);
    const int64_t per_token = shape.num_layers * shape.num_kv_heads * entry_bytes;
    config.device_bytes = options.batch * (per_token * (tokens + 64)) / 3 * 4 + 16 * kSlabBytes;
    auto cache = KvCache::Create(config, shape, *model.backend);
    if (!cache.ok()) return cache.status();
    runner->cache_ = *std::move(cache);
    return runner;
  }

  absl::Status Open() {
    for (int i = 0; i < options_.batch; ++i) {
      auto seq = cache_->Open();
      if (!seq.ok()) return seq.status();
      seqs_.push_back(*seq);
    }
    return absl::OkStatus();
  }
  void Close() {
    for (const SeqId seq : seqs_) cache_->Close(seq);
    seqs_.clear();
  }

  // One step: `prompt` rows of sequence `index`, or one decode row of every sequence (index < 0).
  absl::Status Step(int index, int prompt_rows) {
    std::vector<KvStepItem> items;
    if (index >= 0) {
      items.push_back({seqs_[index], prompt_rows, 0, false});
    } else {
      for (const SeqId seq : seqs_) items.push_back({seq, 0, 1, false});
    }
    const int rows = index >= 0 ? prompt_rows : options_.batch;
    ids_ = RandomTokens(rows, model_.config.vocab_size, ++seed_);
    logit_rows_.resize(index >= 0 ? 1 : rows);
    std::iota(logit_rows_.begin(), logit_rows_.end(), index >= 0 ? rows - 1 : 0);
    logits_.resize(logit_rows_.size() * static_cast<size_t>(model_.config.vocab_size));
    absl::Status reserved = cache_->Reserve(items, &batch_);
    if (!reserved.ok()) return reserved;
    DecoderStep step;
    step.ids = MakeTensor(ids_.data(), DType::kI32, rows);
    step.cache = cache_.get();
    step.batch = &batch_;
    step.logit_rows = MakeTensor(logit_rows_.data(), DType::kI32, static_cast<int64_t>(logit_rows_.size()));
    step.logits = MakeTensor(logits_.data(), DType::kF32, static_cast<int64_t>(logit_rows_.size()), model_.config.vocab_size);
    model_.decoder->Forward(step, *stream_);
    cache_->Commit(batch_, *stream_);
    stream_->Synchronize();
    return absl::OkStatus();
  }

  absl::Status Prefill(int index, int tokens) {
    for (int done = 0; done < tokens;) {
      const int rows = std::min(options_.max_step_tokens, tokens - done);
      absl::Status status = Step(index, rows);
      if (!status.ok()) return status;
      done += rows;
    }
    return absl::OkStatus();
  }

  double ReadBytesPerStep() const {
    double bytes = static_cast<double>(model_.decoder->weight_bytes_per_step());
    for (const SeqId seq : seqs_) bytes += static_cast<double>(cache_->Report(seq).read_bytes_per_token);
    return bytes;
  }

 private:
  Runner(LoadedModel& model, const BenchOptions& options) : model_(model), options_(options), stream_(model.backend->NewStream()) {}

  LoadedModel& model_;
  const BenchOptions options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
  std::vector<SeqId> seqs_;
  std::vector<int32_t> ids_, logit_rows_;
  std::vector<float> logits_;
  uint32_t seed_ = 0;
};

// `limit_before` was measured before the run. A neighbour that slows one of the two measurements does not slow both.
void FillRates(BenchResult* result, double limit_before, int num_threads) {
  result->limit_gbps = std::max(limit_before, MeasureReadBandwidth(num_threads));
  result->gbps = result->bytes / result->time_us / 1e3;
  result->share_of_limit = result->gbps / result->limit_gbps;
}

absl::Status CheckContext(int context, int tokens, int max_context) {
  if (int64_t{context} + tokens <= max_context) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--context ", context, " and ", tokens, " generated tokens are ",
                                                 int64_t{context} + tokens, " positions; the context holds ", max_context));
}

}  // namespace

double MeasureReadBandwidth(int num_threads) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  std::vector<uint64_t> buffer(kBytes / 8, 1);
  std::vector<uint64_t> sums(static_cast<size_t>(num_threads) * 8);
  const auto pass = [&](int thread) {
    const size_t begin = buffer.size() * thread / num_threads, end = buffer.size() * (thread + 1) / num_threads;
    uint64_t lanes[16] = {};
    for (size_t i = begin; i + 16 <= end; i += 16) {
      __builtin_prefetch(buffer.data() + i + 512);
      __builtin_prefetch(buffer.data() + i + 520);
      for (size_t lane = 0; lane < 16; ++lane) lanes[lane] += buffer[i + lane];
    }
    sums[thread * 8] = std::accumulate(std::begin(lanes), std::end(lanes), uint64_t{0});
  };
  double best = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    const double start = Seconds();
    std::vector<std::thread> threads;
    for (int t = 1; t < num_threads; ++t) threads.emplace_back(pass, t);
    pass(0);
    for (std::thread& thread : threads) thread.join();
    best = std::max(best, kBytes / (Seconds() - start) / 1e9);
  }
  return best;
}

absl::StatusOr<BenchResult> BenchDecode(LoadedModel& model, const BenchOptions& options) {
  // A step warms up before the measured ones.
  if (absl::Status s = CheckContext(options.context, options.tokens + 1, model.config.max_context); !s.ok()) return s;
  const int num_threads = model.backend->Info().num_threads;
  const double limit_before = MeasureReadBandwidth(num_threads);
  auto runner = Runner::Create(model, options, options.context + options.tokens + 1);
  if (!runner.ok()) return runner.status();
  BenchResult result;
  result.name = "decode";
  std::vector<double> steps;
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    absl::Status status = (*runner)->Open();
    for (int i = 0; i < options.batch && status.ok() && options.context > 0; ++i) status = (*runner)->Prefill(i, options.context);
    if (status.ok()) status = (*runner)->Step(-1, 0);  // warm-up
    const double start = Seconds();
    for (int i = 0; i < options.tokens && status.ok(); ++i) status = (*runner)->Step(-1, 0);
    if (!status.ok()) return status;
    steps.push_back((Seconds() - start) / options.tokens);
    result.bytes = (*runner)->ReadBytesPerStep();
    (*runner)->Close();
  }
  const double step = Median(steps);
  result.time_us = step * 1e6;
  result.flops = options.batch * FlopsOfRow(model.config, options.context + options.tokens / 2.0, true);
  result.tokens_per_s = options.batch / step;
  FillRates(&result, limit_before, num_threads);
  return result;
}

absl::StatusOr<BenchResult> BenchPrefill(LoadedModel& model, const BenchOptions& options) {
  if (options.context <= 0) return absl::InvalidArgumentError("bench prefill needs --context N with N > 0");
  if (absl::Status s = CheckContext(options.context, 0, model.config.max_context); !s.ok()) return s;
  const int num_threads = model.backend->Info().num_threads;
  const double limit_before = MeasureReadBandwidth(num_threads);
  auto runner = Runner::Create(model, options, options.context);
  if (!runner.ok()) return runner.status();
  std::vector<double> times;
  for (int repeat = 0; repeat <= options.repeat; ++repeat) {  // the first is the warm-up
    absl::Status status = (*runner)->Open();
    const double start = Seconds();
    for (int i = 0; i < options.batch && status.ok(); ++i) status = (*runner)->Prefill(i, options.context);
    if (!status.ok()) return status;
    if (repeat > 0) times.push_back(Seconds() - start);
    (*runner)->Close();
  }
  BenchResult result;
  result.name = "prefill";
  const double time = Median(times);
  const int chunks = (options.context + options.max_step_tokens - 1) / options.max_step_tokens;
  result.time_us = time * 1e6;
  result.tokens_per_s = double(options.batch) * options.context / time;
  result.flops = double(options.batch) * options.context * FlopsOfRow(model.config, options.context / 2.0, false);
  result.bytes = double(options.batch) * chunks * static_cast<double>(model.decoder->weight_bytes_per_step());
  FillRates(&result, limit_before, num_threads);
  return result;
}

absl::StatusOr<BenchResult> BenchServe(LoadedModel model, EngineConfig config, const BenchOptions& options) {
  const int vocab_size = model.config.vocab_size;
  const int prompt = std::max(1, options.context);
  auto engine = Engine::Create(config, std::move(model));
  if (!engine.ok()) return engine.status();
  if (absl::Status s = CheckContext(prompt, options.tokens, (*engine)->max_context()); !s.ok()) return s;
  std::vector<double> totals, first_tokens;
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    std::vector<std::shared_ptr<ResponseStream>> streams;
    const double start = Seconds();
    for (int i = 0; i < options.batch; ++i) {
      Request request;
      request.id = absl::StrCat("bench-", repeat, "-", i);
      request.prompt = RandomTokens(prompt, vocab_size, static_cast<uint32_t>(repeat * 1000 + i));
      request.sampling.temperature = 0;
      request.sampling.max_tokens = options.tokens;
      request.sampling.ignore_eos = true;
      request.arrival = std::chrono::steady_clock::now();
      auto stream = (*engine)->Submit(std::move(request));
      if (!stream.ok()) return stream.status();
      streams.push_back(*std::move(stream));
    }
    for (const auto& stream : streams) {
      while (!stream->done()) {
        const auto event = stream->WaitNext(std::chrono::steady_clock::now() + std::chrono::seconds(1));
        if (const auto* finished = event ? std::get_if<Finished>(&*event) : nullptr) {
          if (!finished->error.ok()) return finished->error;
          first_tokens.push_back(finished->timings.first_token * 1e3);
        }
      }
    }
    totals.push_back(Seconds() - start);
  }
  BenchResult result;
  result.name = "serve";
  const double time = Median(totals);
  result.time_us = time * 1e6;
  result.tokens_per_s = double(options.batch) * options.tokens / time;
  result.first_token_ms_p50 = Percentile(first_tokens, 0.5);
  result.first_token_ms_p95 = Percentile(first_tokens, 0.95);
  return result;
}

}  // namespace loupe
