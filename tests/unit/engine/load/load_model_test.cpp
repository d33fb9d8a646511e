#include "engine/load/load_model.h"

#include <unistd.h>

#include <filesystem>
#include <functional>

#include "engine/load/gguf.h"
#include "engine/load/gguf_model.h"
#include "engine/load/inspect.h"
#include "gtest/gtest.h"
#include "tests/support/tiny_model.h"

namespace loupe {
namespace {

using testing::GgufWriter;
using testing::MakeTinyModel;
using testing::TinyModel;
using testing::TinyOptions;

// A file in a folder of its own that goes with the test.
class ModelFile {
 public:
  explicit ModelFile(const TinyModel& model) {
    std::filesystem::create_directories(folder_);
    model.Write(path());
  }
  ~ModelFile() { std::filesystem::remove_all(folder_); }
  std::string path() const { return (folder_ / "tiny.gguf").string(); }
  std::string folder() const { return folder_.string(); }

 private:
  std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / ("load_model_test." + std::to_string(getpid()));
};

EngineConfig SmallConfig() {
  EngineConfig config;
  config.backend.device = "cpu";
  config.backend.num_threads = 1;
  config.max_step_tokens = 16;
  return config;
}

TEST(LoadModelTest, LoadsATinyModelWhole) {
  TinyOptions options;
  options.rope_factors = true;
  options.window = 40;
  const ModelFile file(MakeTinyModel(options));
  double last = 0;
  auto model = LoadModel(file.path(), SmallConfig(), [&](double share) { last = share; });
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_DOUBLE_EQ(last, 1.0);
  const ModelConfig& c = model->config;
  EXPECT_EQ(c.architecture, "llama");
  EXPECT_EQ(c.name, "Tiny random");
  EXPECT_EQ(c.num_layers, 2);
  EXPECT_EQ(c.width, 96);
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_EQ(c.rope_factors.size(), 16u);
  EXPECT_EQ(c.rope_factors[3], 4.0f);
  EXPECT_EQ(c.windows, (std::vector<int>{40, 40}));
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(model->tokenizer->vocab_size(), c.vocab_size);
  EXPECT_EQ(model->tokenizer->eos(), testing::kTinyImEnd);
  EXPECT_TRUE(model->tokenizer->IsEndOfGeneration(testing::kTinyEndOfText));
  EXPECT_FALSE(model->tokenizer->add_bos());
  ASSERT_TRUE(model->chat_template) << model->chat_template_error;
  EXPECT_EQ(model->file_bytes, static_cast<int64_t>(std::filesystem::file_size(file.path())));
}

TEST(LoadModelTest, AFileWithoutOrWithABadTemplateStillLoads) {
  TinyModel model = MakeTinyModel();
  model.writer.Remove("tokenizer.chat_template");
  {
    const ModelFile file(model);
    auto loaded = LoadModel(file.path(), SmallConfig());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_FALSE(loaded->chat_template);
    EXPECT_EQ(loaded->chat_template_error, "");
  }
  model.writer.String("tokenizer.chat_template", "{% for %}");
  const ModelFile file(model);
  auto loaded = LoadModel(file.path(), SmallConfig());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_FALSE(loaded->chat_template);
  EXPECT_NE(loaded->chat_template_error, "");
  EngineConfig config = SmallConfig();
  config.chat_template = "{{ messages[0]['content'] }}";
  loaded = LoadModel(file.path(), config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_TRUE(loaded->chat_template);
  EXPECT_EQ(loaded->chat_template->source(), config.chat_template);
  config.chat_template = "{% for %}";
  EXPECT_EQ(LoadModel(file.path(), config).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LoadModelTest, PathsThatAreNoModel) {
  const ModelFile file(MakeTinyModel());
  auto status = LoadModel(file.folder() + "/absent.gguf", SmallConfig()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  status = LoadModel(file.folder(), SmallConfig()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.ToString().find("is a directory; Hugging Face directories are not read"), std::string::npos)
      << status;
  status = LoadModel(file.folder() + "/model.safetensors", SmallConfig()).status();
  EXPECT_NE(status.ToString().find("safetensors files are not read"), std::string::npos) << status;
  std::filesystem::resize_file(file.path(), 0);
  status = LoadModel(file.path(), SmallConfig()).status();
  EXPECT_NE(status.ToString().find("is empty (0 bytes)"), std::string::npos) << status;
}

struct Refused {
  const char* name;
  std::function<void(GgufWriter&)> damage;
  const char* message;  // part of the error
};

// Replaces the value of a key.
template <class Set>
std::function<void(GgufWriter&)> Replace(const char* key, Set set) {
  return [key, set](GgufWriter& w) {
    w.Remove(key);
    set(w, key);
  };
}
std::function<void(GgufWriter&)> Number(const char* key, uint32_t value) {
  return Replace(key, [value](GgufWriter& w, const char* k) { w.U32(k, value); });
}
std::function<void(GgufWriter&)> Text(const char* key, const char* value) {
  return Replace(key, [value](GgufWriter& w, const char* k) { w.String(k, value); });
}
std::function<void(GgufWriter&)> Without(const char* key) {
  return [key](GgufWriter& w) { w.Remove(key); };
}

class LoadRefusedTest : public ::testing::TestWithParam<Refused> {};

TEST_P(LoadRefusedTest, NamesTheReasonAndInspectGivesIt) {
  TinyModel model = MakeTinyModel();
  GetParam().damage(model.writer);
  const ModelFile file(model);
  const absl::Status status = LoadModel(file.path(), SmallConfig()).status();
  ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(std::string(status.message()).find(GetParam().message), std::string::npos) << status;
  auto summary = InspectModel(file.path());
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_FALSE(summary->supported);
  EXPECT_NE(summary->reason.find(GetParam().message), std::string::npos) << summary->reason;
}

INSTANTIATE_TEST_SUITE_P(
    Keys, LoadRefusedTest,
    ::testing::Values(
        Refused{"Architecture", Text("general.architecture", "qwen2"),
                "unsupported architecture 'qwen2'; supported: llama"},
        Refused{"NoArchitecture", Without("general.architecture"), "key 'general.architecture' is missing"},
        Refused{"NoLayers", Without("llama.block_count"), "key 'llama.block_count' is missing"},
        Refused{"ZeroLayers", Number("llama.block_count", 0), "key 'llama.block_count' is 0; allowed are 1"},
        Refused{"HugeLayers", Number("llama.block_count", 2000000000),
                "layer count is 2000000000; supported are 1 to 1024"},
        Refused{"LayersAsText", Text("llama.block_count", "2"),
                "key 'llama.block_count' is a string; wanted is an integer"},
        Refused{"MoreLayersThanTensors", Number("llama.block_count", 3), "tensor 'blk.2.attn_norm.weight' is missing"},
        Refused{"FewerLayersThanTensors", Number("llama.block_count", 1),
                "tensor 'blk.1.attn_norm.weight' is not part of"},
        Refused{"NoEpsilon", Without("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon' is missing"},
        Refused{"HeadsThatDoNotDivide", Number("llama.attention.head_count_kv", 3),
                "4 heads cannot be shared by 3 kv heads"},
        Refused{"ValueLength", Number("llama.attention.value_length", 64), "keys of 32 and values of 64 dimensions"},
        Refused{"HeadSize",
                [](GgufWriter& w) {
                  for (const char* k : {"key_length", "value_length"})
                    Number((std::string("llama.attention.") + k).c_str(), 20)(w);
                },
                "head size is 20; supported are multiples of 16"},
        Refused{"OddRope", Number("llama.rope.dimension_count", 31), "rotates 31 dimensions of a head of 32"},
        Refused{"Yarn", [](GgufWriter& w) { w.String("llama.rope.scaling.type", "yarn"); },
                "'yarn'; supported: none, linear"},
        Refused{"Experts", [](GgufWriter& w) { w.U32("llama.expert_count", 8); },
                "key 'llama.expert_count' is 8; supported is only 0"},
        Refused{"WidthAgainstTensors", Number("llama.embedding_length", 128), "tensor 'token_embd.weight' has shape"},
        Refused{"VocabularySize", Number("llama.vocab_size", 100),
                "key 'llama.vocab_size' is 100, but tensor 'token_embd.weight'"},
        Refused{"Eos", Number("tokenizer.ggml.eos_token_id", 5000),
                "key 'tokenizer.ggml.eos_token_id' is 5000, but the vocabulary has"},
        Refused{"TokenizerModel", Text("tokenizer.ggml.model", "llama"), "llama"},
        Refused{"NoTokens", Without("tokenizer.ggml.tokens"), "key 'tokenizer.ggml.tokens' is missing"},
        Refused{"FewTokens",
                Replace("tokenizer.ggml.tokens",
                        [](GgufWriter& w, const char* k) {
                          w.Strings(k, {"a", "b", "c"});
                        }),
                "has 284 elements for 3 tokens"},
        Refused{"TokenType",
                Replace("tokenizer.ggml.token_type",
                        [](GgufWriter& w, const char* k) { w.Ints(k, std::vector<int32_t>(284, 7)); }),
                "element 0 is 7; known are 1 to 6"}),
    [](const auto& c) { return std::string(c.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Tensors, LoadRefusedTest,
    ::testing::Values(
        Refused{"Missing", [](GgufWriter& w) { w.RemoveTensor("blk.1.ffn_down.weight"); },
                "tensor 'blk.1.ffn_down.weight' is missing; wanted is a shape of [96, 160]"},
        Refused{"NoEmbedding", [](GgufWriter& w) { w.RemoveTensor("token_embd.weight"); },
                "tensor 'token_embd.weight' is missing"},
        Refused{"Shape",
                [](GgufWriter& w) {
                  w.Find("blk.0.attn_q.weight")->shape = {128, 96};
                },
                "tensor 'blk.0.attn_q.weight' has shape [96, 128]; the configuration demands [128, 96]"},
        Refused{"Type",
                [](GgufWriter& w) {
                  auto* entry = w.Find("blk.0.ffn_up.weight");
                  entry->type = 6, entry->data = std::string(160 * 96 / 32 * 22, 'x');
                },
                "tensor 'blk.0.ffn_up.weight' has type Q5_0; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1"},
        Refused{"QuantisedNorm",
                [](GgufWriter& w) {
                  auto* entry = w.Find("output_norm.weight");
                  entry->type = 8, entry->data = std::string(3 * 34, 'x');
                },
                "tensor 'output_norm.weight' is a norm vector of type Q8_0"},
        Refused{"Bias", [](GgufWriter& w) { w.Tensor("blk.0.attn_q.bias", {128}, 0, std::string(512, 'x')); },
                "tensor 'blk.0.attn_q.bias' is not part of a llama model of 2 layers"},
        Refused{"ThreeDimensions",
                [](GgufWriter& w) {
                  w.Find("blk.0.attn_k.weight")->shape = {96, 32, 2};
                },
                "tensor 'blk.0.attn_k.weight' has 3 dimensions"},
        Refused{"RopeFactors", [](GgufWriter& w) { w.Tensor("rope_freqs.weight", {3}, 0, std::string(12, 'x')); },
                "tensor 'rope_freqs.weight' holds 3 values of type F32; wanted are 16 of F32"},
        Refused{"ZeroRopeFactors", [](GgufWriter& w) { w.Tensor("rope_freqs.weight", {16}, 0, std::string(64, '\0')); },
                "frequency factor is 0; it must be positive"}),
    [](const auto& c) { return std::string(c.param.name); });

TEST(ReadModelConfigTest, LinearScalingDividesTheFrequencies) {
  TinyModel model = MakeTinyModel();
  model.writer.String("llama.rope.scaling.type", "linear");
  model.writer.F32("llama.rope.scaling.factor", 4.0f);
  const std::string file = model.file();
  auto gguf = Gguf::Parse(file);
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  auto config = ReadModelConfig(*gguf, file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope_factors, std::vector<float>(16, 4.0f));
}

TEST(ReadModelConfigTest, AcceptsEqualValuesPerLayerAndRefusesOthers) {
  for (const bool equal : {true, false}) {
    TinyModel model = MakeTinyModel();
    model.writer.Remove("llama.attention.head_count_kv");
    model.writer.Ints("llama.attention.head_count_kv", {2, equal ? 2 : 4});
    const std::string file = model.file();
    auto gguf = Gguf::Parse(file);
    ASSERT_TRUE(gguf.ok()) << gguf.status();
    EXPECT_EQ(ReadModelConfig(*gguf, file).ok(), equal);
  }
}

TEST(ReadVocabularyTest, FindsTheTokensThatEndAnAnswer) {
  TinyModel model = MakeTinyModel();
  model.writer.U32("tokenizer.ggml.eot_token_id", 10);
  const std::string file = model.file();
  auto gguf = Gguf::Parse(file);
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  auto vocabulary = ReadVocabulary(*gguf);
  ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
  EXPECT_EQ(vocabulary->end_of_generation, (std::vector<int32_t>{testing::kTinyEndOfText, testing::kTinyImEnd, 10}));
  EXPECT_EQ(vocabulary->bos, testing::kTinyImStart);
  EXPECT_EQ(vocabulary->kinds[0], TokenKind::kControl);
  EXPECT_EQ(vocabulary->kinds[3], TokenKind::kNormal);
}

TEST(InspectTest, SumsUpASupportedFile) {
  TinyOptions options;
  options.type = WeightType::kQ8_0;
  const ModelFile file(MakeTinyModel(options));
  auto summary = InspectModel(file.path());
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_TRUE(summary->supported) << summary->reason;
  EXPECT_EQ(summary->reason, "");
  EXPECT_EQ(summary->format, "gguf v3");
  EXPECT_EQ(summary->layers, 2);
  EXPECT_EQ(summary->kv_heads, 2);
  EXPECT_EQ(summary->context, 512);
  EXPECT_EQ(summary->tokenizer, "gpt2/smollm");
  EXPECT_TRUE(summary->chat_template);
  EXPECT_EQ(summary->tensor_types.at("F32").count, 5);
  EXPECT_EQ(summary->tensor_types.at("Q8_0").count, 15);
  // Two layers of two lists of keys and values, 32 elements of 2 bytes.
  EXPECT_EQ(summary->kv_bytes_per_token, 2 * 2 * 2 * 32 * 2);
  EXPECT_EQ(summary->kv_bytes_per_token_by_format.at("dense"), summary->kv_bytes_per_token);
}

TEST(InspectTest, SumsUpAFileOfAnotherArchitecture) {
  TinyModel model = MakeTinyModel();
  Text("general.architecture", "gemma")(model.writer);
  model.writer.U32("gemma.block_count", 12);
  const ModelFile file(model);
  auto summary = InspectModel(file.path());
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->architecture, "gemma");
  EXPECT_EQ(summary->layers, 12);
  EXPECT_GT(summary->parameters, 0);
  EXPECT_FALSE(summary->supported);
}

TEST(InspectTest, AFileThatIsNoGgufIsAnError) {
  const ModelFile file(MakeTinyModel());
  std::filesystem::resize_file(file.path(), 3);
  EXPECT_EQ(InspectModel(file.path()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InspectModel(file.path() + ".absent").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace loupe
