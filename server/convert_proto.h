// Protobuf messages to engine types and back: the only file that sees both. Pure, any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "grpcpp/grpcpp.h"
#include "loupe/v1/admin.pb.h"
#include "loupe/v1/inference.pb.h"
#include "server/openai_prompt.h"

namespace loupe {

// What a prompt is made with; all of it outlives the call.
struct TextParts {
  const Tokenizer& tokenizer;
  const ChatTemplate& chat_template;
  int vocab_size = 0;
  PromptLimits limits;
};

// INVALID_ARGUMENT names the field. Prompts are tokenised, unless their length alone shows that they cannot fit; id,
// arrival and deadline are the caller's to fill.
absl::StatusOr<Request> RequestFromProto(const v1::GenerateRequest& message, const TextParts& parts);
// `tools` is filled with what the conversation may call.
absl::StatusOr<Request> RequestFromProto(const v1::ChatRequest& message, const TextParts& parts, ToolOptions* tools);

// Text of the ids, control tokens included, as a proto string may hold it: bytes that are no UTF-8 become U+FFFD.
// INVALID_ARGUMENT: an id that the vocabulary lacks; `field` names where it stands.
absl::StatusOr<std::string> TextOf(const google::protobuf::RepeatedField<int32_t>& ids, const char* field, const Tokenizer& tokenizer);

// What the answer may be; none: any text. INVALID_ARGUMENT names the field.
absl::StatusOr<std::optional<GrammarSpec>> GrammarFromProto(const v1::Structure& message);

v1::Started StartedToProto(const Started& started);
v1::Delta DeltaToProto(const Delta& delta);
// Puts the pieces of a chat's answer into the delta, in place of its text. `request_id` makes the ids of calls.
void FillPieces(std::vector<AnswerPiece> pieces, const std::string& request_id, v1::Delta* delta);
// An echoed prompt of one sample; `scored` may be empty. In pieces, so that no message is large.
std::vector<v1::Delta> EchoToProto(int index, const std::string& text, const std::vector<TokenLogprobs>& scored);
v1::Finished FinishedToProto(const Finished& finished);
v1::ListKvPoliciesResponse PoliciesToProto(bool baselines);
v1::GetStatsResponse StatsToProto(const EngineStats& stats);

// The codes are the same numbers; this carries the message over.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace loupe
