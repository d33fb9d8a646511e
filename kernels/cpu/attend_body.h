// Attention over page views for a vector type V of 16 lanes: one unit of decode work, the merge of units, and a tile of
// prompt rows with f32 arithmetic. Instantiated once per instruction set with a V of an anonymous namespace, so that no
// code compiled for one set can be linked into another. Pure compute, any thread, no errors, no allocation.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/attend_coded.h"
#include "kernels/cpu/turn.h"

namespace loupe::attend {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Where a running maximum starts. Finite, so that a row that sees nothing yet needs no special case.
inline constexpr float kNoMaximum = -1e30f;

// 2^x for x up to 0, relative error 3e-7: 2^round(x) times a polynomial on [-.5, .5]. Exactly 1 at 0, and exactly 0
// below -126, where the result would be denormal.
template <class V>
[[gnu::always_inline]] inline V Exp2(V x) {
  const V r = V::Round(x), f = V::Sub(x, r);
  V p = V::Set(1.33908543e-3f);
  p = V::Fma(p, f, V::Set(9.61817801e-3f));
  p = V::Fma(p, f, V::Set(5.55032849e-2f));
  p = V::Fma(p, f, V::Set(2.40226480e-1f));
  p = V::Fma(p, f, V::Set(6.93147182e-1f));
  p = V::Fma(p, f, V::Set(1.f));
  return V::ScaleByPower(p, r, x);
}
template <class V>
[[gnu::always_inline]] inline float Exp2Scalar(float x) {
  return Exp2<V>(V::Set(x)).First();
}

// Which entries of a page a row sees: [begin, end) in the page's numbering, empty if begin >= end.
template <class V>
struct Bounds {
  int begin;
  int end;
  [[gnu::always_inline]] Bounds(const PageView& page, int visible_begin, int visible_end) {
    begin = page.extra || visible_begin <= page.first ? 0 : visible_begin - page.first;
    const int left = page.extra ? page.count : visible_end - page.first;
    end = left < page.count ? left : page.count;
  }
  bool empty() const { return begin >= end; }
};

[[gnu::always_inline]] inline bool HasCodedKeys(const PageView& page) { return IsCoded(static_cast<Codec>(page.key_codec)); }
[[gnu::always_inline]] inline bool HasCodedValues(const PageView& page) { return IsCoded(static_cast<Codec>(page.value_codec)); }

// Adds to a row's scores of a page what they lack (`shift` of coded keys, log-weights) and takes entries out of sight away.
// Returns the maximum.
template <class V>
[[gnu::always_inline]] inline float FinishScores(const PageView& page, const Bounds<V>& seen, float shift, float* s) {
  const int blocks = (page.count + 15) / 16;
  const bool shifts = HasCodedKeys(page);
  V top = V::Set(kMinusInfinity);
  for (int b = 0; b < blocks; ++b) {
    V x = V::Load(s + b * 16);
    if (shifts) x = V::Add(x, V::Set(shift));
    if (page.log_weights != nullptr) x = V::Fma(V::Load(page.log_weights + b * 16), V::Set(kLog2E), x);
    if (seen.begin > b * 16 || seen.end < b * 16 + 16) x = V::KeepRange(x, seen.begin - b * 16, seen.end - b * 16);
    x.Store(s + b * 16);
    top = V::Max(top, x);
  }
  return top.ReduceMax();
}

template <class V>
[[gnu::always_inline]] inline void ScaleQueries(const float* q, int n, float scale, float* out) {
  const V factor = V::Set(scale);
  int i = 0;
  for (; i + 16 <= n; i += 16) V::Mul(V::Load(q + i), factor).Store(out + i);
  if (i < n) V::Mul(V::LoadEight(q + i), factor).StoreEight(out + i);
}

// q [heads, D], scaled already, as coded keys want it: turned [heads, TurnedFloats(D)], shift [heads].
template <class V>
void TurnScaled(const float* q, int heads, int dim, const float* mean, float* turned, float* shift) {
  for (int h = 0; h < heads; ++h) {
    const float* from = q + h * dim;
    float* to = turned + h * TurnedFloats(dim);
    V sum = V::Zero();
    for (int d = 0; d < dim; d += 16) {
      const V x = V::Load(from + d);
      x.Store(to + d);
      if (mean != nullptr) sum = V::Fma(x, V::Load(mean + d), sum);
    }
    shift[h] = sum.ReduceAdd();
    spherical::Turn<1>(to, dim);
    V::Prepare(to, dim);
  }
}

template <class V>
void TurnQueriesBody(const TurnQueries& t) {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];
  ScaleQueries<V>(t.group.q, t.group.heads * t.group.head_dim, t.group.scale_log2e, q);
  TurnScaled<V>(q, t.group.heads, t.group.head_dim, t.mean, t.turned, t.shift);
}

// ---- decode

// A unit's exponentials relative to its maximum, for those who want probabilities. s: [R, kUnitEntries], pages behind
// each other from start[i]; a page out of sight has no scores and gives zeros.
template <class V>
void WriteProbabilities(const DecodeUnit& u, const float* s, const int* start, const bool* seen) {
  const int heads = u.group.heads;
  for (int i = 0; i < u.num_pages; ++i) {
    for (int h = 0; h < heads; ++h) {
      const bool any = seen[i] && u.max[h] > kMinusInfinity;
      const float* x = s + h * kUnitEntries + start[i];
      const int blocks = any ? (u.pages[i].count + 15) / 16 : 0;
      if (u.page_mass != nullptr) {
        V sum = V::Zero();
        for (int b = 0; b < blocks; ++b) sum = V::Add(sum, V::Load(x + b * 16));
        u.page_mass[i * heads + h] = sum.ReduceAdd();
      }
      if (u.entry_probability != nullptr) {
        float* out = u.entry_probability + int64_t{i} * 64 * heads + h;
        for (int e = 0; e < 64; ++e) out[e * heads] = e < blocks * 16 ? x[e] : 0.f;
      }
    }
  }
}

// All scores of a head become exponentials relative to the unit's maximum, which this sets together with the sum.
template <class V>
[[gnu::always_inline]] inline void Exponentiate(const DecodeUnit& u, int h, float* s, int n) {
  V sum = V::Zero();
  if (u.max[h] > kMinusInfinity) {
    const V top = V::Set(u.max[h]);
    for (int i = 0; i < n; i += 16) {
      const V e = Exp2<V>(V::Sub(V::Load(s + i), top));
      sum = V::Add(sum, e);
      e.Store(s + i);
    }
  }
  u.sum[h] = sum.ReduceAdd();
}

// Scales lie apart from the codes, where a reader that runs into them would wait for memory.
template <class V>
[[gnu::always_inline]] inline void PrefetchScales(const PageView& page) {
  if (HasCodedKeys(page)) V::PrefetchNear(page.key_scales), V::PrefetchNear(page.key_scales + 32);
  if (HasCodedValues(page)) V::PrefetchNear(page.value_scales), V::PrefetchNear(page.value_scales + 32);
}

// Values of a stretch of small coded pages, as one page has them: a reader may round the weights of a page together.
struct StretchValues {
  alignas(64) uint8_t values[kMaxHeadDim * kUnitEntries / kUnitPages];
  alignas(64) uint16_t scales[kUnitEntries / kUnitPages];

  PageView Gather(const PageView* pages, int num_pages, int head_dim) {
    PageView all = pages[0];
    const int64_t block = PlaneBytes(static_cast<Codec>(all.value_codec), head_dim) * kSmallPageEntries;
    for (int i = 0; i < num_pages; ++i) {
      std::memcpy(values + i * block, pages[i].values, static_cast<size_t>(block));
      std::memcpy(scales + i * kSmallPageEntries, pages[i].value_scales, kSmallPageEntries * sizeof(uint16_t));
    }
    all.values = values, all.value_scales = scales;
    return all;
  }
};

// Scores of all pages first, then one maximum, then the values: nothing is rescaled inside a unit.
template <class V>
void DecodeUnitBody(const DecodeUnit& u) {
  alignas(64) float q[kMaxGroup * kMaxHeadDim];
  alignas(64) float s[kMaxGroup * kUnitEntries];
  const int heads = u.group.heads, dim = u.group.head_dim, padded = PaddedDim(dim);
  ScaleQueries<V>(u.group.q, heads * dim, u.group.scale_log2e, q);
  for (int h = 0; h < heads; ++h) u.max[h] = kMinusInfinity;
  int start[kUnitViews], n = 0;
  bool seen[kUnitViews];
  for (int i = 0; i < u.num_pages; ++i) {
    const PageView& page = u.pages[i];
    const Bounds<V> bounds(page, u.visible_begin, u.visible_end);
    start[i] = n;
    seen[i] = !bounds.empty();
    if (!seen[i]) continue;
    const uint8_t* ahead = i < u.num_next ? u.next[i].keys : page.values;
    if (i < u.num_next) PrefetchScales<V>(u.next[i]);
    for (int h = 0; h < heads; h += V::kMaxHeads) {
      const int some = heads - h < V::kMaxHeads ? heads - h : V::kMaxHeads;
      const int stride = HasCodedKeys(page) ? TurnedFloats(dim) : dim;
      const float* queries = (HasCodedKeys(page) ? u.turned : q) + h * stride;
      FindScores<V>(page.key_codec, dim, some)({page, ahead, dim, queries, stride, s + h * kUnitEntries + n, kUnitEntries});
    }
    for (int h = 0; h < heads; ++h) {
      const float top = FinishScores<V>(page, bounds, u.shift != nullptr ? u.shift[h] : 0.f, s + h * kUnitEntries + n);
      u.max[h] = top > u.max[h] ? top : u.max[h];
    }
    n += (page.count + 15) / 16 * 16;
  }
  bool any = false;
  for (int h = 0; h < heads; ++h) {
    Exponentiate<V>(u, h, s + h * kUnitEntries, n);
    if (u.max[h] > kMinusInfinity) any = true;
    else for (int i = 0; i < n; i += 16) V::Zero().Store(s + h * kUnitEntries + i);
    for (int d = 0; d < padded; d += 16) V::Zero().Store(u.out + h * padded + d);
    for (int d = 0; u.out_turned != nullptr && d < padded; d += 16) V::Zero().Store(u.out_turned + h * padded + d);
  }
  StretchValues stretch;
  for (int i = 0, views = 1; any && i < u.num_pages; i += views, views = 1) {
    if (!seen[i]) continue;
    Bounds<V> bounds(u.pages[i], u.visible_begin, u.visible_end);
    if (HasCodedValues(u.pages[i])) {
      for (; i + views < u.num_pages && u.pages[i + views].joins && seen[i + views]; ++views) {
        bounds.end = views * kSmallPageEntries + Bounds<V>(u.pages[i + views], u.visible_begin, u.visible_end).end;
      }
    }
    const PageView page = views > 1 ? stretch.Gather(u.pages + i, views, dim) : u.pages[i];
    const uint8_t* ahead = i < u.num_next ? u.next[i].values : page.values;
    for (int h = 0; h < heads; h += V::kMaxHeads) {
      const int some = heads - h < V::kMaxHeads ? heads - h : V::kMaxHeads;
      float* out = (HasCodedValues(page) ? u.out_turned : u.out) + h * padded;
      FindValues<V>(page.value_codec, dim, some)({page, ahead, dim, s + h * kUnitEntries + start[i], kUnitEntries, out, padded,
                                                  bounds.begin, bounds.end});
    }
  }
  if (u.page_mass != nullptr || u.entry_probability != nullptr) WriteProbabilities<V>(u, s, start, seen);
}

template <class V>
void MergeBody(const Merge& m) {
  const int padded = PaddedDim(m.head_dim);
  for (int h = 0; h < m.heads; ++h) {
    const float sink = m.sinks != nullptr ? m.sinks[h] * kLog2E : kMinusInfinity;
    float top = sink;
    for (int u = 0; u < m.units; ++u) top = m.max[u * m.heads + h] > top ? m.max[u * m.heads + h] : top;
    float total = sink > kMinusInfinity ? Exp2Scalar<V>(sink - top) : 0.f;
    alignas(64) float o[kMaxHeadDim], turned[kMaxHeadDim];
    for (int d = 0; d < padded; d += 16) V::Zero().Store(o + d), V::Zero().Store(turned + d);
    for (int u = 0; u < m.units; ++u) {
      const float unit_max = m.max[u * m.heads + h];
      const float weight = unit_max > kMinusInfinity ? Exp2Scalar<V>(unit_max - top) : 0.f;
      if (m.factors != nullptr) m.factors[u * m.heads + h] = weight;
      total += weight * m.sum[u * m.heads + h];
      if (weight == 0) continue;
      const float* part = m.out + (int64_t{u} * m.heads + h) * padded;
      const V w = V::Set(weight);
      for (int d = 0; d < padded; d += 16) V::Fma(w, V::Load(part + d), V::Load(o + d)).Store(o + d);
      if (m.out_turned == nullptr) continue;
      const float* part_turned = m.out_turned + (int64_t{u} * m.heads + h) * padded;
      for (int d = 0; d < padded; d += 16) V::Fma(w, V::Load(part_turned + d), V::Load(turned + d)).Store(turned + d);
    }
    if (m.out_turned != nullptr) {
      spherical::TurnBack<1>(turned, m.head_dim);
      for (int d = 0; d < padded; d += 16) V::Add(V::Load(o + d), V::Load(turned + d)).Store(o + d);
    }
    const float inverse = total != 0 ? 1 / total : 0;  // NaN stays visible
    for (int u = 0; m.factors != nullptr && u < m.units; ++u) m.factors[u * m.heads + h] *= inverse;
    ScaleQueries<V>(o, m.head_dim, inverse, m.result + h * m.head_dim);
  }
}

// ---- prompt

// Scratch of a tile: queries are (row, head) pairs, row-major.
template <class V>
struct PromptState {
  int queries, dim, padded;
  float *q, *o, *sum, *max;      // [queries, dim], [queries, padded], [queries, 16], [queries]
  int32_t *visible_begin, *visible_end;  // [queries]
  // If the tile has coded pages: [queries, TurnedFloats(dim)], [queries, padded], [queries].
  float *turned = nullptr, *o_turned = nullptr, *shift = nullptr;
  float* end;

  explicit PromptState(const PromptTile& t)
      : queries(t.rows * t.group.heads), dim(t.group.head_dim), padded(PaddedDim(dim)) {
    o = t.scratch;
    sum = o + int64_t{queries} * padded;
    q = sum + int64_t{queries} * 16;
    max = q + int64_t{queries} * padded;
    visible_begin = reinterpret_cast<int32_t*>(max + queries);
    visible_end = visible_begin + queries;
    end = max + (queries * 3 + 15) / 16 * 16;
    if (t.coded) {
      turned = end, o_turned = turned + int64_t{queries} * TurnedFloats(dim), shift = o_turned + int64_t{queries} * padded;
      end = shift + (queries + 15) / 16 * 16;
      for (int64_t i = 0; i < int64_t{queries} * padded; i += 16) V::Zero().Store(o_turned + i);
    }
    for (int row = 0, i = 0; row < t.rows; ++row) {
      for (int h = 0; h < t.group.heads; ++h, ++i) {
        for (int d = 0; d < padded; d += 16) V::Zero().Store(o + int64_t{i} * padded + d);
        V::Zero().Store(sum + i * 16);
        max[i] = kNoMaximum;
        visible_begin[i] = t.visible_begin[row * t.visible_stride];
        visible_end[i] = t.visible_end[row * t.visible_stride];
      }
    }
  }
  Bounds<V> BoundsOf(const PageView& page, int query) const {
    return Bounds<V>(page, visible_begin[query], visible_end[query]);
  }
  // What follows the state in the scratch, on a 64-byte border.
  float* rest() const { return end; }
  float* OutputOf(const PageView& page, int query) const {
    return (HasCodedValues(page) ? o_turned : o) + int64_t{query} * padded;
  }
};

// Up to `limit` queries from `query` on, all of which see the page: moves `query` over those that do not. Returns 0 at
// the end. Rows that do not see a page are never touched by it, so tiling cannot change a row's result.
template <class V>
[[gnu::always_inline]] inline int NextQueries(const PromptState<V>& w, const PageView& page, int limit, int* query) {
  while (*query < w.queries && w.BoundsOf(page, *query).empty()) ++*query;
  int n = 0;
  while (n < limit && *query + n < w.queries && !w.BoundsOf(page, *query + n).empty()) ++n;
  return n;
}

// The entries of a page that any of a group of queries sees.
template <class V>
[[gnu::always_inline]] inline Bounds<V> BoundsOfGroup(const PromptState<V>& w, const PageView& page, int query, int n) {
  Bounds<V> any = w.BoundsOf(page, query);
  for (int k = 1; k < n; ++k) {
    const Bounds<V> one = w.BoundsOf(page, query + k);
    any.begin = one.begin < any.begin ? one.begin : any.begin;
    any.end = one.end > any.end ? one.end : any.end;
  }
  return any;
}

// The online softmax: moves the query's maximum, sum and output on to a page whose scores are in s[64], which become
// exponentials, 0 for entries that are out of sight or do not exist.
template <class V>
[[gnu::always_inline]] inline void SoftmaxOfPage(const PromptState<V>& w, const PageView& page, int query, float* s) {
  const Bounds<V> seen = w.BoundsOf(page, query);
  const int blocks = (page.count + 15) / 16;
  V x[4];
  LOUPE_ATTEND_UNROLL for (int b = 0; b < 4; ++b) {
    x[b] = b < blocks ? V::Load(s + b * 16) : V::Set(kMinusInfinity);
    if (HasCodedKeys(page)) x[b] = V::Add(x[b], V::Set(w.shift[query]));
    if (page.log_weights != nullptr && b < blocks) x[b] = V::Fma(V::Load(page.log_weights + b * 16), V::Set(kLog2E), x[b]);
  }
  if (seen.begin > 0 || seen.end < 64) {
    LOUPE_ATTEND_UNROLL for (int b = 0; b < 4; ++b) x[b] = V::KeepRange(x[b], seen.begin - b * 16, seen.end - b * 16);
  }
  const float top = V::Max(V::Max(x[0], x[1]), V::Max(x[2], x[3])).ReduceMax();
  const float before = w.max[query];
  const float now = top > before ? top : before;
  const V now_v = V::Set(now);
  LOUPE_ATTEND_UNROLL for (int b = 0; b < 4; ++b) x[b] = Exp2<V>(V::Sub(x[b], now_v));
  LOUPE_ATTEND_UNROLL for (int b = 0; b < 4; ++b) x[b].Store(s + b * 16);
  const V add = V::Add(V::Add(x[0], x[1]), V::Add(x[2], x[3]));
  float* sum = w.sum + query * 16;
  if (now == before) {
    V::Add(V::Load(sum), add).Store(sum);
    return;
  }
  const V scale = Exp2<V>(V::Sub(V::Set(before), now_v));
  w.max[query] = now;
  V::Fma(V::Load(sum), scale, add).Store(sum);
  float* o = w.o + int64_t{query} * w.padded;
  for (int d = 0; d < w.padded; d += 16) V::Mul(V::Load(o + d), scale).Store(o + d);
  if (w.o_turned == nullptr) return;
  float* turned = w.o_turned + int64_t{query} * w.padded;
  for (int d = 0; d < w.padded; d += 16) V::Mul(V::Load(turned + d), scale).Store(turned + d);
}

// Divides by the denominator, sinks included.
template <class V>
void FinishPrompt(const PromptTile& t, const PromptState<V>& w) {
  for (int i = 0; i < w.queries; ++i) {
    const int head = i % t.group.heads;
    float total = V::Load(w.sum + i * 16).ReduceAdd(), scale = 1;
    if (t.sinks != nullptr) {
      const float sink = t.sinks[head] * kLog2E, top = sink > w.max[i] ? sink : w.max[i];
      scale = Exp2Scalar<V>(w.max[i] - top);
      total = total * scale + Exp2Scalar<V>(sink - top);
    }
    const V factor = V::Set(total != 0 ? scale / total : 0);
    float* o = w.o + int64_t{i} * w.padded;
    if (w.o_turned != nullptr) {
      float* turned = w.o_turned + int64_t{i} * w.padded;
      spherical::TurnBack<1>(turned, w.dim);
      for (int d = 0; d < w.padded; d += 16) V::Add(V::Load(o + d), V::Load(turned + d)).Store(o + d);
    }
    float* out = t.out + i / t.group.heads * t.out_stride + head * w.dim;
    // Adding zero makes -0 to +0: the sign of a zero could depend on masked entries of the tile's other rows.
    int d = 0;
    for (; d + 16 <= w.dim; d += 16) V::Add(V::Mul(V::Load(o + d), factor), V::Zero()).Store(out + d);
    if (d < w.dim) V::Add(V::Mul(V::Load(o + d), factor), V::Zero()).StoreEight(out + d);
  }
}

template <class V>
void PromptTileBody(const PromptTile& t) {
  const PromptState<V> w(t);
  const int heads = t.group.heads, dim = w.dim;
  for (int row = 0; row < t.rows; ++row) {
    const int64_t at = int64_t{row} * heads;
    ScaleQueries<V>(t.group.q + row * t.q_stride, heads * dim, t.group.scale_log2e, w.q + at * dim);
    if (t.coded) TurnScaled<V>(w.q + at * dim, heads, dim, t.mean, w.turned + at * TurnedFloats(dim), w.shift + at);
  }
  alignas(64) float s[V::kMaxHeads * 64];
  for (int i = 0; i < t.num_pages; ++i) {
    PageView page = t.pages[i];
    const PageView& next = t.pages[i + 1 < t.num_pages ? i + 1 : i];
    const int count = page.count;
    for (int query = 0, n; page.count = count, (n = NextQueries<V>(w, page, V::kPromptHeads, &query)) > 0; query += n) {
      const Bounds<V> any = BoundsOfGroup<V>(w, page, query, n);
      page.count = any.end;
      const int stride = HasCodedKeys(page) ? TurnedFloats(dim) : dim;
      const float* queries = (HasCodedKeys(page) ? w.turned : w.q) + int64_t{query} * stride;
      FindScores<V>(page.key_codec, dim, n)({page, next.keys, dim, queries, stride, s, 64});
      for (int k = 0; k < n; ++k) SoftmaxOfPage<V>(w, page, query + k, s + k * 64);
      FindValues<V>(page.value_codec, dim, n)(
          {page, next.values, dim, s, 64, w.OutputOf(page, query), w.padded, any.begin, any.end});
    }
  }
  FinishPrompt<V>(t, w);
}

// ---- column sums

// A row's scores, which become exponentials relative to the row's maximum. Returns what makes them probabilities, 0 if the
// row sees nothing.
template <class V>
[[gnu::always_inline]] inline float FinishRow(float top, const float* sink, float* s, int begin, int end) {
  if (sink != nullptr && *sink * kLog2E > top) top = *sink * kLog2E;
  if (top == kMinusInfinity) {
    for (int i = begin; i < end; i += 16) V::Zero().Store(s + i);
    return 0;
  }
  V sum = V::Zero();
  for (int i = begin; i < end; i += 16) {
    const V e = Exp2<V>(V::Sub(V::Load(s + i), V::Set(top)));
    sum = V::Add(sum, e);
    e.Store(s + i);
  }
  const float total = sum.ReduceAdd() + (sink != nullptr ? Exp2Scalar<V>(*sink * kLog2E - top) : 0.f);
  return 1 / total;
}

// The scores of `n` rows from `row` on, those of numbers without an entry included, and each row's maximum.
// Returns the entries that any of them sees, by whole pages.
template <class V>
[[gnu::always_inline]] inline Bounds<V> ScoreRows(const ColumnJob& job, int row, int n, const float* q, const float* turned,
                                                  const float* shift, float* s, float* top) {
  const int64_t stride = int64_t{64} * job.num_pages;
  PageView none;
  Bounds<V> all(none, 0, 0);
  for (int i = 0; i < job.num_pages; ++i) {
    const PageView& page = job.pages[i];
    bool any = false;
    for (int k = 0; k < n && !any; ++k) {
      const int64_t at = (row + k) * job.visible_stride;
      any = !Bounds<V>(page, job.visible_begin[at], job.visible_end[at]).empty();
    }
    if (!any) continue;
    if (all.end == 0) all.begin = page.first;
    // Between pages that are not full, or out of sight, there is nothing.
    for (int k = 0; k < n && all.end > 0; ++k) {
      for (int e = all.end; e < page.first; e += 16) V::Set(kMinusInfinity).Store(s + k * stride + e);
    }
    all.end = page.first + (page.count + 15) / 16 * 16;
    FindScores<V>(page.key_codec, job.head_dim, n)(
        {page, job.pages[i + 1 < job.num_pages ? i + 1 : i].keys, job.head_dim, HasCodedKeys(page) ? turned : q,
         HasCodedKeys(page) ? TurnedFloats(job.head_dim) : job.head_dim, s + page.first, stride});
    for (int k = 0; k < n; ++k) {
      const int64_t at = (row + k) * job.visible_stride;
      const Bounds<V> seen(page, job.visible_begin[at], job.visible_end[at]);
      const float highest = FinishScores<V>(page, seen, shift[k], s + k * stride + page.first);
      top[k] = highest > top[k] ? highest : top[k];
    }
  }
  return all;
}

template <class V>
void ColumnsBody(const ColumnJob& job) {
  constexpr int kRows = V::kMaxHeads < kColumnRows ? V::kMaxHeads : kColumnRows;
  const int64_t stride = int64_t{64} * job.num_pages;
  float* s = job.scratch;
  float* q = s + kColumnRows * stride;
  float* turned = q + kColumnRows * kMaxHeadDim;
  float shift[kRows] = {};
  for (int row = 0, n; row < job.rows; row += n) {
    n = job.rows - row < kRows ? job.rows - row : kRows;
    float top[kRows], inverse[kRows];
    for (int k = 0; k < n; ++k) {
      top[k] = kMinusInfinity;
      ScaleQueries<V>(job.q + (row + k) * job.q_stride, job.head_dim, job.scale_log2e, q + k * job.head_dim);
    }
    if (job.coded) TurnScaled<V>(q, n, job.head_dim, job.mean, turned, shift);
    const Bounds<V> all = ScoreRows<V>(job, row, n, q, turned, shift, s, top);
    for (int k = 0; k < n; ++k) inverse[k] = FinishRow<V>(top[k], job.sink, s + k * stride, all.begin, all.end);
    for (int i = all.begin; i < all.end; i += 16) {
      V sum = V::Load(job.column + i);
      for (int k = 0; k < n; ++k) sum = V::Fma(V::Load(s + k * stride + i), V::Set(inverse[k]), sum);
      sum.Store(job.column + i);
    }
  }
}

// ---- encoding

template <class V>
void ToHalfBody(const float* x, uint16_t* y, int n) {
  for (int i = 0; i < n; i += 8) V::StoreEightHalfs(x + i, y + i);
}

template <class V>
constexpr Kernels MakeKernels() {
  Kernels k;
  k.turn_queries = TurnQueriesBody<V>;
  k.decode_unit = DecodeUnitBody<V>;
  k.merge = MergeBody<V>;
  k.prompt_tile = PromptTileBody<V>;
  k.prompt_tile_fast = PromptTileBody<V>;
  k.columns = ColumnsBody<V>;
  k.to_half = ToHalfBody<V>;
  return k;
}

}  // namespace loupe::attend
