#include "engine/bench/bench.h"

#include <algorithm>
#include <cmath>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"
#include "engine/step_model.h"
#include "kernels/half.h"
#include "kernels/mirrored_buffer.h"
#include "kernels/spherical.h"
#include "kvcache/page_format.h"

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

// Decode steps before the measured ones: on a device the first builds the arrays, the second moves them on, the third is
// recorded.
int WarmUpSteps(const Backend& backend) { return backend.Info().host_memory ? 1 : 3; }

// Multiply-adds of one row through all matrices, and of its attention over `context` entries.
double FlopsOfRow(const ModelConfig& c, double context, bool with_head) {
  const double qkv = double(c.width) * c.head_dim * (c.num_heads + 2 * c.num_kv_heads);
  const double rest = double(c.num_heads) * c.head_dim * c.width + 3.0 * c.width * c.feed_forward;
  const double attention = 2.0 * context * c.num_heads * c.head_dim;
  return 2 * (c.num_layers * (qkv + rest + attention) + (with_head ? double(c.width) * c.vocab_size : 0));
}

// What a token that is kept in a format takes.
int64_t TokenBytes(const LoadedModel& model, const PageFormat& format) {
  const KvShape shape = model.decoder->kv_shape();
  return shape.num_layers * shape.num_kv_heads * EntryBytes(format, shape.head_dim);
}

// Keeps everything in one format.
class InFormat final : public Policy {
 public:
  explicit InFormat(const PageFormat& format) : format_(format) {}
  std::string_view name() const override { return "in one format"; }
  bool keeps_everything() const override { return true; }
  std::optional<PageFormat> landing_format(bool) const override { return format_; }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>*) const override {}
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

 private:
  PageFormat format_;
};

absl::StatusOr<PageFormat> ReadFormat(const std::string& name, const LoadedModel& model) {
  const auto format = FormatByName(name, model.backend->Info().dense_format);
  if (!format) {
    return absl::InvalidArgumentError(absl::StrCat("--format is ", name, ", must be dense, s8, s4, s3, s2, or s4v2 and the like"));
  }
  if (!IsCoded(*format) || model.config.head_dim % spherical::kDimStep == 0) return *format;
  return absl::InvalidArgumentError(absl::StrCat("--format ", name, " needs heads whose size is a multiple of ", spherical::kDimStep,
                                                 "; this model's have ", model.config.head_dim));
}

// Sequences in a cache of their own, fed with random tokens.
class Runner {
 public:
  // Room for sequences of so many tokens, kept in a format.
  static absl::StatusOr<std::unique_ptr<Runner>> Create(LoadedModel& model, const BenchOptions& options, int tokens,
                                                        const PageFormat& format) {
    auto runner = std::unique_ptr<Runner>(new Runner(model, options));
    KvConfig config;
    config.max_sequences = options.batch;
    config.max_step_rows = std::max(options.max_step_tokens, options.batch);
    // A third more for page slack, and a few slabs for the page classes.
    config.device_bytes = options.batch * (TokenBytes(model, format) * (tokens + 64)) / 3 * 4 + 16 * kSlabBytes;
    auto cache = KvCache::Create(config, model.decoder->kv_shape(), *model.backend);
    if (!cache.ok()) return cache.status();
    runner->cache_ = *std::move(cache);
    if (const auto means = model.artifacts.mean_keys(); !means.empty()) {
      if (absl::Status s = runner->cache_->SetMeanKeys(means); !s.ok()) return s;
    }
    return runner;
  }

  absl::Status Open() {
    for (int i = 0; i < options_.batch; ++i) {
      auto seq = cache_->Open(*options_.policy);
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
    const int num_logits = index >= 0 ? 1 : rows;
    Backend& backend = *model_.backend;
    const std::vector<int32_t> ids = RandomTokens(rows, model_.config.vocab_size, ++seed_);
    const double begin = Seconds();
    absl::Status ready = ids_.Ensure(backend, int64_t{4} * rows);
    if (ready.ok()) ready = logit_rows_.Ensure(backend, int64_t{4} * num_logits);
    if (ready.ok()) ready = logits_.Ensure(backend, int64_t{4} * num_logits * model_.config.vocab_size);
    if (ready.ok()) ready = cache_->Reserve(items, &batch_);
    if (!ready.ok()) return ready;
    std::copy(ids.begin(), ids.end(), ids_.host<int32_t>());
    std::iota(logit_rows_.host<int32_t>(), logit_rows_.host<int32_t>() + num_logits, index >= 0 ? rows - 1 : 0);
    ids_.Upload(backend, 0, int64_t{4} * rows, *stream_);
    logit_rows_.Upload(backend, 0, int64_t{4} * num_logits, *stream_);
    DecoderStep step;
    step.ids = MakeTensor(ids_.device<int32_t>(), DType::kI32, rows);
    step.cache = cache_.get();
    step.batch = &batch_;
    step.logit_rows = MakeTensor(logit_rows_.device<int32_t>(), DType::kI32, num_logits);
    step.logit_prompt_rows = index >= 0 ? 1 : 0;
    step.logits = MakeTensor(logits_.device<float>(), DType::kF32, num_logits, model_.config.vocab_size);
    step.logits.rank = 2;
    step_model_->Forward(step, *stream_);
    cache_->Commit(batch_, *stream_);
    host_seconds_ += Seconds() - begin;
    return stream_->Synchronize();
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

  // Random keys and values at once, without a pass: what decode steps then read.
  absl::Status Fill(int index, int tokens) {
    const KvShape shape = model_.decoder->kv_shape();
    Backend& backend = *model_.backend;
    const DType type = backend.Info().activations;
    const int max_rows = options_.max_step_tokens;
    const int64_t values = int64_t{max_rows} * shape.num_kv_heads * shape.head_dim;
    if (absl::Status s = kv_.Ensure(backend, values * DTypeBytes(type)); !s.ok()) return s;
    if (kv_filled_ == 0) {
      std::mt19937 random(7);
      std::normal_distribution<float> normal(0, 1);
      for (int64_t i = 0; i < values; ++i) {
        const float x = normal(random);
        if (type == DType::kF32) {
          kv_.host<float>()[i] = x;
        } else {
          kv_.host<uint16_t>()[i] = FloatToHalf(x);
        }
      }
      kv_.Upload(backend, 0, kv_.bytes(), *stream_);
      kv_filled_ = values;
    }
    for (int done = 0; done < tokens;) {
      const int rows = std::min(max_rows, tokens - done);
      absl::Status s = cache_->Reserve(std::vector<KvStepItem>{{seqs_[index], rows, 0, false}}, &batch_);
      if (!s.ok()) return s;
      Tensor kv = MakeTensor(kv_.device<char>(), type, rows, shape.num_kv_heads, shape.head_dim);
      kv.rank = 3;
      for (int layer = 0; layer < shape.num_layers; ++layer) cache_->Append(batch_, layer, kv, kv, *stream_);
      cache_->Commit(batch_, *stream_);
      if (s = stream_->Synchronize(); !s.ok()) return s;
      done += rows;
    }
    return absl::OkStatus();
  }

  // Since the last call: what the host did before it waited.
  double TakeHostSeconds() { return std::exchange(host_seconds_, 0.0); }
  double ReadBytesPerStep() const {
    double bytes = static_cast<double>(model_.decoder->weight_bytes_per_step());
    for (const SeqId seq : seqs_) bytes += static_cast<double>(cache_->Report(seq).read_bytes_per_token);
    return bytes;
  }

 private:
  Runner(LoadedModel& model, const BenchOptions& options)
      : model_(model),
        options_(options),
        stream_(model.backend->NewStream()),
        step_model_(MakeStepModel(*model.decoder, *model.backend)) {}

  LoadedModel& model_;
  const BenchOptions options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<KvCache> cache_;
  KvBatch batch_;
  std::vector<SeqId> seqs_;
  std::unique_ptr<StepModel> step_model_;
  MirroredBuffer ids_, logit_rows_, logits_, kv_;
  int64_t kv_filled_ = 0;
  double host_seconds_ = 0;
  uint32_t seed_ = 0;
};

// `limit_before` was measured before the run. A neighbour that slows one of the two measurements does not slow both.
absl::Status FillRates(BenchResult* result, double limit_before, Backend& backend) {
  const auto limit = MeasureReadBandwidth(backend);
  if (!limit.ok()) return limit.status();
  result->limit_gbps = std::max(limit_before, *limit);
  result->gbps = result->bytes / result->time_us / 1e3;
  result->share_of_limit = result->gbps / result->limit_gbps;
  return absl::OkStatus();
}

absl::Status CheckContext(int context, int tokens, int max_context) {
  if (int64_t{context} + tokens <= max_context) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--context ", context, " and ", tokens, " generated tokens are ",
                                                 int64_t{context} + tokens, " positions; the context holds ", max_context));
}

}  // namespace

absl::StatusOr<double> MeasureReadBandwidth(Backend& backend) {
  const int64_t bytes = backend.Info().host_memory ? int64_t{256} << 20 : int64_t{4} << 30;
  auto buffer = backend.Allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  const std::unique_ptr<Stream> stream = backend.NewStream();
  // Memory that nobody has written may all be one page of zeros.
  const std::vector<char> block(int64_t{16} << 20, 1);
  const auto block_bytes = static_cast<int64_t>(block.size());
  for (int64_t at = 0; at < bytes; at += block_bytes) {
    backend.Copy(static_cast<char*>((*buffer)->data()) + at, block.data(), block_bytes, *stream);
  }
  double best = 0;
  for (int repeat = 0; repeat < 6; ++repeat) {
    if (absl::Status s = stream->Synchronize(); !s.ok()) return s;
    const double start = Seconds();
    backend.ReadMemory(**buffer, bytes, *stream);
    if (absl::Status s = stream->Synchronize(); !s.ok()) return s;
    best = std::max(best, static_cast<double>(bytes) / (Seconds() - start) / 1e9);
  }
  return best;
}

absl::StatusOr<BenchResult> BenchDecode(LoadedModel& model, const BenchOptions& asked) {
  const auto format = ReadFormat(asked.format, model);
  if (!format.ok()) return format.status();
  const InFormat policy(*format);
  BenchOptions options = asked;
  options.policy = &policy;
  // Steps warm up before the measured ones.
  const int warm_up = WarmUpSteps(*model.backend);
  const int all_tokens = options.tokens + warm_up;
  if (absl::Status s = CheckContext(options.context, all_tokens, model.config.max_context); !s.ok()) return s;
  const auto limit_before = MeasureReadBandwidth(*model.backend);
  if (!limit_before.ok()) return limit_before.status();
  auto runner = Runner::Create(model, options, options.context + all_tokens, *format);
  if (!runner.ok()) return runner.status();
  BenchResult result;
  result.name = "decode";
  std::vector<double> steps;
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    absl::Status status = (*runner)->Open();
    for (int i = 0; i < options.batch && status.ok() && options.context > 0; ++i) status = (*runner)->Fill(i, options.context);
    for (int i = 0; i < warm_up && status.ok(); ++i) status = (*runner)->Step(-1, 0);
    (*runner)->TakeHostSeconds();
    const double start = Seconds();
    for (int i = 0; i < options.tokens && status.ok(); ++i) status = (*runner)->Step(-1, 0);
    result.host_us = (*runner)->TakeHostSeconds() / options.tokens * 1e6;
    if (!status.ok()) return status;
    steps.push_back((Seconds() - start) / options.tokens);
    result.bytes = (*runner)->ReadBytesPerStep();
    (*runner)->Close();
  }
  const double step = Median(steps);
  result.time_us = step * 1e6;
  result.flops = options.batch * FlopsOfRow(model.config, options.context + options.tokens / 2.0, true);
  result.tokens_per_s = options.batch / step;
  if (absl::Status s = FillRates(&result, *limit_before, *model.backend); !s.ok()) return s;
  return result;
}

absl::StatusOr<BenchResult> BenchPrefill(LoadedModel& model, const BenchOptions& options) {
  if (options.context <= 0) return absl::InvalidArgumentError("bench prefill needs --context N with N > 0");
  if (absl::Status s = CheckContext(options.context, 0, model.config.max_context); !s.ok()) return s;
  const auto limit_before = MeasureReadBandwidth(*model.backend);
  if (!limit_before.ok()) return limit_before.status();
  auto runner = Runner::Create(model, options, options.context, model.backend->Info().dense_format);
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
  if (absl::Status s = FillRates(&result, *limit_before, *model.backend); !s.ok()) return s;
  return result;
}

absl::StatusOr<BenchResult> BenchServe(LoadedModel model, EngineConfig config, const BenchOptions& options) {
  const int vocab_size = model.config.vocab_size;
  const int prompt = std::max(1, options.context);
  BenchResult result;
  result.name = "serve";
  // What has to be read and computed, whatever the engine makes of it: full steps for the prompts, one step for all streams
  // a token.
  const double entries = prompt + options.tokens / 2.0;  // of a list while generating, on average
  const double prompt_steps = std::ceil(double(options.batch) * prompt / options.max_step_tokens);
  result.bytes = (prompt_steps + options.tokens - 1) * static_cast<double>(model.decoder->weight_bytes_per_step()) +
                 double(options.batch) * (options.tokens - 1) * entries *
                     static_cast<double>(TokenBytes(model, model.backend->Info().dense_format));
  result.flops = double(options.batch) * (prompt * FlopsOfRow(model.config, prompt / 2.0, false) +
                                          options.tokens * FlopsOfRow(model.config, entries, true));
  const auto limit = MeasureReadBandwidth(*model.backend);
  if (!limit.ok()) return limit.status();
  result.limit_gbps = *limit;
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
  const double time = Median(totals);
  result.time_us = time * 1e6;
  result.gbps = result.bytes / result.time_us / 1e3;
  result.share_of_limit = result.gbps / result.limit_gbps;
  result.tokens_per_s = double(options.batch) * options.tokens / time;
  result.first_token_ms_p50 = Percentile(first_tokens, 0.5);
  result.first_token_ms_p95 = Percentile(first_tokens, 0.95);
  return result;
}

}  // namespace loupe
