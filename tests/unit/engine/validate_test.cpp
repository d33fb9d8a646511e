#include "engine/validate.h"

#include <cmath>
#include <functional>
#include <limits>

#include "gtest/gtest.h"

namespace loupe {
namespace {

TEST(Validate, DefaultsPass) { EXPECT_TRUE(ValidateRequest(Request()).ok()); }

TEST(Validate, EdgesPass) {
  Request r;
  r.n = kMaxSamples;
  r.sampling.temperature = 2;
  r.sampling.top_p = 1e-12f;
  r.sampling.repetition_penalty = kMinRepetitionPenalty;
  r.sampling.min_p = 1;
  r.sampling.frequency_penalty = -2;
  r.sampling.presence_penalty = 2;
  r.sampling.max_tokens = 0;
  r.sampling.logprobs = 20;
  r.sampling.stop.assign(kMaxStopStrings, "x");
  r.sampling.stop_token_ids = {0, 99};
  r.sampling.logit_bias = {{99, -100.0f}};
  EXPECT_TRUE(ValidateRequest(r, 100).ok()) << ValidateRequest(r, 100);
}

TEST(Validate, EverythingElseIsRefusedByName) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const std::pair<const char*, std::function<void(Request&)>> cases[] = {
      {"n", [](Request& r) { r.n = 0; }},
      {"n", [](Request& r) { r.n = 129; }},
      {"temperature", [](Request& r) { r.sampling.temperature = -0.1f; }},
      {"temperature", [=](Request& r) { r.sampling.temperature = nan; }},
      {"temperature", [=](Request& r) { r.sampling.temperature = inf; }},
      {"top_p", [](Request& r) { r.sampling.top_p = 0; }},
      {"top_p", [=](Request& r) { r.sampling.top_p = nan; }},
      {"top_k", [](Request& r) { r.sampling.top_k = -1; }},
      {"min_p", [](Request& r) { r.sampling.min_p = 1.1f; }},
      {"repetition_penalty", [](Request& r) { r.sampling.repetition_penalty = 0; }},
      {"repetition_penalty", [](Request& r) { r.sampling.repetition_penalty = 1e-4f; }},
      {"repetition_penalty", [=](Request& r) { r.sampling.repetition_penalty = inf; }},
      {"frequency_penalty", [](Request& r) { r.sampling.frequency_penalty = 2.1f; }},
      {"presence_penalty", [=](Request& r) { r.sampling.presence_penalty = nan; }},
      {"max_tokens", [](Request& r) { r.sampling.max_tokens = -2; }},
      {"min_tokens", [](Request& r) { r.sampling.min_tokens = -1; }},
      {"min_tokens", [](Request& r) { r.sampling.min_tokens = 5, r.sampling.max_tokens = 4; }},
      {"logprobs", [](Request& r) { r.sampling.logprobs = 21; }},
      {"stop", [](Request& r) { r.sampling.stop.assign(17, "x"); }},
      {"stop", [](Request& r) { r.sampling.stop = {""}; }},
      {"stop", [](Request& r) { r.sampling.stop = {std::string(kMaxStopBytes + 1, 'x')}; }},
      {"stop_token_ids", [](Request& r) { r.sampling.stop_token_ids.assign(kMaxStopTokenIds + 1, 1); }},
      {"stop_token_ids", [](Request& r) { r.sampling.stop_token_ids = {100}; }},
      {"stop_token_ids", [](Request& r) { r.sampling.stop_token_ids = {-1}; }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{100, 1.0f}};
       }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{1, 101.0f}};
       }},
      {"logit_bias",
       [=](Request& r) {
         r.sampling.logit_bias = {{1, nan}};
       }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias.assign(kMaxLogitBias + 1, {1, 1.0f});
       }},
  };
  for (const auto& [field, spoil] : cases) {
    Request r;
    spoil(r);
    const absl::Status status = ValidateRequest(r, 100);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_EQ(std::string(status.message()).rfind(std::string(field) + ": ", 0), 0u) << status;
  }
}

TEST(Validate, PromptsHaveTokensOfTheVocabulary) {
  EXPECT_TRUE(ValidatePrompt({0, 99}, 100).ok());
  for (const std::vector<int32_t>& prompt : {std::vector<int32_t>{}, {1, 100}, {-1}}) {
    const absl::Status status = ValidatePrompt(prompt, 100);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(status.message()).rfind("prompt: ", 0), 0u) << status;
  }
}

}  // namespace
}  // namespace loupe
