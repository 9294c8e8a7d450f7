#include "tetri/net.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <memory>

namespace tetri {

namespace {

constexpr int kDataBuffer = 4 << 20;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

[[noreturn]] void fail(Status status, const std::string& what, int error) {
  throw LinkError(status, what + ": " + std::strerror(error));
}

Addresses resolve(const std::string& host, const std::string& port, bool passive) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    throw LinkError(Status::kPeerLost,
                    "cannot resolve " + host + ":" + port + ": " + ::gai_strerror(error));
  }
  return Addresses(found, &::freeaddrinfo);
}

Fd new_socket(const addrinfo& address) {
  return Fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof(value));  // tuning only: failure is harmless
}

// Gives a socket buffers for a long way at once. The kernel caps them at net.core.[rw]mem_max, and
// sizes them by itself no more: where it allows less, it does better alone.
void set_buffer(int fd, int name) {
  static const auto allows = [](const char* path) {
    long bytes = 0;
    return (std::ifstream(path) >> bytes) && bytes >= kDataBuffer;
  };
  static const bool receives = allows("/proc/sys/net/core/rmem_max");
  static const bool sends = allows("/proc/sys/net/core/wmem_max");
  if (name == SO_RCVBUF ? receives : sends) set(fd, SOL_SOCKET, name, kDataBuffer);
}

}  // namespace

Endpoint parse_endpoint(const std::string& text) {
  const size_t colon = text.rfind(':');
  Endpoint endpoint;
  if (colon != std::string::npos) {
    endpoint.host = text.substr(0, colon);
    endpoint.port = text.substr(colon + 1);
  }
  if (endpoint.host.size() > 2 && endpoint.host.front() == '[' && endpoint.host.back() == ']') {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  }
  const bool number = !endpoint.port.empty() && endpoint.port.size() <= 5 &&
                      endpoint.port.find_first_not_of("0123456789") == std::string::npos;
  const int port = number ? std::stoi(endpoint.port) : 0;
  if (endpoint.host.empty() || port < 1 || port > 65535) {
    throw std::invalid_argument("'" + text + "' is no KV endpoint; write HOST:PORT");
  }
  return endpoint;
}

Fd listen_on(const std::string& host, int port) {
  const Addresses addresses = resolve(host, std::to_string(port), true);
  Fd fd = new_socket(*addresses);
  if (!fd) fail(Status::kInvalid, "cannot create a socket", errno);
  set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  set_buffer(fd.get(), SO_RCVBUF);  // before listen, so that windows can scale
  if (::bind(fd.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
      ::listen(fd.get(), 256) != 0) {
    fail(Status::kInvalid, "cannot listen on " + host + ":" + std::to_string(port), errno);
  }
  return fd;
}

namespace {

std::string endpoint_of(int fd, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (ask(fd, address, &length) != 0 ||
      ::getnameinfo(address, length, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    throw LinkError(Status::kPeerLost, "cannot read the address of the receiver");
  }
  const std::string name = host;
  return (name.find(':') == std::string::npos ? name : "[" + name + "]") + ":" + port;
}

}  // namespace

std::string local_endpoint(int fd) { return endpoint_of(fd, ::getsockname); }
std::string remote_endpoint(int fd) { return endpoint_of(fd, ::getpeername); }

Fd connect_to(const Endpoint& endpoint, TimePoint deadline, int cancel_fd) {
  const Addresses addresses = resolve(endpoint.host, endpoint.port, false);
  const std::string where = endpoint.host + ":" + endpoint.port;
  int error = ECONNREFUSED, left = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    ++left;
  }
  // Each gets its part of the time: one may be of a network that swallows everything.
  for (const addrinfo* address = addresses.get(); left > 0; address = address->ai_next, --left) {
    Fd fd = new_socket(*address);
    if (!fd) {  // as of an IPv6 address where the kernel has none
      error = errno;
      continue;
    }
    set_buffer(fd.get(), SO_SNDBUF);
    if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return fd;
    error = errno;
    if (error != EINPROGRESS) continue;
    const TimePoint now = Clock::now();
    error = ETIMEDOUT;
    if (!wait_for(fd.get(), POLLOUT, now + (deadline - now) / left, cancel_fd)) continue;
    socklen_t length = sizeof(error);
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0) return fd;
  }
  if (error == ETIMEDOUT) {
    throw LinkError(Status::kTimeout, "no connection to " + where + " in time");
  }
  fail(Status::kPeerLost, "cannot connect to " + where, error);
}

void tune(int fd, bool data, bool mortal) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  if (data) {
    set_buffer(fd, SO_SNDBUF);
    set_buffer(fd, SO_RCVBUF);
  }
  if (!mortal) return;
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  // A network that is cut sends nothing. 10 s is sooner than a transfer's timeout, so that all who
  // wait learn it from the connection, and a new one is made.
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 4);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
}

size_t receive_some(int fd, void* buffer, size_t length) {
  const ssize_t moved = ::recv(fd, buffer, length, 0);
  if (moved > 0) return static_cast<size_t>(moved);
  if (moved == 0) throw LinkError(Status::kPeerLost, "the peer closed the connection");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  fail(Status::kPeerLost, "connection lost", errno);
}

size_t send_some(int fd, const void* buffer, size_t length) {
  const ssize_t moved = ::send(fd, buffer, length, MSG_NOSIGNAL);
  return moved_or_throw(moved, errno);
}

size_t moved_or_throw(ssize_t moved, int error) {
  if (moved >= 0) return static_cast<size_t>(moved);
  if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return 0;
  fail(Status::kPeerLost, "connection lost", error);
}

size_t send_queued(int fd, std::string* queued) {
  size_t sent = 0;
  while (sent < queued->size()) {
    const size_t moved = send_some(fd, queued->data() + sent, queued->size() - sent);
    if (moved == 0) break;
    sent += moved;
  }
  queued->erase(0, sent);
  return sent;
}

bool wait_for(int fd, short events, TimePoint deadline, int cancel_fd) {
  while (true) {
    pollfd watched[2] = {{fd, events, 0}, {cancel_fd, POLLIN, 0}};
    const int ready = ::poll(watched, 2, poll_timeout_ms(deadline));
    if (ready < 0 && errno != EINTR) fail(Status::kPeerLost, "poll", errno);
    if (watched[1].revents != 0) throw LinkError(Status::kClosed, "the sender was closed");
    if (ready > 0 && watched[0].revents != 0) return true;
    if (Clock::now() >= deadline) return false;
  }
}

void wait_until(std::vector<pollfd>* fds, TimePoint deadline) {
  timespec left{};
  if (deadline != TimePoint::min()) {
    const auto wanted = std::max(deadline - Clock::now(), Duration::zero()).count();
    left = {wanted / 1'000'000'000, wanted % 1'000'000'000};
  }
  ::ppoll(fds->data(), fds->size(), deadline == TimePoint::max() ? nullptr : &left, nullptr);
}

int poll_timeout_ms(TimePoint deadline) {
  if (deadline == TimePoint::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long>(left, 0, INT_MAX));
}

Fd make_event() {
  Fd fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd) fail(Status::kInvalid, "eventfd", errno);
  return fd;
}

void signal_event(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof(one));  // full means signalled
}

void clear_event(int fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd, &count, sizeof(count));
}

}  // namespace tetri
