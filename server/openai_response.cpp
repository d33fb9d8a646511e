#include "server/openai_response.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <span>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/http_json.h"
#include "server/kv_json.h"

namespace loupe {
namespace {

using Json = nlohmann::ordered_json;

// The library replaces or drops what is not UTF-8; where it does neither, all of it is.
bool IsUtf8(const std::string& bytes) {
  const Json text = bytes;
  return text.dump(-1, ' ', false, Json::error_handler_t::replace) ==
         text.dump(-1, ' ', false, Json::error_handler_t::ignore);
}

int64_t CountCharacters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::span<const TokenAlternative> Best(const TokenLogprobs& token, int num_top) {
  return std::span(token.top).first(std::min(token.top.size(), static_cast<size_t>(num_top)));
}

// A token that is no whole character, as OpenAI's completions spell it.
std::string TokenKey(const std::string& bytes) {
  if (IsUtf8(bytes)) return bytes;
  std::string key = "bytes:";
  for (const char c : bytes) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned char>(c));
    key += hex;
  }
  return key;
}

// The `num_top` best, and the chosen one in any case.
Json TopByText(const TokenLogprobs& token, int num_top) {
  Json top = Json::object();
  for (const TokenAlternative& other : Best(token, num_top)) top[TokenKey(other.bytes)] = SafeLogprob(other.logprob);
  top[TokenKey(token.chosen.bytes)] = SafeLogprob(token.chosen.logprob);
  return top;
}

Json NoCompletionLogprobs() {
  return {{"text_offset", Json::array()}, {"token_logprobs", Json::array()}, {"tokens", Json::array()}, {"top_logprobs", Json::array()}};
}

Json ChatToken(const TokenAlternative& token) {
  Json bytes = Json::array();
  for (const char c : token.bytes) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token.bytes}, {"logprob", SafeLogprob(token.logprob)}, {"bytes", std::move(bytes)}};
}

}  // namespace

std::string SseFrame(const Json& json) { return absl::StrCat("data: ", DumpJson(json), "\n\n"); }

double SafeLogprob(float logprob) {
  return std::isfinite(logprob) && logprob > -9999.0f ? static_cast<double>(logprob) : -9999.0;
}

// Clients know four reasons. An answer that was cut, by whomever, is incomplete: `length`; stop_reason says why.
const char* OpenAiFinishReason(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kToolCalls:
      return "tool_calls";
    case FinishReason::kLength:
    case FinishReason::kCancelled:
    case FinishReason::kDeadline:
    case FinishReason::kError:
      return "length";
  }
  return "stop";
}

Json StopReason(const Finished& finished, const SamplingParams& sampling) {
  const std::string& reason = finished.stop_reason;
  if (reason.empty()) {
    if (finished.reason == FinishReason::kCancelled) return "cancelled";
    if (finished.reason == FinishReason::kDeadline) return "deadline";
    return nullptr;
  }
  const bool is_text = std::find(sampling.stop.begin(), sampling.stop.end(), reason) != sampling.stop.end();
  int32_t id = 0;
  if (finished.reason == FinishReason::kStop && !is_text && absl::SimpleAtoi(reason, &id)) return id;
  return reason;
}

std::string ShownId(Endpoint endpoint, const std::string& id) {
  return absl::StrCat(endpoint == Endpoint::kChat ? "chatcmpl-" : "cmpl-", id);
}

Json ChatLogprobs(const std::vector<TokenLogprobs>& tokens) {
  Json content = Json::array();
  for (const TokenLogprobs& token : tokens) {
    Json entry = ChatToken(token.chosen);
    entry["top_logprobs"] = Json::array();
    for (const TokenAlternative& other : token.top) entry["top_logprobs"].push_back(ChatToken(other));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json CompletionLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top, int64_t* offset) {
  Json out = NoCompletionLogprobs();
  for (const TokenLogprobs& token : tokens) {
    out["text_offset"].push_back(*offset);
    out["token_logprobs"].push_back(SafeLogprob(token.chosen.logprob));
    out["tokens"].push_back(TokenKey(token.chosen.bytes));
    out["top_logprobs"].push_back(TopByText(token, num_top));
    *offset += CountCharacters(token.chosen.bytes);
  }
  return out;
}

Json EchoLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top, const std::string& text) {
  if (tokens.empty()) return NoCompletionLogprobs();
  int64_t offset = 0;
  Json out = CompletionLogprobs(tokens, num_top, &offset);
  out["token_logprobs"][0] = nullptr;
  out["top_logprobs"][0] = nullptr;
  const std::string& first = tokens[0].chosen.bytes;
  if (text.starts_with(first)) return out;
  for (size_t i = 1; i < tokens.size(); ++i) out["text_offset"][i] = out["text_offset"][i].get<int64_t>() - CountCharacters(first);
  return out;
}

Json PromptLogprobs(const std::vector<TokenLogprobs>& tokens, int num_top) {
  Json out = Json::array();
  for (const TokenLogprobs& token : tokens) {
    if (out.empty()) {
      out.push_back(nullptr);
      continue;
    }
    Json by_id = Json::object();
    const auto add = [&](const TokenAlternative& one, Json rank) {
      by_id[std::to_string(one.id)] = {{"logprob", SafeLogprob(one.logprob)}, {"rank", std::move(rank)}, {"decoded_token", one.bytes}};
    };
    add(token.chosen, nullptr);
    int rank = 0;
    for (const TokenAlternative& other : Best(token, num_top)) add(other, ++rank);
    out.push_back(std::move(by_id));
  }
  return out;
}

KvReport SumReports(const std::vector<KvReport>& reports) {
  if (reports.empty()) return {};
  KvReport sum = reports.front();
  std::map<std::string, int64_t> formats(sum.entries_by_format.begin(), sum.entries_by_format.end());
  for (size_t i = 1; i < reports.size(); ++i) {
    const KvReport& r = reports[i];
    sum.device_bytes += r.device_bytes;
    sum.host_bytes += r.host_bytes;
    sum.full_bytes += r.full_bytes;
    sum.peak_bytes_ratio = std::max(sum.peak_bytes_ratio, r.peak_bytes_ratio);
    sum.lists += r.lists;
    sum.entries_kept += r.entries_kept;
    sum.entries_merged += r.entries_merged;
    sum.entries_dropped += r.entries_dropped;
    sum.entries_on_host += r.entries_on_host;
    sum.key_bits = std::max(sum.key_bits, r.key_bits);
    sum.value_bits = std::max(sum.value_bits, r.value_bits);
    for (const auto& [name, count] : r.entries_by_format) formats[name] += count;
    sum.zooms += r.zooms;
    sum.zoom_tokens += r.zoom_tokens;
    sum.fetched_bytes += r.fetched_bytes;
    sum.read_bytes_per_token += r.read_bytes_per_token;
    sum.full_read_bytes_per_token += r.full_read_bytes_per_token;
    sum.lowered += r.lowered;
    if (r.estimated_error) sum.estimated_error = std::max(sum.estimated_error.value_or(0), *r.estimated_error);
  }
  // At the end of each prompt, as for one alone.
  double device = 0, full = 0;
  for (const KvReport& r : reports) {
    device += r.bytes_ratio * static_cast<double>(r.prompt_full_bytes);
    full += static_cast<double>(r.prompt_full_bytes);
  }
  if (full > 0) sum.bytes_ratio = device / full;
  sum.entries_by_format.assign(formats.begin(), formats.end());
  return sum;
}

Answer::Answer(const ApiRequest& request, std::string id, std::string model, std::vector<std::vector<int32_t>> prompts,
               const std::optional<AnswerParserOptions>& parser)
    : request_(request),
      id_(ShownId(request.endpoint, id)),
      model_(std::move(model)),
      created_unix_s_(std::time(nullptr)),
      prompts_(std::move(prompts)),
      scores_(prompts_.size()),
      choices_(prompts_.size() * static_cast<size_t>(request.engine.n)) {
  for (Choice& choice : choices_) {
    if (parser) choice.parser.emplace(*parser);
  }
  if (!request_.echo) return;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const std::string& echoed = request_.prompts[i / static_cast<size_t>(request_.engine.n)].text;
    choices_[i].text = echoed;
    choices_[i].text_offset = CountCharacters(echoed);
  }
}

// ---- gathering and streaming

Json Answer::Chunk(Json choices) const {
  const bool chat = request_.endpoint == Endpoint::kChat;
  Json chunk = {{"id", id_},
                {"object", chat ? "chat.completion.chunk" : "text_completion"},
                {"created", created_unix_s_},
                {"model", model_},
                {"choices", std::move(choices)}};
  if (request_.continuous_usage) {
    chunk["usage"] = {{"prompt_tokens", prompt_tokens()},
                      {"completion_tokens", completion_tokens()},
                      {"total_tokens", prompt_tokens() + completion_tokens()}};
  } else if (request_.include_usage) {
    chunk["usage"] = nullptr;
  }
  return chunk;
}

Json Answer::ChunkChoice(int index, const std::string& text) const {
  Json choice = {{"index", index}};
  if (request_.endpoint == Endpoint::kChat) {
    choice["delta"] = Json::object();
    if (!text.empty()) choice["delta"]["content"] = text;
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = nullptr;
  return choice;
}

// The first frame of a choice: the role of a chat message, the echoed prompt of a completion.
void Answer::Open(int index, std::string* frames) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (choice.opened) return;
  choice.opened = true;
  Json first = ChunkChoice(index, request_.echo ? choice.text : "");
  const bool chat = request_.endpoint == Endpoint::kChat;
  if (chat) first["delta"] = {{"role", "assistant"}, {"content", ""}};
  if (request_.return_token_ids) first["prompt_token_ids"] = prompts_[static_cast<size_t>(index / request_.engine.n)];
  const std::vector<TokenLogprobs>& scores = ScoresOf(static_cast<size_t>(index));
  if (request_.echo && request_.logprobs) first["logprobs"] = EchoLogprobs(scores, request_.top_logprobs, choice.text);
  const bool shows_scores = request_.prompt_logprobs >= 0 && (!chat || index == 0);
  if (shows_scores && !chat) first["prompt_logprobs"] = PromptLogprobs(scores, request_.prompt_logprobs);
  if (!chat && !request_.echo && !request_.return_token_ids && !shows_scores) return;
  Json chunk = Chunk(Json::array({std::move(first)}));
  if (shows_scores && chat) chunk["prompt_logprobs"] = PromptLogprobs(scores, request_.prompt_logprobs);
  *frames += SseFrame(chunk);
}

const std::vector<TokenLogprobs>& Answer::ScoresOf(size_t choice) const {
  return scores_[choice / static_cast<size_t>(request_.engine.n)];
}

void Answer::Add(int prompt, const Delta& delta, std::string* frames) {
  const int index = prompt * request_.engine.n + delta.index;
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (frames != nullptr) Open(index, frames);
  choice.token_ids.insert(choice.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  if (frames == nullptr) {
    if (choice.parser) {
      Tell(index, choice.parser->Push(delta.text), {}, nullptr);
    } else {
      choice.text += delta.text;
    }
    choice.logprobs.insert(choice.logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
    return;
  }
  const bool has_logprobs = request_.logprobs && !delta.logprobs.empty();
  std::vector<AnswerPiece> pieces;
  if (choice.parser) pieces = choice.parser->Push(delta.text);
  const bool silent = choice.parser ? pieces.empty() : delta.text.empty();
  if (silent && !has_logprobs && !request_.return_token_ids) return;  // half a character, or a held-back stop or tag
  Json out = ChunkChoice(index, choice.parser ? std::string() : delta.text);
  if (has_logprobs) {
    const bool chat = request_.endpoint == Endpoint::kChat;
    out["logprobs"] = chat ? ChatLogprobs(delta.logprobs) : CompletionLogprobs(delta.logprobs, request_.top_logprobs, &choice.text_offset);
  }
  if (request_.return_token_ids) out["token_ids"] = delta.token_ids;
  Tell(index, std::move(pieces), std::move(out), frames);
}

std::string Answer::CallId(size_t choice, size_t call) const { return absl::StrCat("call-", id_, "-", choice, "-", call); }

// A call is told in two steps, as clients put it together: its name with no arguments, then the arguments in pieces.
void Answer::Tell(int index, std::vector<AnswerPiece> pieces, Json first, std::string* frames) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  std::vector<Json> deltas;
  for (AnswerPiece& piece : pieces) {
    Json call = {{"index", piece.call}};
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        deltas.push_back({{"content", piece.text}});
        choice.text += piece.text;
        break;
      case AnswerPiece::Kind::kReasoning:
        deltas.push_back({{"reasoning_content", piece.text}});
        choice.reasoning += piece.text;
        break;
      case AnswerPiece::Kind::kCall:
        call.update({{"id", CallId(static_cast<size_t>(index), choice.calls.size())}, {"type", "function"},
                     {"function", {{"name", piece.text}, {"arguments", ""}}}});
        deltas.push_back({{"tool_calls", Json::array({std::move(call)})}});
        choice.calls.push_back({std::move(piece.text), ""});
        break;
      case AnswerPiece::Kind::kArguments:
        call["function"] = {{"arguments", piece.text}};
        deltas.push_back({{"tool_calls", Json::array({std::move(call)})}});
        choice.calls.back().arguments += piece.text;
        break;
    }
  }
  if (frames == nullptr) return;
  if (!deltas.empty()) first["delta"] = std::move(deltas.front());
  *frames += SseFrame(Chunk(Json::array({std::move(first)})));
  for (size_t i = 1; i < deltas.size(); ++i) {
    Json next = ChunkChoice(index, "");
    next["delta"] = std::move(deltas[i]);
    *frames += SseFrame(Chunk(Json::array({std::move(next)})));
  }
}

void Answer::Add(int prompt, const Finished& finished, std::string* frames) {
  const int index = prompt * request_.engine.n + finished.index;
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (choice.finished) return;
  choice.finished = true;
  choice.end = finished;
  ++num_finished_;
  std::vector<AnswerPiece> rest;
  if (choice.parser) rest = choice.parser->Finish();
  if (frames != nullptr) Open(index, frames);
  if (!rest.empty()) Tell(index, std::move(rest), ChunkChoice(index, ""), frames);
  // The engine knows of text alone.
  if (!choice.calls.empty() && finished.reason == FinishReason::kStop) choice.end.reason = FinishReason::kToolCalls;
  if (frames == nullptr) return;
  Json out = ChunkChoice(index, "");
  out["finish_reason"] = OpenAiFinishReason(choice.end.reason);
  out["stop_reason"] = StopReason(finished, request_.engine.sampling);
  *frames += SseFrame(Chunk(Json::array({std::move(out)})));
}

std::string Answer::LastFrames() const {
  std::string frames;
  if (request_.include_usage) {
    Json chunk = Chunk(Json::array());
    chunk["usage"] = Usage();
    frames = SseFrame(chunk);
  }
  return frames + kSseDone;
}

// ---- the whole

int Answer::prompt_tokens() const {
  size_t sum = 0;
  for (const auto& prompt : prompts_) sum += prompt.size();
  return static_cast<int>(sum);
}

int Answer::completion_tokens() const {
  int sum = 0;
  for (const Choice& choice : choices_) {
    sum += choice.finished ? choice.end.usage.completion_tokens : static_cast<int>(choice.token_ids.size());
  }
  return sum;
}

Json Answer::Usage() const {
  int cached = 0;
  std::vector<KvReport> reports;
  for (size_t i = 0; i < choices_.size(); ++i) {
    if (!choices_[i].finished) continue;
    // The samples of one prompt share its entries, so its cached tokens count once.
    if (i % static_cast<size_t>(request_.engine.n) == 0) cached += choices_[i].end.usage.cached_tokens;
    reports.push_back(choices_[i].end.usage.kv);
  }
  return {{"prompt_tokens", prompt_tokens()},
          {"completion_tokens", completion_tokens()},
          {"total_tokens", prompt_tokens() + completion_tokens()},
          {"prompt_tokens_details", {{"cached_tokens", cached}}},
          {"kv", KvReportToJson(SumReports(reports))}};
}

// Of a whole answer.
Json Answer::ChoiceLogprobs(size_t choice) const {
  const Choice& c = choices_[choice];
  if (!request_.logprobs) return nullptr;
  if (request_.endpoint == Endpoint::kChat) return ChatLogprobs(c.logprobs);
  int64_t offset = c.text_offset;
  Json answer = CompletionLogprobs(c.logprobs, request_.top_logprobs, &offset);
  if (!request_.echo) return answer;
  const std::string& echoed = request_.prompts[choice / static_cast<size_t>(request_.engine.n)].text;
  Json all = EchoLogprobs(ScoresOf(choice), request_.top_logprobs, echoed);
  for (auto& [list, values] : all.items()) {
    for (Json& value : answer[list]) values.push_back(std::move(value));
  }
  return all;
}

Json Answer::Message(size_t choice) const {
  const Choice& c = choices_[choice];
  Json message = {{"role", "assistant"}, {"content", c.text}, {"refusal", nullptr}};
  if (!c.reasoning.empty()) message["reasoning_content"] = c.reasoning;
  if (c.calls.empty()) return message;
  if (c.text.empty()) message["content"] = nullptr;
  for (size_t i = 0; i < c.calls.size(); ++i) {
    message["tool_calls"].push_back(
        {{"id", CallId(choice, i)}, {"type", "function"}, {"function", {{"name", c.calls[i].name}, {"arguments", c.calls[i].arguments}}}});
  }
  return message;
}

Json Answer::Whole() const {
  const bool chat = request_.endpoint == Endpoint::kChat;
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    Json out = {{"index", i}};
    if (chat) {
      out["message"] = Message(i);
    } else {
      out["text"] = choice.text;
    }
    out["logprobs"] = ChoiceLogprobs(i);
    if (!chat && request_.prompt_logprobs >= 0) out["prompt_logprobs"] = PromptLogprobs(ScoresOf(i), request_.prompt_logprobs);
    out["finish_reason"] = OpenAiFinishReason(choice.end.reason);
    out["stop_reason"] = StopReason(choice.end, request_.engine.sampling);
    if (request_.return_token_ids) {
      out["token_ids"] = choice.token_ids;
      if (!chat) out["prompt_token_ids"] = prompts_[i / static_cast<size_t>(request_.engine.n)];
    }
    choices.push_back(std::move(out));
  }
  Json whole = {{"id", id_},
                {"object", chat ? "chat.completion" : "text_completion"},
                {"created", created_unix_s_},
                {"model", model_},
                {"choices", std::move(choices)},
                {"usage", Usage()}};
  if (chat && request_.return_token_ids) whole["prompt_token_ids"] = prompts_.front();
  if (chat && request_.prompt_logprobs >= 0) whole["prompt_logprobs"] = PromptLogprobs(scores_.front(), request_.prompt_logprobs);
  return whole;
}

}  // namespace loupe
