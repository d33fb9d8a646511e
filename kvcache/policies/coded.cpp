#include "kvcache/policies/coded.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/spherical.h"
#include "kvcache/page_format.h"
#include "kvcache/policies/sorted_view.h"

namespace loupe {
namespace {

absl::Status Refuse(const std::string& field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("kv.", field, ": ", why));
}

std::string WordOr(const KvOptions& options, const std::string& name, const std::string& otherwise) {
  const auto it = options.params.find(name);
  const auto* word = it == options.params.end() ? nullptr : std::get_if<std::string>(&it->second);
  return word == nullptr ? otherwise : *word;
}

absl::StatusOr<Codec> ReadSide(const char* side, int bits, Codec dense) {
  if (bits == 0 || bits == 16) return dense;
  if (const auto codec = CodecOfBits(bits)) return *codec;
  return Refuse(absl::StrCat("bits.", side), absl::StrCat("is ", bits, ", must be 16, 8, 4, 3, 2 or auto"));
}

class Coded final : public Policy {
 public:
  Coded(std::unique_ptr<Policy> policy, const Coding& coding, Protection protection, const PolicyContext& context)
      : policy_(std::move(policy)), coding_(coding), protection_(std::move(protection)), context_(context) {
    context_.landing_entries = protection_.Count(context.num_prompt);
  }

  std::string_view name() const override { return policy_->name(); }
  Signals signals() const override { return policy_->keeps_everything() ? Signals{} : policy_->signals(); }
  int decode_interval() const override { return evicts() ? policy_->decode_interval() : kCodeInterval; }
  std::optional<PageFormat> landing_format(bool prompt) const override {
    return prompt && !coding_.while_prefilling ? std::nullopt : std::optional(coding_.landing);
  }
  bool acts_in_prefill() const override { return coding_.while_prefilling; }
  int64_t MaxPromptBytes() const override;
  int64_t MaxBytes(int num_generated) const override;
  void AfterChunk(const SequenceView& sequence, std::vector<ListAction>* actions) const override { CodeAll(sequence, actions); }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override { Act(sequence, true, actions); }
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override {
    evicts() ? Act(sequence, false, actions) : CodeAll(sequence, actions);
  }

 private:
  bool evicts() const { return !policy_->keeps_everything() && policy_->decode_interval() > 0; }
  bool windowed(int layer) const { return !context_.windows.empty() && context_.windows[static_cast<size_t>(layer)] > 0; }
  void Act(const SequenceView& sequence, bool after_prefill, std::vector<ListAction>* actions) const;
  void CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const;

  std::unique_ptr<Policy> policy_;
  Coding coding_;
  Protection protection_;
  PolicyContext context_;
};

int64_t Coded::MaxPromptBytes() const {
  if (!coding_.while_prefilling) return context_.DensePromptBytes() + MaxBytes(0);
  // A chunk lands beside what is protected and what is too little to be coded yet.
  return context_.MostBytes(context_.num_prompt, context_.max_step_rows + kCodeBatch) * context_.num_lists();
}

int64_t Coded::MaxBytes(int num_generated) const {
  const int64_t most = policy_->MaxBytes(num_generated);
  if (most >= 0) return most;  // planned with the formats
  const int waiting = std::min(num_generated, kCodeBatch + kCodeInterval);
  return context_.MostBytes(context_.num_prompt + num_generated, waiting) * context_.num_lists();
}

// What the policy keeps, in order of positions as it knows them, and everything that is not protected coded.
void Coded::Act(const SequenceView& sequence, bool after_prefill, std::vector<ListAction>* actions) const {
  std::vector<ListAction> chosen;
  if (!policy_->keeps_everything()) {
    const SortedView sorted(sequence);
    after_prefill ? policy_->AfterPrefill(sorted.view(), &chosen) : policy_->AfterDecode(sorted.view(), &chosen);
    for (ListAction& action : chosen) sorted.ToListOrder(&action);
  }
  std::vector<const ListAction*> of_list(sequence.lists.size(), nullptr);
  for (const ListAction& action : chosen) of_list[static_cast<size_t>(action.layer * sequence.num_kv_heads + action.kv_head)] = &action;
  for (size_t i = 0; i < sequence.lists.size(); ++i) {
    const ListView& list = sequence.lists[i];
    if (windowed(list.layer)) {
      if (of_list[i] != nullptr) actions->push_back(*of_list[i]);
      continue;
    }
    std::vector<int32_t> kept(list.positions.size());
    std::iota(kept.begin(), kept.end(), 0);
    if (of_list[i] != nullptr) kept = of_list[i]->keep;
    std::vector<PageFormat> formats;
    for (const int32_t entry : kept) {
      const bool stays = protection_.Covers(list.positions[static_cast<size_t>(entry)], sequence.num_tokens);
      formats.push_back(stays ? coding_.landing : coding_.format);
    }
    actions->push_back(StoreEntries(list, kept, formats, coding_.landing));
  }
}

void Coded::CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  for (const ListView& list : sequence.lists) {
    if (windowed(list.layer)) continue;
    auto action = CodeAged(list, protection_, sequence.num_tokens, coding_.format, coding_.landing);
    if (action) actions->push_back(*std::move(action));
  }
}

}  // namespace

std::span<const ParamSpec> CodingParams() {
  static const std::vector<ParamSpec> params = {
      {"protected_bits", "with bits: how protected and new entries are stored; auto: 8 while prefill is coded, else 16", 0, 0, 0, false,
       {"auto", "16", "8"}},
      {"prefill", "with bits: dense: the prompt is coded at its end; coded: chunk by chunk, so that nothing of it is ever dense", 0, 0, 0,
       false, {"dense", "coded"}}};
  return params;
}

absl::StatusOr<Coding> ReadLanding(const KvOptions& options, const PolicyContext& context) {
  const bool while_prefilling = WordOr(options, "prefill", "dense") == "coded";
  const std::string bits = WordOr(options, "protected_bits", "auto");
  if (while_prefilling && bits == "16") {
    return Refuse("params.protected_bits", "is 16, but with prefill coded nothing is dense; give 8 or leave it out");
  }
  Coding coding{context.dense, context.dense, while_prefilling};
  if (while_prefilling || bits == "8") coding.landing = {Codec::kS8, Codec::kS8};
  return coding;
}

absl::StatusOr<std::optional<Coding>> ReadCoding(const KvOptions& options, const PolicyContext& context) {
  auto coding = ReadLanding(options, context);
  if (!coding.ok()) return coding.status();
  const auto key = ReadSide("key", options.bits.key, context.dense.key), value = ReadSide("value", options.bits.value, context.dense.value);
  if (!key.ok()) return key.status();
  if (!value.ok()) return value.status();
  coding->format = {*key, *value};
  if (!IsCoded(coding->format)) {
    for (const ParamSpec& spec : CodingParams()) {
      const auto given = options.params.find(spec.name);
      if (given != options.params.end() && given->second != KvParam(spec.choices[0]) && given->second != KvParam("16")) {
        return Refuse("params." + spec.name, "says how coded caches begin, but bits are 16 for keys and values; ask for fewer bits");
      }
    }
    return std::optional<Coding>();
  }
  if (context.head_dim % spherical::kDimStep != 0) {
    return Refuse("bits", absl::StrCat("model ", context.model, " has heads of ", context.head_dim, " dimensions; only multiples of ",
                                       spherical::kDimStep, " can be stored with fewer than 16 bits"));
  }
  return std::optional(*coding);
}

absl::Status CheckFloor(const KvOptions& options) {
  const KvFloor& floor = options.floor;
  for (const auto& [side, bits] : {std::pair{"key", options.bits.key}, {"value", options.bits.value}}) {
    const int asked = bits == 0 ? 16 : bits;
    if (floor.bits > asked) {
      return Refuse("floor.bits", absl::StrCat("is ", floor.bits, ", above the ", asked, " that bits.", side, " asks for"));
    }
  }
  if (options.budget.kind == KvBudget::Kind::kRatio && floor.ratio > 0 && floor.ratio > options.budget.value) {
    return Refuse("floor.ratio", absl::StrCat("is ", floor.ratio, ", above budget.ratio, which is ", options.budget.value));
  }
  return absl::OkStatus();
}

std::unique_ptr<Policy> StoreCoded(std::unique_ptr<Policy> policy, const Coding& coding, Protection protection,
                                   const PolicyContext& context) {
  return std::make_unique<Coded>(std::move(policy), coding, std::move(protection), context);
}

std::vector<PageFormat> FormatsOf(const ListView& list) {
  std::vector<PageFormat> formats;
  for (const FormatRun& run : list.runs) formats.insert(formats.end(), static_cast<size_t>(run.end - run.begin), run.format);
  return formats;
}

ListAction StoreEntries(const ListView& list, std::span<const int32_t> kept, std::span<const PageFormat> formats,
                        const PageFormat& landing) {
  ListAction action{list.layer, list.kv_head, {}};
  for (size_t i = 0; i < kept.size(); ++i) {
    if (formats[i] == landing) {
      action.keep.push_back(kept[i]);
      continue;
    }
    auto run = std::find_if(action.coded.begin(), action.coded.end(), [&](const CodedRun& r) { return r.format == formats[i]; });
    if (run == action.coded.end()) run = action.coded.insert(run, CodedRun{formats[i], {}});
    run->entries.push_back(kept[i]);
  }
  const auto bits = [](const CodedRun& run) {
    return std::pair(CodecBits(run.format.key) + CodecBits(run.format.value), CodecBits(run.format.key));
  };
  std::sort(action.coded.begin(), action.coded.end(), [&](const CodedRun& a, const CodedRun& b) { return bits(a) > bits(b); });
  return action;
}

std::optional<ListAction> CodeAged(const ListView& list, const Protection& protection, int num_tokens, const PageFormat& format,
                                   const PageFormat& landing, int from) {
  if (format == landing) return std::nullopt;
  std::vector<int32_t> aged;
  int coded = 0;
  for (const FormatRun& run : list.runs) {
    if (run.format == format) coded = run.end - run.begin;
    for (int32_t e = run.begin; run.format == landing && e < run.end; ++e) {
      const int position = list.positions[static_cast<size_t>(e)];
      if (position >= from && !protection.Covers(position, num_tokens)) aged.push_back(e);
    }
  }
  const int filled = (coded + static_cast<int>(aged.size())) / kCodeBatch * kCodeBatch - coded;
  if (static_cast<int>(aged.size()) < kCodeBatch) return std::nullopt;
  aged.resize(static_cast<size_t>(filled));
  std::vector<int32_t> all(list.positions.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<PageFormat> formats = FormatsOf(list);
  for (const int32_t entry : aged) formats[static_cast<size_t>(entry)] = format;
  return StoreEntries(list, all, formats, landing);
}

}  // namespace loupe
