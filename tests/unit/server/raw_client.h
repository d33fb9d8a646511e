// A client that sends exactly the bytes it is given: for tests of framing, bad input and disconnects. Blocking, with a
// time limit on every read.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <string>

namespace loupe {

class RawClient {
 public:
  explicit RawClient(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval limit{10, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~RawClient() { Close(); }

  bool connected() const { return connected_; }
  // False if the server has closed.
  bool Send(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }
  // Reads until all that was read (and not yet returned) ends with `end`, or the connection does, or 10 s pass.
  std::string ReadUntil(const std::string& end) {
    while (end.empty() || buffer_.find(end) == std::string::npos) {
      char bytes[4096];
      const ssize_t n = recv(fd_, bytes, sizeof bytes, 0);
      if (n <= 0) {
        closed_ = n == 0;
        return std::exchange(buffer_, "");
      }
      buffer_.append(bytes, static_cast<size_t>(n));
    }
    const size_t cut = buffer_.find(end) + end.size();
    std::string out = buffer_.substr(0, cut);
    buffer_.erase(0, cut);
    return out;
  }
  std::string ReadAll() { return ReadUntil(""); }
  // One answer with Content-Length.
  std::string ReadAnswer() {
    const std::string head = ReadUntil("\r\n\r\n");
    const size_t at = head.find("Content-Length: ");
    if (at == std::string::npos) return head;
    const size_t length = std::stoul(head.substr(at + 16));
    while (buffer_.size() < length) {
      char bytes[4096];
      const ssize_t n = recv(fd_, bytes, sizeof bytes, 0);
      if (n <= 0) break;
      buffer_.append(bytes, static_cast<size_t>(n));
    }
    const std::string out = head + buffer_.substr(0, length);
    buffer_.erase(0, length);
    return out;
  }
  bool closed() const { return closed_; }  // the server closed in order, seen by a read
  void ShutdownSend() { shutdown(fd_, SHUT_WR); }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
  bool connected_ = false;
  bool closed_ = false;
  std::string buffer_;
};

}  // namespace loupe
