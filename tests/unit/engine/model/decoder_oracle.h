// The whole model in double precision, straight from the formulas: every row attends to all rows before it, nothing is
// batched, nothing is cached, nothing is rounded.
#pragma once

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "tests/support/quantise.h"
#include "tests/support/tiny_model.h"

namespace loupe::testing {

class DecoderOracle {
 public:
  explicit DecoderOracle(const TinyModel& model) : model_(model), options_(model.options) {}

  // Logits of every position.
  std::vector<std::vector<double>> Logits(std::span<const int32_t> ids) const {
    std::vector<Row> x;
    for (int32_t id : ids) x.push_back(RowOf("token_embd.weight", id));
    for (int layer = 0; layer < options_.layers; ++layer) {
      Attention(layer, &x);
      FeedForward(layer, &x);
    }
    std::vector<Row> logits;
    const char* head = options_.tied ? "token_embd.weight" : "output.weight";
    for (const Row& row : x) logits.push_back(Multiply(head, Norm(row, "output_norm.weight")));
    return logits;
  }

 private:
  using Row = std::vector<double>;

  const Row& Values(const std::string& name) const { return model_.values.at(name); }
  static std::string Name(int layer, const char* part) {
    return "blk." + std::to_string(layer) + "." + part + ".weight";
  }

  Row RowOf(const std::string& name, int32_t index) const {
    const auto begin = Values(name).begin() + static_cast<std::ptrdiff_t>(index) * options_.width;
    return Row(begin, begin + options_.width);
  }

  Row Multiply(const std::string& name, const Row& x) const {
    const Row& w = Values(name);
    Row out(w.size() / x.size(), 0.0);
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t j = 0; j < x.size(); ++j) out[i] += w[i * x.size() + j] * x[j];
    }
    return out;
  }

  Row Norm(const Row& x, const std::string& name) const {
    double squares = 0;
    for (double v : x) squares += v * v;
    const double scale =
        1 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(options_.norm_eps));
    Row out(x);
    for (size_t i = 0; i < x.size(); ++i) out[i] *= scale * Values(name)[i];
    return out;
  }

  void Rotate(Row* x, size_t position) const {
    const auto dim = static_cast<size_t>(options_.head_dim);
    for (size_t at = 0; at < x->size(); at += 2) {
      const size_t pair = at % dim / 2;
      double frequency = std::pow(static_cast<double>(options_.rope_base),
                                  -2.0 * static_cast<double>(pair) / static_cast<double>(dim));
      if (options_.rope_factors) frequency /= Values("rope_freqs.weight")[pair];
      const double angle = static_cast<double>(position) * frequency;
      const double a = (*x)[at], b = (*x)[at + 1];
      (*x)[at] = a * std::cos(angle) - b * std::sin(angle);
      (*x)[at + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
  }

  void Attention(int layer, std::vector<Row>* x) const {
    std::vector<Row> q, k, v;
    for (size_t t = 0; t < x->size(); ++t) {
      const Row normed = Norm((*x)[t], Name(layer, "attn_norm"));
      q.push_back(Multiply(Name(layer, "attn_q"), normed));
      k.push_back(Multiply(Name(layer, "attn_k"), normed));
      v.push_back(Multiply(Name(layer, "attn_v"), normed));
      Rotate(&q.back(), t);
      Rotate(&k.back(), t);
    }
    for (size_t t = 0; t < x->size(); ++t) {
      const Row projected = Multiply(Name(layer, "attn_output"), Attended(q[t], k, v, t));
      for (size_t i = 0; i < projected.size(); ++i) (*x)[t][i] += projected[i];
    }
  }

  Row Attended(const Row& q, const std::vector<Row>& k, const std::vector<Row>& v, size_t t) const {
    const auto dim = static_cast<size_t>(options_.head_dim);
    const auto window = static_cast<size_t>(options_.window);
    const size_t first = window != 0 && t + 1 > window ? t + 1 - window : 0;
    Row out(q.size(), 0.0);
    for (size_t head = 0; head < static_cast<size_t>(options_.heads); ++head) {
      const size_t group = head * static_cast<size_t>(options_.kv_heads) / static_cast<size_t>(options_.heads);
      Row weights(t + 1, 0.0);
      double peak = -1e300, sum = 0;
      for (size_t e = first; e <= t; ++e) {
        for (size_t d = 0; d < dim; ++d) weights[e] += q[head * dim + d] * k[e][group * dim + d];
        weights[e] /= std::sqrt(static_cast<double>(dim));
        peak = std::max(peak, weights[e]);
      }
      for (size_t e = first; e <= t; ++e) sum += weights[e] = std::exp(weights[e] - peak);
      for (size_t e = first; e <= t; ++e) {
        for (size_t d = 0; d < dim; ++d) out[head * dim + d] += weights[e] / sum * v[e][group * dim + d];
      }
    }
    return out;
  }

  void FeedForward(int layer, std::vector<Row>* x) const {
    for (Row& row : *x) {
      const Row normed = Norm(row, Name(layer, "ffn_norm"));
      Row gate = Multiply(Name(layer, "ffn_gate"), normed);
      const Row up = Multiply(Name(layer, "ffn_up"), normed);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      const Row down = Multiply(Name(layer, "ffn_down"), gate);
      for (size_t i = 0; i < row.size(); ++i) row[i] += down[i];
    }
  }

  const TinyModel& model_;
  const TinyOptions& options_;
};

}  // namespace loupe::testing
