// The GPU table of docs/benchmarks.md, without the server: `gpu_figures attention [BATCH CONTEXT PROMPT-ROWS [FORMAT]] | coded |
// memory | sample | model [deterministic]`. One JSON object a line. `coded`: decode over pages of codes; FORMAT is that of
// `loupe bench attention`. `model`: whole steps of the Llama-3.1-8B shape with random weights; a
// single case of `attention` is for profilers and sanitizers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "engine/bench/attention.h"
#include "engine/bench/bench.h"
#include "engine/bench/random_model.h"
#include "engine/bench/sample.h"

namespace loupe {
namespace {

struct Case {
  int heads, kv_heads, dim, batch, context, prompt;
  const char* format = "dense";
};

void Report(const char* what, const Case& c, const absl::StatusOr<BenchResult>& r) {
  if (!r.ok()) {
    std::printf("{\"case\":\"%s\",\"batch\":%d,\"context\":%d,\"error\":\"%s\"}\n", what, c.batch, c.context,
                r.status().ToString().c_str());
  } else {
    std::printf("{\"case\":\"%s\",\"format\":\"%s\",\"heads\":%d,\"dim\":%d,\"batch\":%d,\"context\":%d,\"prompt\":%d,\"time_us\":%.2f,"
                "\"gbps\":%.0f,\"tflops\":%.1f}\n",
                what, c.format, c.heads, c.dim, c.batch, c.context, c.prompt, r->time_us, r->gbps, r->flops / r->time_us * 1e-6);
  }
  std::fflush(stdout);
}

int Attention(const BackendOptions& options, std::span<const Case> cases) {
  auto backend = MakeBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "error: %s\n", backend.status().ToString().c_str());
    return 1;
  }
  std::printf("{\"device\":\"%s\",\"read_gbps\":%.0f}\n", (*backend)->Info().detail.c_str(),
              MeasureReadBandwidth(**backend).value_or(0));
  for (const Case& c : cases) {
    const auto formats = FormatSharesByName(c.format);
    if (!formats.ok()) return std::fprintf(stderr, "error: %s\n", formats.status().ToString().c_str()), 1;
    const AttentionCase one{c.heads, c.kv_heads, c.dim, c.batch, c.context, c.prompt, 10, *formats};
    Report(c.prompt ? "prefill attention" : "decode attention", c, BenchAttention(**backend, one));
  }
  return 0;
}

constexpr Case kDenseCases[] = {
    {32, 8, 128, 1, 1024, 0},    {32, 8, 128, 1, 32768, 0},   {32, 8, 128, 1, 131072, 0}, {32, 8, 128, 8, 32768, 0},   {32, 8, 128, 8, 131072, 0},
    {32, 8, 128, 32, 32768, 0},  {32, 8, 128, 64, 8192, 0},   {9, 3, 64, 64, 4096, 0},    {9, 3, 64, 1, 1024, 0},      {32, 8, 128, 1, 2048, 2048},
    {32, 8, 128, 1, 8192, 8192}, {32, 8, 128, 1, 8192, 512},  {32, 8, 128, 4, 4096, 4096}, {9, 3, 64, 1, 8192, 8192}};
constexpr Case kCodedCases[] = {
    {32, 8, 128, 8, 131072, 0, "s4"}, {32, 8, 128, 8, 32768, 0, "s4"},  {32, 8, 128, 32, 32768, 0, "s4"}, {32, 8, 128, 64, 8192, 0, "s4"},
    {32, 8, 128, 1, 131072, 0, "s4"}, {32, 8, 128, 1, 32768, 0, "s4"},  {32, 8, 128, 1, 1024, 0, "s4"},   {32, 8, 128, 8, 32768, 0, "s8"},
    {32, 8, 128, 32, 32768, 0, "s8"}, {32, 8, 128, 8, 131072, 0, "s2"}, {32, 8, 128, 8, 131072, 0, "s3"}, {32, 8, 128, 8, 131072, 0, "s4v2"},
    {32, 8, 128, 8, 131072, 0, "mixed"}, {9, 3, 64, 64, 4096, 0, "s4"}, {9, 3, 64, 64, 4096, 0, "s8"},   {32, 8, 128, 1, 8192, 512, "s4"}};

int Sample(const BackendOptions& options) {
  auto backend = MakeBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "error: %s\n", backend.status().ToString().c_str());
    return 1;
  }
  const struct {
    int rows;
    float spread, temperature, top_p;
  } cases[] = {{64, 3, 0, 1}, {64, 3, 1, 1}, {64, 3, 1, .9f}, {64, 2, 1, .9f}, {64, 1, 1, .9f}, {1, 3, 1, .9f}, {1, 3, 0, 1}};
  for (const auto& c : cases) {
    SampleCase one;
    one.rows = c.rows, one.spread = c.spread, one.temperature = c.temperature, one.top_p = c.top_p;
    const auto r = BenchSample(**backend, one);
    if (!r.ok()) return std::fprintf(stderr, "error: %s\n", r.status().ToString().c_str()), 1;
    std::printf("{\"case\":\"sample\",\"rows\":%d,\"vocab\":%d,\"spread\":%g,\"temperature\":%g,\"top_p\":%g,\"time_us\":%.1f}\n", c.rows,
                one.vocab, static_cast<double>(c.spread), static_cast<double>(c.temperature), static_cast<double>(c.top_p), r->time_us);
    std::fflush(stdout);
  }
  return 0;
}

// Collects what policies ask for and never acts.
class Observer : public Policy {
 public:
  Observer(int column_stride, int window_rows) : column_stride_(column_stride), window_rows_(window_rows) {}
  std::string_view name() const override { return "observer"; }
  Signals signals() const override {
    Signals signals;
    signals.columns.stride = column_stride_, signals.window_query_rows = window_rows_;
    return signals;
  }
  void AfterPrefill(const SequenceView&, std::vector<ListAction>*) const override {}
  void AfterDecode(const SequenceView&, std::vector<ListAction>*) const override {}

 private:
  const int column_stride_, window_rows_;
};

int Model(const BackendOptions& options) {
  EngineConfig config;
  config.backend = options;
  config.max_step_tokens = 8192;
  auto model = MakeRandomModel("llama-3.1-8b", config);
  if (!model.ok()) {
    std::fprintf(stderr, "error: %s\n", model.status().ToString().c_str());
    return 1;
  }
  BenchOptions run;
  run.max_step_tokens = config.max_step_tokens;
  run.repeat = 3;
  for (const auto& [batch, context] :
       {std::pair{1, 1024}, std::pair{8, 1024}, std::pair{8, 32768}, std::pair{64, 4096}}) {
    run.batch = batch, run.context = context, run.tokens = 32;
    const auto r = BenchDecode(*model, run);
    if (!r.ok()) return std::fprintf(stderr, "error: %s\n", r.status().ToString().c_str()), 1;
    std::printf(
        "{\"case\":\"decode\",\"batch\":%d,\"context\":%d,\"time_us\":%.1f,\"host_us\":%.1f,\"bytes\":%.0f,\"gbps\":%."
        "0f,\"share\":%.3f}\n",
        batch, context, r->time_us, r->host_us, r->bytes, r->gbps, r->share_of_limit);
    std::fflush(stdout);
  }
  const Observer every_32nd(32, 0), every_32nd_and_window(32, 64);
  for (const auto& [context, policy] : {std::pair<int, const Policy*>{512, &FullPolicy()}, {2048, &FullPolicy()}, {8192, &FullPolicy()},
                                        {8192, &every_32nd}, {8192, &every_32nd_and_window}}) {
    run.batch = 1, run.context = context, run.policy = policy;
    const auto r = BenchPrefill(*model, run);
    if (!r.ok()) return std::fprintf(stderr, "error: %s\n", r.status().ToString().c_str()), 1;
    std::printf("{\"case\":\"prefill\",\"context\":%d,\"column_stride\":%d,\"window_rows\":%d,\"time_us\":%.1f,\"tflops\":%.1f,\"tokens_per_s\":%.0f}\n",
                context, policy->signals().columns.stride, policy->signals().window_query_rows, r->time_us, r->flops / r->time_us * 1e-6,
                r->tokens_per_s);
    std::fflush(stdout);
  }
  return 0;
}

// Decode steps at a depth of 128K in equal memory: as many sequences as fit the bytes that five dense ones take.
int EqualMemory(const BackendOptions& options) {
  EngineConfig config;
  config.backend = options;
  config.max_step_tokens = 8192;
  auto model = MakeRandomModel("llama-3.1-8b", config);
  if (!model.ok()) return std::fprintf(stderr, "error: %s\n", model.status().ToString().c_str()), 1;
  BenchOptions run;
  run.max_step_tokens = config.max_step_tokens;
  run.repeat = 1, run.context = 131000, run.tokens = 32;
  for (const auto& [batch, format] : {std::pair{5, "dense"}, std::pair{9, "s8"}, std::pair{19, "s4"}}) {
    run.batch = batch, run.format = format;
    const auto r = BenchDecode(*model, run);
    if (!r.ok()) return std::fprintf(stderr, "error: %s\n", r.status().ToString().c_str()), 1;
    std::printf("{\"case\":\"equal memory\",\"format\":\"%s\",\"batch\":%d,\"context\":%d,\"time_us\":%.1f,\"tokens_per_s\":%.1f,\"gbps\":%.0f}\n", format,
                batch, run.context, r->time_us, r->tokens_per_s, r->gbps);
    std::fflush(stdout);
  }
  return 0;
}

int Main(int argc, char** argv) {
  BackendOptions options;
  options.device = "cuda";
  options.deterministic = argc > 2 && std::strcmp(argv[2], "deterministic") == 0;
  if (argc > 1 && std::strcmp(argv[1], "model") == 0) return Model(options);
  if (argc > 1 && std::strcmp(argv[1], "memory") == 0) return EqualMemory(options);
  if (argc > 1 && std::strcmp(argv[1], "sample") == 0) return Sample(options);
  if (argc > 1 && std::strcmp(argv[1], "coded") == 0) return Attention(options, kCodedCases);
  if (argc <= 4) return Attention(options, kDenseCases);
  const Case single{32, 8, 128, std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), argc > 5 ? argv[5] : "dense"};
  return Attention(options, std::span(&single, 1));
}

}  // namespace
}  // namespace loupe

int main(int argc, char** argv) { return loupe::Main(argc, argv); }
