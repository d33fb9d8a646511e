#include "engine/load/load_model.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/load/gguf.h"
#include "engine/load/gguf_model.h"
#include "engine/load/mapped_file.h"
#include "engine/load/model_path.h"

namespace loupe {
namespace {

// The same status with the file's name before its message.
absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("'", path, "': ", std::string(status.message())));
}

absl::Status LoadText(const Gguf& gguf, const EngineConfig& engine_config, LoadedModel* model) {
  absl::StatusOr<Vocabulary> vocabulary = ReadVocabulary(gguf);
  if (!vocabulary.ok()) return vocabulary.status();
  if (absl::Status s = CheckVocabularySize(model->config, *vocabulary); !s.ok()) return s;
  ChatTemplateContext context;
  const auto token = [&](int32_t id) { return id < 0 ? std::string() : vocabulary->tokens[static_cast<size_t>(id)]; };
  context.bos_token = token(vocabulary->bos);
  context.eos_token = token(vocabulary->eos);
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = MakeTokenizer(*std::move(vocabulary));
  if (!tokenizer.ok()) return tokenizer.status();
  model->tokenizer = *std::move(tokenizer);

  // A template of the operator's that does not parse is a mistake to be told at once; the file's own only costs chat.
  const bool replaced = !engine_config.chat_template.empty();
  absl::StatusOr<std::string> source = replaced ? engine_config.chat_template : ReadChatTemplate(gguf);
  if (source.ok() && source->empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ChatTemplate>> parsed =
      source.ok() ? ChatTemplate::Parse(*source, context)
                  : absl::StatusOr<std::unique_ptr<ChatTemplate>>(source.status());
  if (parsed.ok()) {
    model->chat_template = *std::move(parsed);
  } else if (replaced) {
    return absl::InvalidArgumentError(
        absl::StrCat("the given chat template: ", std::string(parsed.status().message())));
  } else {
    model->chat_template_error = std::string(parsed.status().message());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFile>> OpenModelFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path,
                     "' is a directory; Hugging Face directories are not read by this version, "
                     "give the path of a GGUF file"));
  }
  if (path.ends_with(".safetensors")) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': safetensors files are not read by this version, give the path of a GGUF file"));
  }
  return MappedFile::Open(path);
}

absl::Status CheckVocabularySize(const ModelConfig& config, const Vocabulary& vocabulary) {
  if (static_cast<int64_t>(vocabulary.tokens.size()) == config.vocab_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("key 'tokenizer.ggml.tokens' has ", vocabulary.tokens.size(),
                                                 " tokens, but tensor 'token_embd.weight' has ", config.vocab_size,
                                                 " rows"));
}

absl::StatusOr<LoadedModel> LoadModel(const std::string& path, const EngineConfig& config,
                                      const std::function<void(double)>& progress) {
  absl::StatusOr<std::unique_ptr<MappedFile>> file = OpenModelFile(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Gguf> gguf = Gguf::Parse((*file)->bytes());
  if (!gguf.ok()) return InFile(path, gguf.status());

  LoadedModel model;
  model.file_bytes = (*file)->size();
  absl::StatusOr<ModelConfig> read = ReadModelConfig(*gguf, (*file)->bytes());
  if (!read.ok()) return InFile(path, read.status());
  model.config = *std::move(read);
  if (absl::Status s = CheckTensors(*gguf, model.config); !s.ok()) return InFile(path, s);
  if (absl::Status s = LoadText(*gguf, config, &model); !s.ok()) return InFile(path, s);
  auto artifacts = LoadArtifacts(config, {**file, *gguf, model.config});
  if (!artifacts.ok()) return artifacts.status();
  model.artifacts = *std::move(artifacts);

  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeBackend(config.backend);
  if (!backend.ok()) return backend.status();
  model.backend = *std::move(backend);
  const GgufWeightSource source(*gguf, **file);
  absl::StatusOr<std::unique_ptr<Decoder>> decoder =
      Decoder::Create(model.config, source, *model.backend, config.max_step_tokens, progress);
  if (!decoder.ok()) return InFile(path, decoder.status());
  model.decoder = *std::move(decoder);
  return model;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> file = OpenModelFile(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Gguf> gguf = Gguf::Parse((*file)->bytes());
  if (!gguf.ok()) return InFile(path, gguf.status());
  absl::StatusOr<Vocabulary> vocabulary = ReadVocabulary(*gguf);
  if (!vocabulary.ok()) return InFile(path, vocabulary.status());
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = MakeTokenizer(*std::move(vocabulary));
  if (!tokenizer.ok()) return InFile(path, tokenizer.status());
  return tokenizer;
}

}  // namespace loupe
