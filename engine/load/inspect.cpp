#include "engine/load/inspect.h"

#include "absl/strings/str_cat.h"
#include "engine/load/gguf.h"
#include "engine/load/gguf_model.h"
#include "engine/load/mapped_file.h"
#include "engine/load/model_path.h"
#include "engine/model/weights.h"
#include "engine/text/tokenizer.h"
#include "kernels/page_layout.h"
#include "kernels/spherical.h"
#include "kvcache/page_format.h"

namespace loupe {
namespace {

// A number under "<architecture>.<key>", 0 if it is missing, or no number: this is for files of any architecture.
int64_t NumberOf(const Gguf& gguf, const std::string& architecture, const char* key) {
  return gguf.IntOr(absl::StrCat(architecture, ".", key), 0, 0, int64_t{1} << 40).value_or(0);
}

std::string PlainText(const Gguf& gguf, const char* key) {
  const std::string text = gguf.StringOr(key, "").value_or("");
  return IsUtf8(text) ? text : QuoteName(text);
}

void SumUp(const Gguf& gguf, ModelSummary* summary) {
  summary->format = absl::StrCat("gguf v", gguf.version());
  const std::string architecture = PlainText(gguf, "general.architecture");
  summary->architecture = architecture;
  summary->name = PlainText(gguf, "general.name");
  summary->layers = NumberOf(gguf, architecture, "block_count");
  summary->width = NumberOf(gguf, architecture, "embedding_length");
  summary->feed_forward = NumberOf(gguf, architecture, "feed_forward_length");
  summary->heads = NumberOf(gguf, architecture, "attention.head_count");
  summary->kv_heads = NumberOf(gguf, architecture, "attention.head_count_kv");
  if (summary->kv_heads == 0) summary->kv_heads = summary->heads;
  summary->head_dim = NumberOf(gguf, architecture, "attention.key_length");
  if (summary->head_dim == 0 && summary->heads > 0) summary->head_dim = summary->width / summary->heads;
  summary->context = NumberOf(gguf, architecture, "context_length");
  if (const GgufTensor* embedding = gguf.FindTensor("token_embd.weight")) summary->vocab = embedding->shape[1];
  summary->tied_embeddings = !gguf.FindTensor("output.weight");
  const std::string pre = PlainText(gguf, "tokenizer.ggml.pre");
  summary->tokenizer = PlainText(gguf, "tokenizer.ggml.model");
  if (!pre.empty()) summary->tokenizer += "/" + pre;
  summary->chat_template = gguf.Find("tokenizer.chat_template") != nullptr;
  for (const GgufTensor& t : gguf.tensors()) {
    TensorTypeSummary& type = summary->tensor_types[t.type->name];
    ++type.count;
    type.bytes += t.bytes;
    if (t.name != "rope_freqs.weight") summary->parameters += t.elements;
  }
}

// Everything that loading checks, but for the chat template: a model whose template is refused still completes text.
absl::Status CheckServable(const Gguf& gguf, const MappedFile& file, ModelConfig* config) {
  absl::StatusOr<ModelConfig> read = ReadModelConfig(gguf, file.bytes());
  if (!read.ok()) return read.status();
  *config = *read;
  if (absl::Status s = CheckTensors(gguf, *config); !s.ok()) return s;
  if (absl::Status s = CheckWeights(*config, GgufWeightSource(gguf, file)); !s.ok()) return s;
  absl::StatusOr<Vocabulary> vocabulary = ReadVocabulary(gguf);
  if (!vocabulary.ok()) return vocabulary.status();
  if (absl::Status s = CheckVocabularySize(*config, *vocabulary); !s.ok()) return s;
  return MakeTokenizer(*std::move(vocabulary)).status();
}

}  // namespace

absl::StatusOr<ModelSummary> InspectModel(const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> file = OpenModelFile(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Gguf> gguf = Gguf::Parse((*file)->bytes());
  if (!gguf.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "': ", std::string(gguf.status().message())));
  }
  ModelSummary summary;
  summary.file_bytes = (*file)->size();
  SumUp(*gguf, &summary);
  ModelConfig config;
  const absl::Status servable = CheckServable(*gguf, **file, &config);
  summary.supported = servable.ok();
  if (!servable.ok()) summary.reason = std::string(servable.message());
  if (config.head_dim > 0) {
    summary.kv_bytes_per_token =
        2 * CodecBytes(Codec::kDense, config.head_dim) * config.num_layers * config.num_kv_heads;
    for (const char* name : {"dense", "s8", "s4", "s3", "s2"}) {
      const PageFormat format = *FormatByName(name, PageFormat{});
      if (IsCoded(format) && config.head_dim % spherical::kDimStep != 0) continue;
      summary.kv_bytes_per_token_by_format[name] = EntryBytes(format, config.head_dim) * config.num_layers * config.num_kv_heads;
    }
  }
  return summary;
}

}  // namespace loupe
