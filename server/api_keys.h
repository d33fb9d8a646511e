// Who may ask, and how much: the file of --api-keys. One "name: key" a line, optionally followed by max_requests=N and
// kv_byte_seconds=N; lines that begin with # are comments. Read again when it changes; a file that cannot be read or
// is wrong leaves the keys as they were, with an error in the log. Names appear in logs, keys never.
//
// Keys are compared by their SHA-256, all of them and without an early end, so the time says nothing about them.
// Thread-safe. The times are the caller's, so that tests need not wait.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/response_stream.h"
#include "server/file_watch.h"

namespace loupe {

struct KeyLimits {
  int max_requests = 0;         // at a time; 0: no limit
  int64_t kv_byte_seconds = 0;  // in a minute; 0: no limit
};

// What a key's requests hold and have used. Keeps its counts when the file is read again, by its name. Always in a
// shared_ptr.
class KeyAccount : public std::enable_shared_from_this<KeyAccount> {
 public:
  explicit KeyAccount(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }
  void SetLimits(const KeyLimits& limits);

  // A place for one request until the handle goes. RESOURCE_EXHAUSTED with the numbers and a time to wait: all places
  // are taken, or the last minute's cache is used up.
  absl::StatusOr<std::shared_ptr<void>> Enter(SteadyTime now = std::chrono::steady_clock::now());
  // A sample has ended: the bytes that its cache had then, times the seconds that it computed.
  void Charge(const Finished& finished, SteadyTime now = std::chrono::steady_clock::now());
  // Of a request that nobody reads any more: charged by a later Enter, once the engine has ended it.
  void ChargeAtEnd(std::shared_ptr<ResponseStream> stream);

 private:
  void ForgetUse(SteadyTime now);

  const std::string name_;
  std::mutex mutex_;
  KeyLimits limits_;     // guarded by mutex_, as all below
  int running_ = 0;
  double used_ = 0;      // byte-seconds; what a key may use in a minute is forgotten in a minute, evenly
  SteadyTime used_at_{};
  std::vector<std::shared_ptr<ResponseStream>> left_;
};

class ApiKeys {
 public:
  // INVALID_ARGUMENT names the line (never the key) or says that there are none; errors of reading the file.
  static absl::StatusOr<std::unique_ptr<ApiKeys>> Load(
      const std::string& path, std::chrono::steady_clock::duration look_every = std::chrono::seconds(1));

  // The account that "Bearer KEY" belongs to. UNAUTHENTICATED.
  absl::StatusOr<std::shared_ptr<KeyAccount>> Find(const std::string& authorization);

 private:
  using Digest = std::array<unsigned char, 32>;
  struct Key {
    Digest digest;
    std::shared_ptr<KeyAccount> account;
    KeyLimits limits;
  };
  using Table = std::vector<Key>;

  ApiKeys(std::string path, std::chrono::steady_clock::duration look_every) : path_(std::move(path)), watch_({path_}, look_every) {}
  static absl::StatusOr<Table> Parse(const std::string& text);
  absl::Status Read();

  const std::string path_;
  std::mutex mutex_;
  FileWatch watch_;  // guarded by mutex_
  Table table_;      // guarded by mutex_
};

}  // namespace loupe
