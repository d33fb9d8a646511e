// Any bytes given as a model file: parsed, read as a llama model and checked, but not packed. Every tensor that passes
// is read once from end to end, so that a wrong bound is seen by the sanitizer.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/load/gguf.h"
#include "engine/load/gguf_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto gguf = loupe::Gguf::Parse(bytes);
  if (!gguf.ok()) {
    if (gguf.status().message().empty() || !loupe::IsUtf8(std::string(gguf.status().message()))) std::abort();
    return 0;
  }
  uint8_t sum = 0;
  for (const loupe::GgufTensor& t : gguf->tensors()) {
    for (int64_t i = 0; i < t.bytes; ++i) sum = static_cast<uint8_t>(sum + data[t.offset + i]);
  }
  volatile uint8_t sink = sum;
  (void)sink;
  for (const auto& [key, value] : gguf->metadata()) {
    (void)gguf->Int(key, 0, 100);
    (void)gguf->Number(key);
    (void)gguf->String(key);
    (void)gguf->Strings(key);
    (void)gguf->Ints(key);
  }
  auto config = loupe::ReadModelConfig(*gguf, bytes);
  if (config.ok()) (void)loupe::CheckTensors(*gguf, *config);
  (void)loupe::ReadVocabulary(*gguf);
  (void)loupe::ReadChatTemplate(*gguf);
  return 0;
}
