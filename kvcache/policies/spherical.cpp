// Spherical: every list stores what it keeps as spherical codes. In the form that lost least where it was measured
// (docs/quality.md): by a profile of what each list loses, one price over all lists decides (spherical_plan.h) whether a list
// keeps everything at its bits, keys and values apart, or only its best share at 4. Shares are ranked by what the last rows of
// the prompt attend to (SnapKV's score). Generated tokens come on top, coded by the list's format page by page.
#include <algorithm>
#include <numeric>

#include "kvcache/policies/coded.h"
#include "kvcache/policies/primitives.h"
#include "kvcache/policies/snap_score.h"
#include "kvcache/policies/sorted_view.h"
#include "kvcache/policies/spherical_request.h"

namespace loupe {
namespace {

class Spherical final : public Policy {
 public:
  Spherical(SphericalPlan plan, const PolicyContext& context)
      : plan_(std::move(plan)), context_(context), scorer_(MakeSnapScorer({}, plan_.protection.recent)) {}

  std::string_view name() const override { return "spherical"; }
  bool keeps_everything() const override {
    return plan_.coding.landing == context_.dense && std::all_of(plan_.lists.begin(), plan_.lists.end(), [&](const SphericalOption& o) {
      return o.format == context_.dense && o.kept + plan_.protected_entries >= plan_.entries;
    });
  }
  Signals signals() const override {
    if (!drops()) return {};
    Signals signals = scorer_->signals();
    signals.window_goes_on = false;
    return signals;
  }
  int decode_interval() const override { return keeps_everything() ? 0 : kCodeInterval; }
  std::optional<PageFormat> landing_format(bool prompt) const override {
    return prompt && !plan_.coding.while_prefilling ? std::nullopt : std::optional(plan_.coding.landing);
  }
  bool acts_in_prefill() const override { return plan_.coding.while_prefilling; }
  int64_t MaxPromptBytes() const override {
    return plan_.coding.while_prefilling ? MostBytes(plan_.entries, context_.max_step_rows + kCodeBatch) : -1;
  }
  int64_t MaxBytes(int num_generated) const override {
    return MostBytes(num_generated, std::min(num_generated, kCodeBatch + kCodeInterval), true);
  }
  void AfterChunk(const SequenceView& sequence, std::vector<ListAction>* actions) const override { CodeAll(sequence, actions); }
  void AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const override;
  void AfterDecode(const SequenceView& sequence, std::vector<ListAction>* actions) const override { CodeAll(sequence, actions); }

 private:
  bool drops() const {
    return std::any_of(plan_.lists.begin(), plan_.lists.end(), [&](const SphericalOption& o) { return Drops(o); });
  }
  bool Drops(const SphericalOption& option) const { return option.kept + plan_.protected_entries < plan_.entries; }
  bool Windowed(int layer) const { return !context_.windows.empty() && context_.windows[static_cast<size_t>(layer)] > 0; }
  const SphericalOption& OptionOf(const ListView& list) const {
    return plan_.lists[static_cast<size_t>(list.layer * context_.num_kv_heads + list.kv_head)];
  }
  int64_t MostBytes(int64_t more, int64_t waiting, bool complete = false) const;
  void CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const;

  SphericalPlan plan_;
  PolicyContext context_;
  std::unique_ptr<Scorer> scorer_;
};

// Pages of lists that hold `more` entries beside what is planned (or, of an incomplete prompt, in place of it), `waiting` of
// which are not coded yet.
int64_t Spherical::MostBytes(int64_t more, int64_t waiting, bool complete) const {
  const auto pages = [&](const PageFormat& format, int64_t entries) {
    return (entries + kPageEntries - 1) / kPageEntries * MakePageLayout({format, false, false}, context_.head_dim).bytes;
  };
  int64_t bytes = 0;
  for (const SphericalOption& option : plan_.lists) {
    const int64_t entries = more + (complete ? plan_.protected_entries + option.kept : 0);
    const int64_t landing = std::min(entries, plan_.protected_entries + waiting);
    bytes += option.format == plan_.coding.landing ? pages(option.format, entries)
                                                   : pages(plan_.coding.landing, landing) + pages(option.format, entries - landing);
  }
  return bytes;
}

void Spherical::AfterPrefill(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  const SortedView sorted(sequence);
  LayerScores scores(static_cast<size_t>(sequence.num_kv_heads));
  for (int layer = 0; layer < sequence.num_layers(); ++layer) {
    if (Windowed(layer)) continue;
    const auto lists = sorted.view().layer(layer);
    const bool ranks = std::any_of(lists.begin(), lists.end(), [&](const ListView& list) { return Drops(OptionOf(list)); });
    if (ranks) scorer_->ScoreLayer(sorted.view(), layer, &scores);
    for (const ListView& list : lists) {
      const SphericalOption& option = OptionOf(list);
      ListAction chosen{list.layer, list.kv_head, {}};
      chosen.keep.resize(list.positions.size());
      std::iota(chosen.keep.begin(), chosen.keep.end(), 0);
      if (Drops(option)) {
        chosen.keep = KeepBest(list, scores[static_cast<size_t>(list.kv_head)], plan_.protection, sequence.num_tokens,
                               plan_.protected_entries + option.kept);
      }
      sorted.ToListOrder(&chosen);
      const ListView& stored = sequence.layer(layer)[static_cast<size_t>(list.kv_head)];
      std::vector<PageFormat> formats;
      for (const int32_t entry : chosen.keep) {
        const bool stays = plan_.protection.Covers(stored.positions[static_cast<size_t>(entry)], sequence.num_tokens);
        formats.push_back(stays ? plan_.coding.landing : option.format);
      }
      actions->push_back(StoreEntries(stored, chosen.keep, formats, plan_.coding.landing));
    }
  }
}

void Spherical::CodeAll(const SequenceView& sequence, std::vector<ListAction>* actions) const {
  for (const ListView& list : sequence.lists) {
    if (Windowed(list.layer)) continue;
    auto action = CodeAged(list, plan_.protection, sequence.num_tokens, OptionOf(list).format, plan_.coding.landing);
    if (action) actions->push_back(*std::move(action));
  }
}

absl::StatusOr<std::unique_ptr<Policy>> Make(const KvOptions& options, const PolicyContext& context) {
  auto plan = PlanSpherical(options, context);
  if (!plan.ok()) return plan.status();
  return std::unique_ptr<Policy>(new Spherical(*std::move(plan), context));
}

}  // namespace

PolicyRow SphericalRow() {
  PolicyRow row;
  row.name = "spherical";
  row.summary = "stores keys and values as codes of 8 to 2 bits; by a profile each kv head keeps everything at its bits, or its best share";
  row.needs = "nothing; a profile (--strategy FILE, made by loupe calibrate spherical) to choose bits and shares for each kv head";
  row.params = {{"retention", "joint: bits or shares, whichever loses less; drop: shares at 4 bits only; bits: nothing is dropped", 0, 0, 0,
                 false, {"joint", "drop", "bits"}}};
  const auto coding = CodingParams();
  row.params.insert(row.params.end(), coding.begin(), coding.end());
  row.make = Make;
  row.chooses_formats = true;
  return row;
}

}  // namespace loupe
