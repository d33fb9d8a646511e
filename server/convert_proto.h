// Protobuf messages to engine types and back: the only file that sees both. Pure, any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "grpcpp/grpcpp.h"
#include "loupe/v1/admin.pb.h"
#include "loupe/v1/inference.pb.h"
#include "server/openai_prompt.h"

namespace loupe {

// INVALID_ARGUMENT names the field. Prompts are tokenised, unless their length alone shows that they cannot fit; id,
// arrival and deadline are the caller's to fill.
absl::StatusOr<Request> RequestFromProto(const v1::GenerateRequest& message, const Engine& engine, const PromptLimits& limits);
absl::StatusOr<Request> RequestFromProto(const v1::ChatRequest& message, const Engine& engine, const PromptLimits& limits);

// Text of the ids, control tokens included, as a proto string may hold it: bytes that are no UTF-8 become U+FFFD.
// INVALID_ARGUMENT: an id that the vocabulary lacks; `field` names where it stands.
absl::StatusOr<std::string> TextOf(const google::protobuf::RepeatedField<int32_t>& ids, const char* field, const Tokenizer& tokenizer);

v1::Started StartedToProto(const Started& started);
v1::Delta DeltaToProto(const Delta& delta);
v1::Finished FinishedToProto(const Finished& finished);
v1::ListKvPoliciesResponse PoliciesToProto(bool baselines);
v1::GetStatsResponse StatsToProto(const EngineStats& stats);

// The codes are the same numbers; this carries the message over.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace loupe
