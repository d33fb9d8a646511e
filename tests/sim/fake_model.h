// A model that is a script: keys, values and queries come from tables of random numbers by token and position, the logits
// from what attention returns. It drives a real KvCache on the CPU backend, so a lost, mixed up or stale page changes the
// tokens that come out; and it costs next to nothing. With it a tokenizer of single letters and a clock that is set.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "engine/clock.h"
#include "engine/step_model.h"
#include "engine/text/tokenizer.h"
#include "kernels/check.h"

namespace loupe {

inline constexpr int kFakeVocab = 59;

class FakeClock : public Clock {
 public:
  SteadyTime Now() const override { return now_; }
  void Advance(double seconds) {
    now_ += std::chrono::duration_cast<SteadyTime::duration>(std::chrono::duration<double>(seconds));
  }

 private:
  SteadyTime now_ = SteadyTime{} + std::chrono::hours(1);
};

// Token 0 ends an answer, the others are letters.
class FakeTokenizer : public Tokenizer {
 public:
  FakeTokenizer() {
    for (int i = 0; i < kFakeVocab; ++i) letters_.push_back(std::string(1, static_cast<char>('A' + i)));
  }
  std::vector<int32_t> Encode(std::string_view text, bool, bool) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(c - 'A');
    return ids;
  }
  std::string_view TokenBytes(int32_t id) const override { return letters_.at(static_cast<size_t>(id)); }
  bool IsControl(int32_t id) const override { return id == 0; }
  bool IsEndOfGeneration(int32_t id) const override { return id == 0; }
  std::string_view Piece(int32_t id) const override { return TokenBytes(id); }
  int vocab_size() const override { return kFakeVocab; }
  int32_t bos() const override { return -1; }
  int32_t eos() const override { return 0; }
  bool add_bos() const override { return false; }

 private:
  std::vector<std::string> letters_;
};

class FakeModel : public StepModel {
 public:
  explicit FakeModel(int max_context = 4096) : max_context_(max_context) {
    std::mt19937 random(4711);
    std::normal_distribution<float> normal(0, 1);
    const auto fill = [&](std::vector<float>* table, int count) {
      table->resize(static_cast<size_t>(count));
      for (float& x : *table) x = normal(random);
    };
    fill(&q_, kFakeVocab * kHeads * kDim);
    fill(&k_, kFakeVocab * kGroups * kDim);
    fill(&v_, kFakeVocab * kGroups * kDim);
    fill(&head_, kFakeVocab * kHeads * kDim);
  }

  void Forward(const DecoderStep& step, Stream& stream) override {
    const int64_t rows = step.ids.rows();
    LOUPE_CHECK_EQ(rows, step.batch->num_rows);
    ++passes;
    step.cache->Begin(*step.batch, stream);
    std::vector<float> q(Size(rows, kHeads)), k(Size(rows, kGroups)), v(Size(rows, kGroups)), out(Size(rows, kHeads));
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int64_t row = 0; row < rows; ++row) {
        const int32_t id = step.ids.as<int32_t>()[row];
        const int32_t position = step.batch->positions.as<int32_t>()[row];
        LOUPE_CHECK(id >= 0 && id < kFakeVocab) << id;
        const float phase = 1 + 0.3f * std::sin(static_cast<float>(position * (layer + 1)));
        Fill(q_, id, kHeads, phase, q.data() + row * kHeads * kDim);
        Fill(k_, id, kGroups, phase, k.data() + row * kGroups * kDim);
        Fill(v_, id, kGroups, 2 - phase, v.data() + row * kGroups * kDim);
        if (id == infinite_key) k[static_cast<size_t>(row * kGroups * kDim)] = std::nanf("");
        // What the layer before attended to matters, so that every layer's pages do.
        if (layer > 0) {
          for (int i = 0; i < kHeads * kDim; ++i) q[Index(row, i)] += out[Index(row, i)];
        }
      }
      const auto tensor = [rows](std::vector<float>& data, int heads) {
        Tensor t = MakeTensor(data.data(), DType::kF32, rows, heads, kDim);
        t.rank = 3;
        return t;
      };
      step.cache->Append(*step.batch, layer, tensor(k, kGroups), tensor(v, kGroups), stream);
      step.cache->Attend(*step.batch, layer, tensor(q, kHeads), tensor(out, kHeads), stream);
    }
    const auto write_logits = [&](const DecoderStep& wanted) {
      for (int64_t i = 0; i < wanted.logit_rows.rows(); ++i) {
        WriteLogits(out.data() + wanted.logit_rows.as<int32_t>()[i] * kHeads * kDim, wanted.logits.row<float>(i));
      }
    };
    if (step.targets.rows.defined()) {
      AskTargets(step, *backend, stream, [&](const DecoderStep& part) {
        rows_asked += static_cast<int>(part.logit_rows.rows());
        write_logits(part);
      });
    }
    if (step.logit_rows.defined()) write_logits(step);
  }
  KvShape kv_shape() const override {
    KvShape shape;
    shape.num_layers = kLayers;
    shape.num_heads = kHeads;
    shape.num_kv_heads = kGroups;
    shape.head_dim = kDim;
    return shape;
  }
  int vocab_size() const override { return kFakeVocab; }
  int max_context() const override { return max_context_; }
  int64_t weight_bytes() const override { return 1000; }
  int64_t weight_bytes_per_step() const override { return 900; }

  Backend* backend = nullptr;  // asked for what is wanted of prompt tokens
  int passes = 0;
  int rows_asked = 0;  // of prompt tokens
  int infinite_key = -1;  // id of a token whose keys are not finite
  bool broken = false;  // about every second row of logits is NaN

 private:
  // A slab of 2 MiB holds four pages of each of the 16 lists: 256 tokens.
  static constexpr int kLayers = 4, kHeads = 4, kGroups = 4, kDim = 128;

  static size_t Size(int64_t rows, int heads) { return static_cast<size_t>(rows * heads * kDim); }
  static size_t Index(int64_t row, int i) { return static_cast<size_t>(row * kHeads * kDim + i); }
  static void Fill(const std::vector<float>& table, int32_t id, int heads, float factor, float* out) {
    const size_t begin = static_cast<size_t>(id) * static_cast<size_t>(heads * kDim);
    for (int i = 0; i < heads * kDim; ++i) out[i] = factor * table[begin + static_cast<size_t>(i)];
  }
  void WriteLogits(const float* out, float* logits) const {
    for (int id = 0; id < kFakeVocab; ++id) {
      float sum = 0;
      for (int i = 0; i < kHeads * kDim; ++i) sum += out[i] * head_[static_cast<size_t>(id * kHeads * kDim + i)];
      // A narrow spread, so that draws vary, and an end that comes now and then.
      logits[id] = sum * 0.15f - (id == 0 ? -0.7f : 0.0f);
    }
    if (broken && static_cast<int>(std::floor(logits[7] * 50)) % 2 == 0) {
      for (int id = 0; id < kFakeVocab; ++id) logits[id] = std::nanf("");
    }
  }

  int max_context_;
  std::vector<float> q_, k_, v_, head_;
};

}  // namespace loupe
