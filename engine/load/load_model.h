// From a path to everything the engine needs of a model: configuration, packed weights behind the forward pass,
// tokenizer, chat template. The file is mapped while it is read and unmapped afterwards.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_config.h"
#include "engine/load/artifacts.h"
#include "engine/model/decoder.h"
#include "engine/model/model_config.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "kernels/backend.h"

namespace loupe {

struct LoadedModel {
  ModelConfig config;
  std::unique_ptr<Backend> backend;  // declared first of the owners: everything below was made from it
  std::unique_ptr<Decoder> decoder;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;  // null if the model has none
  std::string chat_template_error;              // why, if it has one that we refuse
  int64_t file_bytes = 0;
  Artifacts artifacts;  // made for this model
};

// `progress` gets the share of bytes packed so far, 0 to 1; may be empty. INVALID_ARGUMENT: the file is broken or not
// supported, naming the key or tensor; NOT_FOUND: no such file.
absl::StatusOr<LoadedModel> LoadModel(const std::string& path, const EngineConfig& config,
                                      const std::function<void(double)>& progress = {});

// The tokenizer alone, without packing a weight; also of files whose architecture is not supported. Errors as LoadModel's.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& path);

}  // namespace loupe
