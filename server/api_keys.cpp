#include "server/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/read_input.h"
#include "server/retry_after.h"
#include "spdlog/spdlog.h"

namespace loupe {
namespace {

constexpr int64_t kMaxFileBytes = 4 << 20;
constexpr double kWindow = 60;  // seconds: of kv_byte_seconds

absl::Status ReadLimit(absl::string_view option, KeyLimits* limits) {
  int64_t number = 0;
  const auto read = [&](absl::string_view text) { return absl::SimpleAtoi(text, &number) && number >= 1; };
  if (absl::ConsumePrefix(&option, "max_requests=") && read(option) && number <= 1'000'000) {
    limits->max_requests = static_cast<int>(number);
  } else if (absl::ConsumePrefix(&option, "kv_byte_seconds=") && read(option)) {
    limits->kv_byte_seconds = number;
  } else {
    return absl::InvalidArgumentError("after the key only max_requests=N (1 to 1000000) and kv_byte_seconds=N may follow, N at least 1");
  }
  return absl::OkStatus();
}

struct Line {
  std::string name, key;
  KeyLimits limits;
};

absl::StatusOr<Line> ReadLine(absl::string_view text) {
  const size_t colon = text.find(':');
  if (colon == absl::string_view::npos) return absl::InvalidArgumentError("has no colon; write 'name: key'");
  Line line;
  line.name = std::string(absl::StripAsciiWhitespace(text.substr(0, colon)));
  if (line.name.empty() || line.name.size() > 64 || line.name.find_first_of(" \t") != std::string::npos) {
    return absl::InvalidArgumentError("the name must have 1 to 64 bytes and no space");
  }
  const std::vector<absl::string_view> words = absl::StrSplit(text.substr(colon + 1), absl::ByAnyChar(" \t"), absl::SkipEmpty());
  if (words.empty()) return absl::InvalidArgumentError(absl::StrCat("'", line.name, "' has no key"));
  line.key = std::string(words[0]);
  if (line.key.size() < 8 || !std::all_of(line.key.begin(), line.key.end(), [](char c) { return c > ' ' && c <= '~'; })) {
    return absl::InvalidArgumentError(absl::StrCat("the key of '", line.name, "' must have 8 or more characters, all printable ASCII"));
  }
  for (size_t i = 1; i < words.size(); ++i) {
    if (absl::Status status = ReadLimit(words[i], &line.limits); !status.ok()) return status;
  }
  return line;
}

}  // namespace

void KeyAccount::SetLimits(const KeyLimits& limits) {
  const std::lock_guard lock(mutex_);
  limits_ = limits;
}

void KeyAccount::ForgetUse(SteadyTime now) {
  const double forgotten = static_cast<double>(limits_.kv_byte_seconds) / kWindow * std::chrono::duration<double>(now - used_at_).count();
  used_ = limits_.kv_byte_seconds == 0 ? 0 : std::max(0.0, used_ - forgotten);
  used_at_ = now;
}

absl::StatusOr<std::shared_ptr<void>> KeyAccount::Enter(SteadyTime now) {
  std::vector<Finished> ended;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(left_, [&](const std::shared_ptr<ResponseStream>& stream) {
      while (auto event = stream->TryNext()) {
        if (auto* finished = std::get_if<Finished>(&*event)) ended.push_back(std::move(*finished));
      }
      return stream->done();
    });
  }
  for (const Finished& finished : ended) Charge(finished, now);
  const std::lock_guard lock(mutex_);
  if (limits_.max_requests > 0 && running_ >= limits_.max_requests) {
    const std::string why = absl::StrCat("key '", name_, "' has ", running_, " requests in flight, its limit is ", limits_.max_requests);
    return WithRetryAfter(absl::ResourceExhaustedError(why), 1);
  }
  ForgetUse(now);
  const double limit = static_cast<double>(limits_.kv_byte_seconds);
  if (limit > 0 && used_ >= limit) {
    const std::string why = absl::StrCat("key '", name_, "' has used ", static_cast<int64_t>(used_),
                                         " KV byte-seconds, its limit is ", limits_.kv_byte_seconds, " a minute");
    return WithRetryAfter(absl::ResourceExhaustedError(why), (used_ - limit) * kWindow / limit);
  }
  ++running_;
  return std::shared_ptr<void>(nullptr, [self = shared_from_this()](void*) {
    const std::lock_guard leaving(self->mutex_);
    --self->running_;
  });
}

void KeyAccount::Charge(const Finished& finished, SteadyTime now) {
  const KvReport& kv = finished.usage.kv;
  const std::lock_guard lock(mutex_);
  ForgetUse(now);
  used_ += static_cast<double>(kv.device_bytes + kv.host_bytes) * (finished.timings.prefill + finished.timings.decode);
}

void KeyAccount::ChargeAtEnd(std::shared_ptr<ResponseStream> stream) {
  const std::lock_guard lock(mutex_);
  left_.push_back(std::move(stream));
}

absl::StatusOr<ApiKeys::Table> ApiKeys::Parse(const std::string& text) {
  Table table;
  int number = 0;
  for (absl::string_view raw : absl::StrSplit(text, '\n')) {
    ++number;
    const absl::string_view stripped = absl::StripAsciiWhitespace(raw);
    if (stripped.empty() || stripped.front() == '#') continue;
    const auto line = ReadLine(stripped);
    if (!line.ok()) return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", std::string(line.status().message())));
    Key key;
    SHA256(reinterpret_cast<const unsigned char*>(line->key.data()), line->key.size(), key.digest.data());
    for (const Key& other : table) {
      if (other.account->name() == line->name) {
        return absl::InvalidArgumentError(absl::StrCat("line ", number, ": the name '", line->name, "' stands twice"));
      }
      if (other.digest == key.digest) {
        return absl::InvalidArgumentError(
            absl::StrCat("line ", number, ": '", line->name, "' has the key of '", other.account->name(), "'"));
      }
    }
    key.account = std::make_shared<KeyAccount>(line->name);
    key.limits = line->limits;
    table.push_back(std::move(key));
  }
  if (table.empty()) return absl::InvalidArgumentError("holds no key; write one 'name: key' a line");
  return table;
}

absl::Status ApiKeys::Read() {
  const auto text = ReadFile("key file", path_, kMaxFileBytes);
  if (!text.ok()) return text.status();
  auto table = Parse(*text);
  if (!table.ok()) return absl::InvalidArgumentError(absl::StrCat("key file '", path_, "' ", std::string(table.status().message())));
  for (Key& key : *table) {
    for (const Key& old : table_) {
      if (old.account->name() == key.account->name()) key.account = old.account;
    }
    key.account->SetLimits(key.limits);
  }
  table_ = *std::move(table);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ApiKeys>> ApiKeys::Load(const std::string& path, std::chrono::steady_clock::duration look_every) {
  auto keys = std::unique_ptr<ApiKeys>(new ApiKeys(path, look_every));
  if (absl::Status status = keys->Read(); !status.ok()) return status;
  return keys;
}

absl::StatusOr<std::shared_ptr<KeyAccount>> ApiKeys::Find(const std::string& authorization) {
  const std::lock_guard lock(mutex_);
  if (watch_.Changed()) {
    const absl::Status read = Read();
    if (read.ok()) spdlog::info("key file read again: {} keys", table_.size());
    if (!read.ok()) spdlog::error("the keys stay as they were: {}", std::string(read.message()));
  }
  constexpr char kScheme[] = "Bearer ";
  if (authorization.empty()) return absl::UnauthenticatedError("no API key was sent; send 'Authorization: Bearer KEY'");
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) {
    return absl::UnauthenticatedError("Authorization must be 'Bearer KEY'");
  }
  const absl::string_view shown = absl::StripAsciiWhitespace(absl::string_view(authorization).substr(sizeof kScheme - 1));
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(shown.data()), shown.size(), digest.data());
  const Key* found = nullptr;
  for (const Key& key : table_) {
    if (CRYPTO_memcmp(key.digest.data(), digest.data(), digest.size()) == 0) found = &key;
  }
  if (found == nullptr) return absl::UnauthenticatedError("this API key is not known here");
  return found->account;
}

}  // namespace loupe
