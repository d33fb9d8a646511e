// Perplexity of a model on a text, in exact mode and in fast mode, and how far fast mode is from exact mode: mean KL
// over the whole vocabulary, for prompt rows and for decode rows. Scored as llama.cpp's tool does it: windows of 1,024
// tokens that do not overlap, of each only the second half. Run by hand; takes minutes.
//
//   perplexity_check MODEL.gguf TEXT [windows, default all] [bytes of the text, default 61440]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/load/load_model.h"
#include "tests/support/model_runner.h"

namespace loupe {
namespace {

using testing::ModelRunner;

constexpr size_t kWindow = 1024;
constexpr size_t kStepRows = 128;  // bounds the memory of logits

// The first of the variants is what the others are compared with.
struct Variant {
  const char* name;
  bool exact, decode;
  LoadedModel model;
  std::unique_ptr<ModelRunner> runner;
  double nll = 0;           // sum over scored positions
  std::vector<double> kls;  // to the first variant, per position
};

std::vector<double> LogProbabilities(const std::vector<float>& logits) {
  const double peak = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (float l : logits) sum += std::exp(static_cast<double>(l) - peak);
  const double shift = peak + std::log(sum);
  std::vector<double> out(logits.begin(), logits.end());
  for (double& v : out) v -= shift;
  return out;
}

double Kl(const std::vector<double>& p, const std::vector<double>& q) {
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) kl += std::exp(p[i]) * (p[i] - q[i]);
  return kl;
}

// Feeds one window to every variant and adds what its second half says. Returns the number of scored positions.
int Score(const std::vector<int32_t>& window, std::vector<Variant>& variants) {
  std::vector<SeqId> seqs;
  for (Variant& v : variants) seqs.push_back(v.runner->Open());
  int scored = 0;
  for (size_t at = 0; at < kWindow; at += kStepRows) {
    const auto begin = window.begin() + static_cast<std::ptrdiff_t>(at);
    const std::vector<int32_t> ids(begin, begin + kStepRows);
    const bool wanted = at >= kWindow / 2;
    std::vector<std::vector<double>> truth;
    for (size_t i = 0; i < variants.size(); ++i) {
      Variant& v = variants[i];
      const auto rows = v.runner->Step({{seqs[i], ids, v.decode}}, !wanted)[0];
      for (size_t j = 0; wanted && j < kStepRows && at + j + 1 < kWindow; ++j) {
        std::vector<double> logs = LogProbabilities(rows[j]);
        v.nll -= logs[static_cast<size_t>(window[at + j + 1])];
        if (i > 0) v.kls.push_back(Kl(truth[j], logs));
        if (i == 0) truth.push_back(std::move(logs)), ++scored;
      }
    }
  }
  for (size_t i = 0; i < variants.size(); ++i) variants[i].runner->cache().Close(seqs[i]);
  return scored;
}

void Report(const std::vector<Variant>& variants, int scored) {
  for (const Variant& v : variants) {
    std::printf("%-12s perplexity %.4f", v.name, std::exp(v.nll / scored));
    if (!v.kls.empty()) {
      std::vector<double> sorted = v.kls;
      std::sort(sorted.begin(), sorted.end());
      double sum = 0;
      for (double kl : sorted) sum += kl;
      std::printf("  %+.3f %%  mean KL %.3e  95 %% %.3e", 100 * (std::exp((v.nll - variants[0].nll) / scored) - 1),
                  sum / static_cast<double>(sorted.size()), sorted[sorted.size() * 95 / 100]);
    }
    std::printf("\n");
  }
}

int Run(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s MODEL.gguf TEXT [windows] [bytes]\n", argv[0]);
    return 2;
  }
  std::ifstream file(argv[2], std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  text.resize(std::min<size_t>(text.size(), argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 61440));
  std::vector<Variant> variants;
  for (auto [name, exact, decode] :
       {std::tuple{"exact", true, false}, {"fast prompt", false, false}, {"fast decode", false, true}}) {
    EngineConfig config;
    config.backend.exact = exact;
    auto model = LoadModel(argv[1], config);
    if (!model.ok()) {
      std::fprintf(stderr, "error: %s\n", model.status().ToString().c_str());
      return 1;
    }
    variants.push_back({name, exact, decode, *std::move(model), nullptr, 0, {}});
  }
  for (Variant& v : variants)
    v.runner = std::make_unique<ModelRunner>(*v.model.backend, *v.model.decoder, kStepRows, 128 << 20);
  const std::vector<int32_t> ids = variants[0].model.tokenizer->Encode(text, false, false);
  size_t windows = ids.size() / kWindow;
  if (argc > 3) windows = std::min<size_t>(windows, std::strtoull(argv[3], nullptr, 10));
  if (windows == 0) {
    std::fprintf(stderr, "error: %zu tokens are less than one window of %zu; give a longer text\n", ids.size(),
                 kWindow);
    return 2;
  }
  int scored = 0;
  for (size_t w = 0; w < windows; ++w) {
    const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(w * kWindow);
    scored += Score({begin, begin + kWindow}, variants);
    std::fprintf(stderr, "window %zu of %zu: %.4f\n", w + 1, windows, std::exp(variants[0].nll / scored));
  }
  Report(variants, scored);
  return 0;
}

}  // namespace
}  // namespace loupe

int main(int argc, char** argv) { return loupe::Run(argc, argv); }
