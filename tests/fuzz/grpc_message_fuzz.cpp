// Messages of strangers, from wire bytes to what the engine takes. The first byte chooses the method. Whatever the bytes
// are: no crash, no exception, and an error is INVALID_ARGUMENT with a message that can be sent back; a request that is
// taken holds what the engine demands. Small vocabulary and template, no engine.
#include <google/protobuf/stubs/logging.h>

#include <cstdint>
#include <memory>
#include <string>

#include "engine/load/gguf.h"
#include "engine/text/chat_template.h"
#include "engine/validate.h"
#include "kernels/check.h"
#include "server/convert_proto.h"
#include "tests/unit/engine/text/small_vocabulary.h"

namespace {

using namespace loupe;

std::unique_ptr<Tokenizer> MakeSmallTokenizer() {
  Vocabulary vocabulary = SmallVocabulary("smollm", "ab '1\n\xC3\xA9", 200, 1);
  vocabulary.bos = AddToken(&vocabulary, "<s>", TokenKind::kControl);
  auto tokenizer = MakeTokenizer(std::move(vocabulary));
  LOUPE_CHECK(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::unique_ptr<ChatTemplate> MakeSmallTemplate() {
  constexpr const char* kSource =
      "{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content | trim }}\n{% endfor %}"
      "{% if add_generation_prompt %}assistant:{% endif %}{% for k, v in (extra or {}).items() %}{{ k }}={{ v }}{% endfor %}";
  auto parsed = ChatTemplate::Parse(kSource, {"<s>", "</s>", {}}, {20'000, 1 << 18, 50});
  LOUPE_CHECK(parsed.ok()) << parsed.status();
  return *std::move(parsed);
}

void CheckRefusal(const absl::Status& status) {
  LOUPE_CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status.ToString();
  LOUPE_CHECK(!status.message().empty() && IsUtf8(std::string(status.message()))) << status.ToString();
  LOUPE_CHECK(!ToGrpcStatus(status).ok());
}

void Convert(const absl::StatusOr<Request>& request, const TextParts& parts) {
  if (!request.ok()) return CheckRefusal(request.status());
  LOUPE_CHECK(ValidateRequest(*request, parts.vocab_size).ok());
  LOUPE_CHECK(request->n >= 1 && request->n <= kMaxSamples) << request->n;
  const absl::Status prompt = ValidatePrompt(request->prompt, parts.vocab_size);  // by the engine, on submission
  if (!prompt.ok()) CheckRefusal(prompt);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // a line for every string that is no UTF-8 would be gigabytes
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<Tokenizer> tokenizer = MakeSmallTokenizer();
  static const std::unique_ptr<ChatTemplate> chat_template = MakeSmallTemplate();
  static const TextParts parts{*tokenizer, *chat_template, tokenizer->vocab_size(), {4096, LongestTokenBytes(*tokenizer)}};
  if (size == 0) return 0;
  const int wire_bytes = static_cast<int>(size - 1);
  switch (data[0] % 3) {
    case 0: {
      v1::GenerateRequest message;
      if (!message.ParseFromArray(data + 1, wire_bytes)) return 0;
      Convert(RequestFromProto(message, parts), parts);
      if (const auto form = GrammarFromProto(message.structure()); !form.ok()) CheckRefusal(form.status());
      const auto echo = TextOf(message.prompt_token_ids().ids(), "prompt_token_ids", *tokenizer);
      if (!echo.ok()) CheckRefusal(echo.status());
      break;
    }
    case 1: {
      v1::ChatRequest message;
      ToolOptions tools;
      if (message.ParseFromArray(data + 1, wire_bytes)) Convert(RequestFromProto(message, parts, &tools), parts);
      break;
    }
    default: {
      v1::DetokenizeRequest message;
      if (!message.ParseFromArray(data + 1, wire_bytes)) return 0;
      const auto text = TextOf(message.tokens(), "tokens", *tokenizer);
      if (!text.ok()) return CheckRefusal(text.status()), 0;
      LOUPE_CHECK(IsUtf8(*text)) << "a proto string must be UTF-8";
    }
  }
  return 0;
}
