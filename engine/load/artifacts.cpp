#include "engine/load/artifacts.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/load/hash.h"
#include "engine/load/model_path.h"
#include "engine/load/profile_file.h"
#include "engine/load/read_text.h"
#include "engine/load/strategy_file.h"

namespace loupe {
namespace {

namespace fs = std::filesystem;

absl::Status Mismatch(const std::string& field, const std::string& in_file, const std::string& in_model) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": is ", in_file, ", the model's is ", in_model,
                                                 "; an artifact fits only the weights that it was calibrated on"));
}

// The weights of the model under load, hashed when the first artifact asks.
class Target {
 public:
  explicit Target(const ModelFile& model) : model_(model) {}

  template <class Artifact>
  absl::Status Check(const Artifact& artifact) {
    const ModelConfig& c = model_.config;
    if (artifact.num_layers != c.num_layers) {
      return Mismatch("model.layers", absl::StrCat(artifact.num_layers), absl::StrCat(c.num_layers));
    }
    if (artifact.num_kv_heads != c.num_kv_heads) {
      return Mismatch("model.kv_heads", absl::StrCat(artifact.num_kv_heads), absl::StrCat(c.num_kv_heads));
    }
    if (artifact.head_dim != c.head_dim) return Mismatch("model.head_dim", absl::StrCat(artifact.head_dim), absl::StrCat(c.head_dim));
    if (hash_.empty()) hash_ = HashWeights(model_.file, model_.gguf);
    return artifact.weights_hash == hash_ ? absl::OkStatus() : Mismatch("model.weights_hash", artifact.weights_hash, hash_);
  }

 private:
  const ModelFile& model_;
  std::string hash_;
};

// Adds the artifact if it fits. Shipped ones that do not fit are left out.
template <class Artifact>
absl::Status Add(absl::StatusOr<Artifact> read, bool shipped, Target& target, std::vector<std::shared_ptr<const Artifact>>* all) {
  if (!read.ok()) return read.status();
  for (const auto& other : *all) {
    if (other->name != read->name) continue;
    return absl::InvalidArgumentError(absl::StrCat("another one is called ", read->name, " too; rename one of them"));
  }
  const absl::Status fits = target.Check(*read);
  if (!fits.ok()) return shipped ? absl::OkStatus() : fits;
  all->push_back(std::make_shared<const Artifact>(*std::move(read)));
  return absl::OkStatus();
}

absl::Status LoadFile(const std::string& path, bool shipped, const Artifacts& given, Target& target, Artifacts* out) {
  const auto text = ReadText("artifact", path);
  if (!text.ok()) return text.status();
  const std::string name = fs::path(path).stem().string();
  absl::Status status;
  if (KindOfArtifact(*text) == kProfileKind) {
    if (!shipped || given.profiles.empty()) status = Add(ParseProfile(*text, name), shipped, target, &out->profiles);
  } else if (!shipped || given.strategies.empty()) {
    status = Add(ParseStrategy(*text, name), shipped, target, &out->strategies);
  }
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("artifact ", path, ": ", std::string(status.message())));
}

}  // namespace

std::string KindOfArtifact(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  return json.is_object() && json.contains("kind") && json["kind"].is_string() ? json["kind"].get<std::string>() : "";
}

std::string HashWeights(const MappedFile& file, const Gguf& gguf) {
  uint64_t hash = kHashStart;
  for (const GgufTensor& tensor : gguf.tensors()) {
    hash = HashWords(file.bytes().substr(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes)),
                     HashWords(tensor.name, hash));
  }
  return absl::StrFormat("%016x", hash);
}

absl::StatusOr<std::string> HashWeights(const std::string& model_path) {
  auto file = OpenModelFile(model_path);
  if (!file.ok()) return file.status();
  const auto gguf = Gguf::Parse((*file)->bytes());
  if (!gguf.ok()) return gguf.status();
  return HashWeights(**file, *gguf);
}

absl::StatusOr<Artifacts> LoadArtifacts(const EngineConfig& config, const ModelFile& model) {
  Target target(model);
  Artifacts given;
  for (const std::string& path : config.strategy_files) {
    if (absl::Status s = LoadFile(path, false, {}, target, &given); !s.ok()) return s;
  }
  std::vector<std::string> paths;
  std::error_code none;  // a folder that is not there holds no artifacts
  for (fs::directory_iterator it(fs::path(config.artifact_folder), none), end; !none && it != end; it.increment(none)) {
    if (it->path().extension() == ".json") paths.push_back(it->path().string());
  }
  std::sort(paths.begin(), paths.end());
  Artifacts all = given;
  for (const std::string& path : paths) {
    if (absl::Status s = LoadFile(path, true, given, target, &all); !s.ok()) return s;
  }
  return all;
}

}  // namespace loupe
