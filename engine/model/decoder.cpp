#include "engine/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/weights.h"
#include "kernels/check.h"

namespace loupe {
namespace {

struct Layer {
  std::unique_ptr<Weight> qkv, attention_out, gate_up, down;  // query, key, value stacked by rows; so are gate and up
  Tensor attention_norm, feed_forward_norm;                   // [E]
};

constexpr int64_t kFirstPreparedRows = 16;  // products of fewer rows need no choice

int64_t AlignLine(int64_t floats) { return (floats + 15) / 16 * 16; }

// Packs weights one by one, gives the pages of the file back behind itself and says how far it has come.
class Packer {
 public:
  Packer(const ModelConfig& config, const WeightSource& source, Backend& backend,
         const std::function<void(double)>& progress)
      : source_(source), backend_(backend), stream_(backend.NewStream()), progress_(progress) {
    for (const TensorSpec& spec : ExpectedTensors(config)) total_bytes_ += HostMatrixBytes(*source.Find(spec.name));
  }

  absl::StatusOr<std::unique_ptr<Weight>> Pack(const std::vector<std::string>& names) {
    std::vector<HostMatrix> parts;
    for (const std::string& name : names) parts.push_back(*source_.Find(name));
    absl::StatusOr<std::unique_ptr<Weight>> weight = backend_.PackWeight(parts);
    if (!weight.ok()) {
      return absl::Status(weight.status().code(),
                          absl::StrCat("tensor '", names[0], "': ", std::string(weight.status().message())));
    }
    weight_bytes_ += (*weight)->bytes();
    for (const std::string& name : names) Done(name);
    return weight;
  }

  void CopyVector(const std::string& name, const Tensor& out) {
    const std::vector<float> values = ReadVector(*source_.Find(name));
    LOUPE_CHECK_EQ(static_cast<int64_t>(values.size()), out.shape[0]);
    backend_.Copy(out.data, values.data(), static_cast<int64_t>(values.size() * sizeof(float)), *stream_);
    Done(name);
  }

  int64_t weight_bytes() const { return weight_bytes_; }

 private:
  void Done(const std::string& name) {
    packed_bytes_ += HostMatrixBytes(*source_.Find(name));
    source_.Release(name);
    if (progress_) progress_(static_cast<double>(packed_bytes_) / static_cast<double>(total_bytes_));
  }

  const WeightSource& source_;
  Backend& backend_;
  std::unique_ptr<Stream> stream_;
  const std::function<void(double)>& progress_;
  int64_t total_bytes_ = 0, packed_bytes_ = 0, weight_bytes_ = 0;
};

}  // namespace

struct Decoder::Impl {
  ModelConfig config;
  Backend* backend = nullptr;
  int max_rows = 0;

  std::unique_ptr<Weight> embedding, head;  // head is null when the embedding serves as one
  std::vector<Layer> layers;
  std::unique_ptr<DeviceBuffer> vectors;  // norms and frequencies
  std::unique_ptr<DeviceBuffer> activations;
  Tensor final_norm;   // [E]
  Tensor frequencies;  // [rope_dims / 2]
  int64_t weight_bytes = 0;

  // Activations for max_rows rows; `hidden` is the normed input of a product, `inner` what attention or the gate gives,
  // `gathered` the residual rows that become logits. Residual and gathered are f32, the others what the backend likes.
  Tensor residual, hidden, qkv, inner, gate_up, gathered;

  int64_t QRows() const { return int64_t{config.num_heads} * config.head_dim; }
  int64_t KvRows() const { return int64_t{config.num_kv_heads} * config.head_dim; }

  absl::Status TakeVectors();
  absl::Status TakeActivations();
  absl::Status PackAll(Packer& packer);
  absl::Status Prepare();
  int64_t ResidualBytes(int64_t rows) const {
    return ((rows - 1) * residual.row_stride + config.width) * DTypeBytes(residual.dtype);
  }
  void Attention(const Layer& layer, int index, const DecoderStep& step, Stream& stream);
  void FeedForward(const Layer& layer, const DecoderStep& step, Stream& stream);
  void Logits(const DecoderStep& step, Stream& stream);
};

namespace {

// The first `rows` rows of a buffer.
Tensor Rows(Tensor buffer, int64_t rows) {
  buffer.shape[0] = rows;
  return buffer;
}

// Columns [first, first + heads * head_dim) of a buffer as [rows, heads, head_dim].
Tensor Heads(const Tensor& buffer, int64_t rows, int64_t first, int heads, int head_dim) {
  Tensor view = MakeTensor(buffer.as<char>() + first * DTypeBytes(buffer.dtype), buffer.dtype, rows, heads, head_dim);
  view.rank = 3;
  view.row_stride = buffer.row_stride;
  return view;
}

Tensor Matrix(void* data, DType type, int64_t rows, int64_t cols) {
  Tensor t = MakeTensor(data, type, rows, cols);
  t.rank = 2;
  return t;
}

}  // namespace

absl::Status Decoder::Impl::TakeVectors() {
  const int64_t norm = AlignLine(config.width);
  const int64_t half = config.rope_dims / 2;
  const int64_t floats = norm * (2 * config.num_layers + 1) + half;
  auto buffer = backend->Allocate(floats * int64_t{sizeof(float)});
  if (!buffer.ok()) return buffer.status();
  vectors = std::move(*buffer);
  auto* data = static_cast<float*>(vectors->data());
  const auto take = [&](int64_t size, int64_t stride) {
    const Tensor t = MakeTensor(data, DType::kF32, size);
    data += stride;
    return t;
  };
  layers.resize(static_cast<size_t>(config.num_layers));
  for (Layer& layer : layers) {
    layer.attention_norm = take(config.width, norm);
    layer.feed_forward_norm = take(config.width, norm);
  }
  final_norm = take(config.width, norm);
  frequencies = take(half, half);
  std::vector<float> angles(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / config.rope_dims;
    const double factor =
        config.rope_factors.empty() ? 1.0 : static_cast<double>(config.rope_factors[static_cast<size_t>(i)]);
    angles[static_cast<size_t>(i)] = static_cast<float>(std::pow(static_cast<double>(config.rope_base), exponent) / factor);
  }
  const std::unique_ptr<Stream> stream = backend->NewStream();
  backend->Copy(frequencies.data, angles.data(), half * int64_t{sizeof(float)}, *stream);
  return stream->Synchronize();
}

absl::Status Decoder::Impl::TakeActivations() {
  const DType type = backend->Info().activations;
  const int64_t size = DTypeBytes(type);
  const int64_t width = AlignLine(config.width);
  const int64_t qkv_cols = AlignLine(QRows() + 2 * KvRows());
  const int64_t inner_cols = AlignLine(std::max<int64_t>(QRows(), config.feed_forward));
  const int64_t gate_up_cols = AlignLine(2 * int64_t{config.feed_forward});
  // QKV is dead when gate and up are written, and both are when rows are gathered, so they share memory.
  const int64_t shared_bytes = std::max(std::max(qkv_cols, gate_up_cols) * size, width * int64_t{sizeof(float)});
  const int64_t row_bytes = width * (int64_t{sizeof(float)} + size) + inner_cols * size + shared_bytes;
  auto buffer = backend->Allocate(max_rows * row_bytes);
  if (!buffer.ok()) return buffer.status();
  activations = std::move(*buffer);
  auto* data = static_cast<char*>(activations->data());
  residual = Matrix(data, DType::kF32, max_rows, config.width);
  data += max_rows * width * int64_t{sizeof(float)};
  hidden = Matrix(data, type, max_rows, config.width);
  data += max_rows * width * size;
  inner = Matrix(data, type, max_rows, inner_cols);
  data += max_rows * inner_cols * size;
  qkv = Matrix(data, type, max_rows, QRows() + 2 * KvRows());
  gate_up = Matrix(data, type, max_rows, 2 * int64_t{config.feed_forward});
  gathered = Matrix(data, DType::kF32, max_rows, config.width);
  return absl::OkStatus();
}

absl::Status Decoder::Impl::PackAll(Packer& packer) {
  const auto pack = [&](const std::vector<std::string>& names, std::unique_ptr<Weight>* out) {
    auto weight = packer.Pack(names);
    if (weight.ok()) *out = std::move(*weight);
    return weight.status();
  };
  if (absl::Status s = pack({"token_embd.weight"}, &embedding); !s.ok()) return s;
  for (int i = 0; i < config.num_layers; ++i) {
    const auto name = [i](const char* part) { return LayerTensorName(i, part); };
    Layer& layer = layers[static_cast<size_t>(i)];
    packer.CopyVector(name("attn_norm"), layer.attention_norm);
    if (absl::Status s = pack({name("attn_q"), name("attn_k"), name("attn_v")}, &layer.qkv); !s.ok()) return s;
    if (absl::Status s = pack({name("attn_output")}, &layer.attention_out); !s.ok()) return s;
    packer.CopyVector(name("ffn_norm"), layer.feed_forward_norm);
    if (absl::Status s = pack({name("ffn_gate"), name("ffn_up")}, &layer.gate_up); !s.ok()) return s;
    if (absl::Status s = pack({name("ffn_down")}, &layer.down); !s.ok()) return s;
  }
  packer.CopyVector("output_norm.weight", final_norm);
  if (config.tied_embeddings) return absl::OkStatus();
  return pack({"output.weight"}, &head);
}

// One layer stands for all: their shapes are the same. Whatever is in the buffers may be lost.
absl::Status Decoder::Impl::Prepare() {
  if (backend->Info().host_memory) return absl::OkStatus();
  const std::unique_ptr<Stream> stream = backend->NewStream();
  const Layer& layer = layers[0];
  for (int64_t rows = kFirstPreparedRows;; rows *= 2) {
    rows = std::min<int64_t>(rows, max_rows);
    const auto product = [&](const Weight* weight, const Tensor& x, const Tensor& out, bool add) {
      MatMulArgs args;
      args.weight = weight;
      args.x = x;
      args.out = Rows(out, rows);
      if (add) args.add = args.out;
      backend->Prepare(args, *stream);
    };
    product(layer.qkv.get(), Rows(hidden, rows), qkv, false);
    product(layer.attention_out.get(), Matrix(inner.data, inner.dtype, rows, QRows()), residual, true);
    product(layer.gate_up.get(), Rows(hidden, rows), gate_up, false);
    product(layer.down.get(), Matrix(inner.data, inner.dtype, rows, config.feed_forward), residual, true);
    if (rows == max_rows) return stream->Synchronize();
  }
}

void Decoder::Impl::Attention(const Layer& layer, int index, const DecoderStep& step, Stream& stream) {
  const int64_t rows = step.ids.rows();
  const int prompt_rows = step.batch->prompt_rows;
  const int head_dim = config.head_dim;
  MatMulArgs product;
  product.weight = layer.qkv.get();
  product.x = Rows(hidden, rows);
  product.norm = {Rows(residual, rows), layer.attention_norm, config.norm_eps, product.x};
  product.out = Rows(qkv, rows);
  product.prompt_rows = prompt_rows;
  backend->MatMul(product, stream);

  const Tensor q = Heads(qkv, rows, 0, config.num_heads, head_dim);
  const Tensor k = Heads(qkv, rows, QRows(), config.num_kv_heads, head_dim);
  const Tensor v = Heads(qkv, rows, QRows() + KvRows(), config.num_kv_heads, head_dim);
  step.cache->Append(*step.batch, index, k, v, stream, {q, {}, frequencies, 1.0f, config.rope_interleaved});
  const Tensor attended = Matrix(inner.data, inner.dtype, rows, QRows());
  step.cache->Attend(*step.batch, index, q, Heads(attended, rows, 0, config.num_heads, head_dim), stream);

  MatMulArgs out;
  out.weight = layer.attention_out.get();
  out.x = attended;
  out.add = out.out = Rows(residual, rows);
  out.prompt_rows = prompt_rows;
  backend->MatMul(out, stream);
}

void Decoder::Impl::FeedForward(const Layer& layer, const DecoderStep& step, Stream& stream) {
  const int64_t rows = step.ids.rows();
  MatMulArgs product;
  product.weight = layer.gate_up.get();
  product.x = Rows(hidden, rows);
  product.norm = {Rows(residual, rows), layer.feed_forward_norm, config.norm_eps, product.x};
  product.out = Rows(gate_up, rows);
  product.prompt_rows = step.batch->prompt_rows;
  product.gated = Matrix(inner.data, inner.dtype, rows, config.feed_forward);
  backend->MatMul(product, stream);

  MatMulArgs out;
  out.weight = layer.down.get();
  out.x = product.gated;
  out.add = out.out = Rows(residual, rows);
  out.prompt_rows = product.prompt_rows;
  backend->MatMul(out, stream);
}

void Decoder::Impl::Logits(const DecoderStep& step, Stream& stream) {
  const int64_t rows = step.logit_rows.rows();
  const Tensor wanted_rows = Rows(gathered, rows), normed = Rows(hidden, rows);
  backend->GatherRows({Rows(residual, step.ids.rows()), step.logit_rows, wanted_rows}, stream);
  MatMulArgs product;
  product.norm = {wanted_rows, final_norm, config.norm_eps, normed};
  product.weight = head ? head.get() : embedding.get();
  product.x = normed;
  product.out = step.logits;
  product.prompt_rows = step.logit_prompt_rows;
  if (product.prompt_rows < 0) {
    const auto* wanted = step.logit_rows.as<int32_t>();
    LOUPE_CHECK(std::is_sorted(wanted, wanted + rows)) << "rows whose logits are wanted must ascend";
    product.prompt_rows = static_cast<int>(std::lower_bound(wanted, wanted + rows, step.batch->prompt_rows) - wanted);
  }
  backend->MatMul(product, stream);
}

void AskTargets(const DecoderStep& step, Backend& backend, Stream& stream, const std::function<void(const DecoderStep&)>& logits_of) {
  const PromptTargets& targets = step.targets;
  const int64_t count = targets.rows.rows();
  for (int64_t first = 0; first < count; first += targets.block.rows()) {
    const int64_t rows = std::min(targets.block.rows(), count - first);
    const auto part_of = [&](Tensor t, int64_t row_bytes) {
      t.data = t.as<char>() + first * row_bytes;
      return Rows(t, rows);
    };
    DecoderStep part = step;
    part.logit_rows = part_of(targets.rows, sizeof(int32_t));
    part.logits = Rows(targets.block, rows);
    part.logit_prompt_rows = static_cast<int>(rows);
    logits_of(part);
    if (targets.surprisal.defined()) {
      backend.Surprisal({part.logits, part_of(targets.ids, sizeof(int32_t)), part_of(targets.surprisal, sizeof(float))}, stream);
    }
    if (!targets.choices.defined()) continue;
    SampleArgs choice;
    choice.logits = part.logits;
    choice.logits.shape[1] = targets.vocab_size;
    choice.rows = part_of(targets.choices, sizeof(SampleRow));
    choice.changes = targets.changes;
    choice.out = part_of(targets.chosen, sizeof(SampledRow));
    backend.Sample(choice, stream);
  }
}

Decoder::Decoder() : impl_(std::make_unique<Impl>()) {}
Decoder::~Decoder() = default;

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config, const WeightSource& source,
                                                         Backend& backend, int max_rows,
                                                         const std::function<void(double)>& progress) {
  LOUPE_CHECK(max_rows > 0) << max_rows;
  if (absl::Status s = CheckConfig(config); !s.ok()) return s;
  if (absl::Status s = CheckWeights(config, source); !s.ok()) return s;
  std::unique_ptr<Decoder> decoder(new Decoder());
  Impl& impl = *decoder->impl_;
  impl.config = config;
  impl.backend = &backend;
  impl.max_rows = max_rows;
  if (absl::Status s = impl.TakeVectors(); !s.ok()) return s;
  if (absl::Status s = impl.TakeActivations(); !s.ok()) return s;
  Packer packer(config, source, backend, progress);
  if (absl::Status s = impl.PackAll(packer); !s.ok()) return s;
  impl.weight_bytes = packer.weight_bytes();
  if (absl::Status s = impl.Prepare(); !s.ok()) return s;
  return decoder;
}

void Decoder::Forward(const DecoderStep& step, Stream& stream) {
  Impl& impl = *impl_;
  const int64_t rows = step.ids.rows();
  LOUPE_CHECK(rows > 0 && rows <= impl.max_rows) << rows << " rows of at most " << impl.max_rows;
  LOUPE_CHECK_EQ(rows, step.batch->num_rows) << "rows of ids and batch";
  step.cache->Begin(*step.batch, stream);
  const size_t first = static_cast<size_t>(step.first_layer);
  const int64_t residual_bytes = impl.ResidualBytes(rows);
  if (first == 0) {
    impl.backend->Embed({impl.embedding.get(), step.ids, Rows(impl.residual, rows)}, stream);
    if (step.residuals != nullptr) {
      step.residuals->assign(impl.layers.size(), std::vector<char>(static_cast<size_t>(residual_bytes)));
    }
  } else {
    LOUPE_CHECK(step.residuals != nullptr && first < step.residuals->size()) << "no rows before layer " << first;
    LOUPE_CHECK_EQ(static_cast<int64_t>((*step.residuals)[first].size()), residual_bytes) << "rows of another step";
    impl.backend->Copy(impl.residual.data, (*step.residuals)[first].data(), residual_bytes, stream);
  }
  for (size_t i = first; i < impl.layers.size(); ++i) {
    if (first == 0 && step.residuals != nullptr) {
      impl.backend->Copy((*step.residuals)[i].data(), impl.residual.data, residual_bytes, stream);
    }
    impl.Attention(impl.layers[i], static_cast<int>(i), step, stream);
    impl.FeedForward(impl.layers[i], step, stream);
  }
  if (step.targets.rows.defined()) {
    AskTargets(step, *impl.backend, stream, [&](const DecoderStep& part) { impl.Logits(part, stream); });
  }
  if (!step.logit_rows.defined() || step.logit_rows.rows() == 0) return;
  LOUPE_CHECK_LE(step.logit_rows.rows(), rows) << "rows whose logits are wanted";
  impl.Logits(step, stream);
}

KvShape Decoder::kv_shape() const {
  const ModelConfig& c = impl_->config;
  KvShape shape;
  shape.num_layers = c.num_layers;
  shape.num_heads = c.num_heads;
  shape.num_kv_heads = c.num_kv_heads;
  shape.head_dim = c.head_dim;
  shape.model = c.name.empty() ? c.architecture : c.name;
  shape.windows = c.windows;
  shape.sinks = c.sinks;
  return shape;
}

const ModelConfig& Decoder::config() const { return impl_->config; }
int64_t Decoder::weight_bytes() const { return impl_->weight_bytes + impl_->vectors->bytes(); }

int64_t Decoder::weight_bytes_per_step() const {
  // An embedding table that is not the head as well is read one row at a time.
  const bool whole_table = impl_->head == nullptr;
  return weight_bytes() - (whole_table ? 0 : impl_->embedding->bytes());
}

int64_t Decoder::activation_bytes() const { return impl_->activations->bytes(); }

}  // namespace loupe
