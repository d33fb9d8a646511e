// Which policy a request gets, and why. Made once; what it holds never changes, so any thread may ask.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/artifacts.h"
#include "engine/request.h"
#include "kvcache/kv_cache.h"

namespace loupe {

// What the operator says about requests' caches.
struct KvDefaults {
  std::optional<KvOptions> kv;   // for requests that bring no `kv`, and what `auto` may choose beside full
  bool allow_baselines = false;  // policies that only serve as comparison
  Artifacts artifacts = {};      // what policies were calibrated for
};

struct KvChoice {
  std::shared_ptr<const Policy> policy;  // made for the request's prompt
  std::string reason;                    // for the report
  bool may_be_full = false;              // auto: full is taken if it fits when the request comes to the step thread
};

class KvChooser {
 public:
  // `cache` outlives this.
  KvChooser(const KvCache& cache, KvDefaults defaults) : cache_(cache), defaults_(std::move(defaults)) {}

  // INVALID_ARGUMENT: "kv.<field>: <what is wrong, with the limits>".
  absl::StatusOr<KvChoice> Choose(const Request& request) const;
  // Says once and for all whether the operator's own object can be meant, with a long prompt. INVALID_ARGUMENT.
  absl::Status CheckDefaults() const;
  // The last word of `auto`, when it is known what is free: `needed` bytes as a full cache, `free` bytes that are promised
  // to nobody.
  static void Decide(int64_t needed, int64_t free, int prompt_tokens, KvChoice* choice);

 private:
  absl::StatusOr<KvChoice> Make(const KvOptions& options, int prompt_tokens, std::string reason) const;
  absl::StatusOr<KvChoice> ChooseAuto(const KvOptions& options, int prompt_tokens) const;

  const KvCache& cache_;
  const KvDefaults defaults_;
};

// Prompts shorter than this are never worth compressing.
inline constexpr int kShortPrompt = 256;

}  // namespace loupe
