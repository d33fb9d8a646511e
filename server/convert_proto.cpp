#include "server/convert_proto.h"

#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_cat.h"
#include "engine/text/unicode.h"
#include "engine/validate.h"
#include "nlohmann/json.hpp"
#include "server/grammar_json.h"
#include "server/http_json.h"
#include "server/kv_json.h"
#include "server/kv_protect.h"
#include "server/openai_request.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

SamplingParams SamplingFromProto(const v1::Sampling& m) {
  SamplingParams s;
  if (m.has_temperature()) s.temperature = m.temperature();
  if (m.has_top_p()) s.top_p = m.top_p();
  if (m.has_top_k()) s.top_k = m.top_k();
  if (m.has_min_p()) s.min_p = m.min_p();
  if (m.has_repetition_penalty()) s.repetition_penalty = m.repetition_penalty();
  if (m.has_frequency_penalty()) s.frequency_penalty = m.frequency_penalty();
  if (m.has_presence_penalty()) s.presence_penalty = m.presence_penalty();
  if (m.has_seed()) s.seed = m.seed();
  if (m.has_max_tokens()) s.max_tokens = m.max_tokens();
  s.min_tokens = m.min_tokens();
  s.ignore_eos = m.ignore_eos();
  s.stop.assign(m.stop().begin(), m.stop().end());
  s.stop_token_ids.assign(m.stop_token_ids().begin(), m.stop_token_ids().end());
  s.include_stop_str_in_output = m.include_stop_str_in_output();
  for (const auto& [id, bias] : m.logit_bias()) s.logit_bias.emplace_back(id, bias);
  if (m.has_logprobs()) s.logprobs = m.logprobs();
  return s;
}

void FillLogprobs(const TokenLogprobs& logprobs, v1::TokenLogprobs* to) {
  const auto fill = [](const TokenAlternative& token, v1::TokenLogprob* one) {
    one->set_token_id(token.id);
    one->set_logprob(token.logprob);
    one->set_token(token.bytes);
  };
  fill(logprobs.chosen, to->mutable_chosen());
  for (const TokenAlternative& token : logprobs.top) fill(token, to->add_top());
}

absl::StatusOr<Json> JsonOf(const google::protobuf::Struct& message, const char* field) {
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text);
  Json json = status.ok() ? Json::parse(text, nullptr, false) : Json(Json::value_t::discarded);
  if (json.is_discarded()) return absl::InvalidArgumentError(absl::StrCat(field, ": cannot be written as JSON"));
  return json;
}

Json ProtectToJson(const v1::KvProtect& m) {
  Json protect = Json::object();
  if (m.has_sinks()) protect["sinks"] = m.sinks();
  if (m.has_recent()) protect["recent"] = m.recent();
  for (const auto& range : m.ranges()) protect["ranges"].push_back({range.from(), range.to()});
  for (const int32_t message : m.messages()) protect["messages"].push_back(message);
  for (const std::string& role : m.roles()) protect["roles"].push_back(role);
  return protect;
}

// By way of the JSON form, so that both protocols refuse the same things in the same words.
absl::StatusOr<KvOptions> KvFromProto(const v1::KvOptions& m) {
  Json kv = Json::object();
  if (!m.policy().empty()) kv["policy"] = m.policy();
  switch (m.budget().kind_case()) {
    case v1::KvBudget::kRatio: kv["budget"] = {{"ratio", m.budget().ratio()}}; break;
    case v1::KvBudget::kTokens: kv["budget"] = {{"tokens", m.budget().tokens()}}; break;
    case v1::KvBudget::kBytes: kv["budget"] = {{"bytes", m.budget().bytes()}}; break;
    case v1::KvBudget::KIND_NOT_SET: break;
  }
  if (m.bits().key() != 0) kv["bits"]["key"] = m.bits().key();
  if (m.bits().value() != 0) kv["bits"]["value"] = m.bits().value();
  if (m.floor().bits() != 0) kv["floor"]["bits"] = m.floor().bits();
  if (m.floor().ratio() != 0) kv["floor"]["ratio"] = m.floor().ratio();
  if (m.has_protect()) kv["protect"] = ProtectToJson(m.protect());
  if (!m.on_miss().empty()) kv["on_miss"] = m.on_miss();
  if (!m.strategy().empty()) kv["strategy"] = m.strategy();
  if (m.has_params()) {
    auto params = JsonOf(m.params(), "kv.params");
    if (!params.ok()) return params.status();
    kv["params"] = *std::move(params);
  }
  return ParseKvOptions(kv);
}

template <class Message>
absl::Status FillCommon(const Message& message, int vocab_size, Request* request) {
  request->sampling = SamplingFromProto(message.sampling());
  request->n = message.sampling().has_n() ? message.sampling().n() : 1;
  request->priority = message.priority();
  if (message.has_kv()) {
    auto kv = KvFromProto(message.kv());
    if (!kv.ok()) return kv.status();
    request->kv = *std::move(kv);
  }
  if (message.timeout_ms() < 0 || message.timeout_ms() > kMaxTimeoutMs) {
    return absl::InvalidArgumentError(absl::StrCat("timeout_ms: is ", message.timeout_ms(), ", must be from 1 to ", kMaxTimeoutMs));
  }
  if (message.sampling().has_max_tokens() && message.sampling().max_tokens() < 0) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens: is ", message.sampling().max_tokens(), ", must be 0 or more"));
  }
  return ValidateRequest(*request, vocab_size);
}

}  // namespace

absl::StatusOr<Request> RequestFromProto(const v1::GenerateRequest& message, const TextParts& parts) {
  Request request;
  absl::Status status = FillCommon(message, parts.vocab_size, &request);
  if (!status.ok()) return status;
  if (message.echo() && request.sampling.logprobs >= 0) {
    request.sampling.prompt_logprobs = request.sampling.logprobs;
    request.sampling.end_logprobs = true;
  }
  switch (message.input_case()) {
    case v1::GenerateRequest::kPrompt: {
      auto ids = EncodePrompt(message.prompt(), /*add_special=*/true, parts.tokenizer, parts.limits);
      if (!ids.ok()) return ids.status();
      request.prompt = *std::move(ids);
      break;
    }
    case v1::GenerateRequest::kPromptTokenIds:
      request.prompt.assign(message.prompt_token_ids().ids().begin(), message.prompt_token_ids().ids().end());
      break;
    case v1::GenerateRequest::INPUT_NOT_SET:
      return absl::InvalidArgumentError("prompt: neither prompt nor prompt_token_ids is set");
  }
  return request;
}

namespace {

// By way of the JSON form, as for kv.
absl::StatusOr<ToolOptions> ToolsFromProto(const v1::ChatRequest& message) {
  ToolOptions options;
  Json tools = Json::array();
  for (const v1::Tool& tool : message.tools()) {
    Json function = {{"name", tool.name()}};
    if (!tool.description().empty()) function["description"] = tool.description();
    if (!tool.parameters().empty()) {
      auto parameters = ParseJson(tool.parameters());
      if (!parameters.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("tools[", tools.size(), "].parameters: ", std::string(parameters.status().message())));
      }
      function["parameters"] = *std::move(parameters);
    }
    tools.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  auto parsed = ParseTools("tools", tools);
  if (!parsed.ok()) return parsed.status();
  options.tools = *std::move(parsed);
  const std::string& choice = message.tool_choice();
  if (!choice.empty()) {
    const bool word = choice == "none" || choice == "auto" || choice == "required";
    auto read = ParseToolChoice("tool_choice", word ? Json(choice) : Json{{"type", "function"}, {"function", {{"name", choice}}}});
    if (!read.ok()) return read.status();
    options.choice = *std::move(read);
  }
  if (message.has_parallel_tool_calls()) options.parallel = message.parallel_tool_calls();
  if (auto status = CheckTools(options, message.structure().kind_case() != v1::Structure::KIND_NOT_SET); !status.ok()) return status;
  return options;
}

Json MessageFromProto(const v1::ChatMessage& m) {
  Json one = {{"role", m.role()}, {"content", m.content()}};
  if (!m.name().empty()) one["name"] = m.name();
  if (!m.tool_call_id().empty()) one["tool_call_id"] = m.tool_call_id();
  for (const v1::ToolCall& call : m.tool_calls()) {
    one["tool_calls"].push_back(
        {{"id", call.id()}, {"type", "function"}, {"function", {{"name", call.name()}, {"arguments", call.arguments()}}}});
  }
  return one;
}

}  // namespace

// The conversation takes HTTP's way, so that both protocols make the same prompt of it.
absl::StatusOr<Request> RequestFromProto(const v1::ChatRequest& message, const TextParts& parts, ToolOptions* tools) {
  Request request;
  absl::Status status = FillCommon(message, parts.vocab_size, &request);
  if (!status.ok()) return status;
  Json messages = Json::array();
  for (const v1::ChatMessage& m : message.messages()) {
    if (m.role().empty()) return absl::InvalidArgumentError(absl::StrCat("messages[", messages.size(), "].role: is missing"));
    messages.push_back(MessageFromProto(m));
  }
  auto checked = ParseMessages("messages", messages);
  if (!checked.ok()) return checked.status();
  auto read_tools = ToolsFromProto(message);
  if (!read_tools.ok()) return read_tools.status();
  *tools = *std::move(read_tools);
  ApiRequest chat;
  chat.tools = *tools;
  chat.messages = *std::move(checked);
  chat.continue_final_message = message.continue_final_message();
  auto kwargs = JsonOf(message.chat_template_kwargs(), "chat_template_kwargs");
  if (!kwargs.ok()) return kwargs.status();
  chat.template_kwargs = *std::move(kwargs);
  const auto text = RenderChat(chat, parts.chat_template);
  if (!text.ok()) return text.status();
  auto ids = EncodePrompt(*text, /*add_special=*/false, parts.tokenizer, parts.limits);
  if (!ids.ok()) return ids.status();
  request.prompt = *std::move(ids);
  chat.engine.kv = request.kv;
  status = ProtectMessages(parts.chat_template, parts.tokenizer, request.prompt, &chat);
  if (!status.ok()) return status;
  request.kv = std::move(chat.engine.kv);
  return request;
}

// By way of the JSON form, as for kv.
absl::StatusOr<std::optional<GrammarSpec>> GrammarFromProto(const v1::Structure& m) {
  std::optional<GrammarSpec> spec;
  absl::Status status;
  switch (m.kind_case()) {
    case v1::Structure::kRegex: status = ReadRegex("structure.regex", m.regex(), &spec); break;
    case v1::Structure::kChoice: {
      Json values = Json::array();
      for (const std::string& value : m.choice().values()) values.push_back(value);
      status = ReadChoice("structure.choice", values, &spec);
      break;
    }
    case v1::Structure::kJsonObject:
      if (m.json_object()) status = ReadResponseFormat("structure.json_object", {{"type", "json_object"}}, &spec);
      break;
    case v1::Structure::kJsonSchema: {
      const auto schema = ParseJson(m.json_schema());
      if (!schema.ok()) return absl::InvalidArgumentError(absl::StrCat("structure.json_schema: ", std::string(schema.status().message())));
      status = ReadResponseFormat("structure", {{"type", "json_schema"}, {"json_schema", {{"schema", *schema}}}}, &spec);
      break;
    }
    case v1::Structure::KIND_NOT_SET: break;
  }
  if (!status.ok()) return status;
  return spec;
}

absl::StatusOr<std::string> TextOf(const google::protobuf::RepeatedField<int32_t>& ids, const char* field, const Tokenizer& tokenizer) {
  Utf8Repair repair;
  std::string text;
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer.vocab_size()) {
      return absl::InvalidArgumentError(absl::StrCat(field, ": ", id, " is not a token id from 0 to ", tokenizer.vocab_size() - 1));
    }
    repair.Push(tokenizer.TokenBytes(id), &text);
  }
  repair.Finish(&text);
  return text;
}

v1::Started StartedToProto(const Started& started) {
  v1::Started out;
  out.set_prompt_tokens(started.prompt_tokens);
  out.set_cached_tokens(started.cached_tokens);
  return out;
}

v1::Delta DeltaToProto(const Delta& delta) {
  v1::Delta out;
  out.set_index(delta.index);
  out.set_text(delta.text);
  out.mutable_token_ids()->Assign(delta.token_ids.begin(), delta.token_ids.end());
  for (const TokenLogprobs& logprobs : delta.logprobs) FillLogprobs(logprobs, out.add_logprobs());
  return out;
}

void FillPieces(std::vector<AnswerPiece> pieces, const std::string& request_id, v1::Delta* delta) {
  delta->clear_text();
  for (AnswerPiece& piece : pieces) {
    if (piece.kind == AnswerPiece::Kind::kContent) delta->mutable_text()->append(piece.text);
    if (piece.kind == AnswerPiece::Kind::kReasoning) delta->mutable_reasoning()->append(piece.text);
    if (piece.kind != AnswerPiece::Kind::kCall && piece.kind != AnswerPiece::Kind::kArguments) continue;
    v1::ToolCallDelta* call = delta->add_tool_calls();
    call->set_index(piece.call);
    if (piece.kind == AnswerPiece::Kind::kArguments) {
      call->set_arguments(std::move(piece.text));
    } else {
      call->set_id(absl::StrCat("call-", request_id, "-", delta->index(), "-", piece.call));
      call->set_name(std::move(piece.text));
    }
  }
}

std::vector<v1::Delta> EchoToProto(int index, const std::string& text, const std::vector<TokenLogprobs>& scored) {
  constexpr int kTokensAMessage = 1024;
  std::vector<v1::Delta> out(1);
  out[0].set_text(text);
  for (const TokenLogprobs& logprobs : scored) {
    if (out.back().logprobs_size() == kTokensAMessage) out.emplace_back();
    FillLogprobs(logprobs, out.back().add_logprobs());
  }
  if (!scored.empty()) out[0].mutable_logprobs(0)->mutable_chosen()->clear_logprob();
  for (v1::Delta& delta : out) delta.set_index(index);
  return out;
}

v1::Finished FinishedToProto(const Finished& finished) {
  v1::Finished out;
  out.set_index(finished.index);
  out.set_finish_reason(static_cast<v1::FinishReason>(static_cast<int>(finished.reason) + 1));
  out.set_stop_reason(finished.stop_reason);
  v1::Usage* usage = out.mutable_usage();
  usage->set_prompt_tokens(finished.usage.prompt_tokens);
  usage->set_completion_tokens(finished.usage.completion_tokens);
  usage->set_total_tokens(finished.usage.prompt_tokens + finished.usage.completion_tokens);
  usage->set_cached_tokens(finished.usage.cached_tokens);
  const KvReport& r = finished.usage.kv;
  v1::KvReport* kv = usage->mutable_kv();
  kv->set_policy(r.policy);
  kv->set_reason(r.reason);
  kv->set_device_bytes(r.device_bytes);
  kv->set_host_bytes(r.host_bytes);
  kv->set_full_bytes(r.full_bytes);
  kv->set_bytes_ratio(r.bytes_ratio);
  kv->set_peak_bytes_ratio(r.peak_bytes_ratio);
  kv->set_lists(r.lists);
  kv->set_entries_kept(r.entries_kept);
  kv->set_entries_merged(r.entries_merged);
  kv->set_entries_dropped(r.entries_dropped);
  kv->set_entries_on_host(r.entries_on_host);
  kv->set_key_bits(r.key_bits);
  kv->set_value_bits(r.value_bits);
  for (const auto& [format, count] : r.entries_by_format) (*kv->mutable_entries_by_format())[format] = count;
  kv->set_zooms(r.zooms);
  kv->set_zoom_tokens(r.zoom_tokens);
  kv->set_fetched_bytes(r.fetched_bytes);
  kv->set_read_bytes_per_token(r.read_bytes_per_token);
  kv->set_full_read_bytes_per_token(r.full_read_bytes_per_token);
  kv->set_lowered(r.lowered);
  if (r.estimated_error) kv->set_estimated_error(*r.estimated_error);
  return out;
}

v1::ListKvPoliciesResponse PoliciesToProto(bool baselines) {
  v1::ListKvPoliciesResponse out;
  const Json json = KvPoliciesToJson(baselines);
  for (const Json& policy : json["policies"]) {
    v1::KvPolicy* to = out.add_policies();
    to->set_name(policy["name"].get<std::string>());
    to->set_summary(policy["summary"].get<std::string>());
    to->set_needs(policy["needs"].get<std::string>());
    for (const Json& format : policy["formats"]) to->add_formats(format.get<std::string>());
    for (const Json& p : policy["parameters"]) {
      v1::KvParameter* param = to->add_parameters();
      param->set_name(p["name"].get<std::string>());
      param->set_summary(p["summary"].get<std::string>());
      if (p.contains("choices")) {
        param->set_default_word(p["default"].get<std::string>());
        for (const Json& choice : p["choices"]) param->add_choices(choice.get<std::string>());
      } else {
        param->set_default_number(p["default"].get<double>());
        param->set_min(p["min"].get<double>());
        param->set_max(p["max"].get<double>());
      }
    }
  }
  return out;
}

v1::GetStatsResponse StatsToProto(const EngineStats& stats) {
  v1::GetStatsResponse out;
  out.set_requests_running(stats.requests_running);
  out.set_requests_waiting(stats.requests_waiting);
  out.set_queue_prompt_tokens(stats.queue_prompt_tokens);
  out.set_queue_oldest_age_s(stats.queue_oldest_age_s);
  out.set_prompt_tokens(stats.prompt_tokens);
  out.set_recomputed_tokens(stats.recomputed_tokens);
  out.set_generated_tokens(stats.generated_tokens);
  out.set_preemptions(stats.preemptions);
  out.set_steps(stats.steps);
  out.set_weight_bytes(stats.weight_bytes);
  out.set_kv_capacity_bytes(stats.kv.capacity_bytes);
  out.set_kv_resident_bytes(stats.kv.resident_bytes);
  out.set_kv_pages(stats.kv.pages);
  out.set_kv_small_pages(stats.kv.small_pages);
  out.set_kv_sequences(stats.kv.num_sequences);
  return out;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), std::string(status.message()));
}

}  // namespace loupe
