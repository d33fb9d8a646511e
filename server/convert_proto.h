// Protobuf messages to engine types and back: the only file that sees both. Pure, any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "grpcpp/grpcpp.h"
#include "loupe/v1/admin.pb.h"
#include "loupe/v1/inference.pb.h"

namespace loupe {

// INVALID_ARGUMENT names the field. Prompts are tokenised; id, arrival and deadline are the caller's to fill.
absl::StatusOr<Request> RequestFromProto(const v1::GenerateRequest& message, const Engine& engine);
absl::StatusOr<Request> RequestFromProto(const v1::ChatRequest& message, const Engine& engine);

v1::Started StartedToProto(const Started& started);
v1::Delta DeltaToProto(const Delta& delta);
v1::Finished FinishedToProto(const Finished& finished);
v1::GetStatsResponse StatsToProto(const EngineStats& stats);

// The codes are the same numbers; this carries the message over.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace loupe
