// Storing what a policy keeps in coded formats. Any policy composes with `kv.bits`: MakePolicy (registry.h) wraps it so that
// its entries are coded once they are out of protection, at the end of the prompt and now and then while tokens come.
// Policies that choose formats themselves (PolicyRow::chooses_formats) use the helpers below. Pure functions, any thread.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kvcache/policies/budget.h"
#include "kvcache/policies/policy.h"
#include "kvcache/policies/registry.h"

namespace loupe {

// Entries that leave protection are coded so many at a time, after every so many generated tokens.
inline constexpr int kCodeBatch = kPageEntries;
inline constexpr int kCodeInterval = 16;

// How a request's entries are stored.
struct Coding {
  PageFormat format;            // once they are out of protection
  PageFormat landing;           // protected ones, and new ones from the end of the prompt on
  bool while_prefilling = false;  // the prompt lands in `landing`, too, and is coded chunk by chunk
};

// The parameters protected_bits and prefill, which all policies have when bits are asked for.
std::span<const ParamSpec> CodingParams();

// The two parameters alone; `options` may lack them.
absl::StatusOr<Coding> ReadLanding(const KvOptions& options, const PolicyContext& context);
// From `bits` and the two parameters; nothing if all is dense. INVALID_ARGUMENT: what this model or build cannot code.
absl::StatusOr<std::optional<Coding>> ReadCoding(const KvOptions& options, const PolicyContext& context);
// Whether `floor` can be held: not above what is asked for.
absl::Status CheckFloor(const KvOptions& options);

// `policy`'s choice, stored as `coding` says. `context` has its formats.
std::unique_ptr<Policy> StoreCoded(std::unique_ptr<Policy> policy, const Coding& coding, Protection protection,
                                   const PolicyContext& context);

// ---- for policies that choose formats

// The format in which each entry is stored now.
std::vector<PageFormat> FormatsOf(const ListView& list);

// The action that leaves the entries of `kept` (ascending indexes), each in its format; those in `landing` stay with new
// ones. Runs stand in the order of their bits, most first.
ListAction StoreEntries(const ListView& list, std::span<const int32_t> kept, std::span<const PageFormat> formats,
                        const PageFormat& landing);

// Codes in `format` what is in `landing`, at position `from` or later and not protected: as many of the oldest as fill pages,
// at least one page's worth; nothing if they are fewer. The cheap step of every interval: pages that are full already are not
// touched.
std::optional<ListAction> CodeAged(const ListView& list, const Protection& protection, int num_tokens, const PageFormat& format,
                                   const PageFormat& landing, int from = 0);

}  // namespace loupe
