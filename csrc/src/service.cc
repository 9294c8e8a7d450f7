#include "tetri/service.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <exception>
#include <vector>

namespace tetri {

namespace {

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
constexpr int kAcceptsPerTurn = 32;
constexpr auto kAcceptPause = std::chrono::seconds(1);
constexpr size_t kMaxUnauthenticated = 256;  // dials of 9 instances with 8 ranks, and streams

void control_epoll(int epoll, int operation, int fd, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, operation, fd, &event) != 0) {
    throw LinkError(Status::kInvalid, "epoll_ctl failed");
  }
}

}  // namespace

Service::Service(ArenaState& state)
    : state_(state),
      listener_(listen_on(state.options.host, state.options.port)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      endpoint_(local_endpoint(listener_.get())) {
  control_epoll(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), EPOLLIN, kListener);
  control_epoll(epoll_.get(), EPOLL_CTL_ADD, state_.wake.get(), EPOLLIN, kWake);
  thread_ = std::thread(&Service::run, this);
  ::pthread_setname_np(thread_.native_handle(), "tetri-receiver");
}

void Service::stop() {
  if (!thread_.joinable()) return;
  signal_event(state_.wake.get());
  thread_.join();
  connections_.clear();
  listener_.reset();
  epoll_.reset();
}

Connection* Service::session(uint64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return nullptr;
  const auto connection = connections_.find(found->second);
  if (connection == connections_.end() || !connection->second->is_control()) return nullptr;
  return connection->second.get();
}

void Service::run() {
  while (true) {
    {
      const std::lock_guard lock(state_.mutex);
      if (state_.closing) return;
    }
    turn();
  }
}

void Service::turn() {
  std::array<epoll_event, 64> events{};
  const TimePoint wake = next_wake();
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 poll_timeout_ms(wake));
  const TimePoint now = Clock::now();
  for (int index = 0; index < ready; ++index) {
    const uint64_t id = events[static_cast<size_t>(index)].data.u64;
    if (id == kListener) {
      accept_some(now);
    } else if (id == kWake) {
      clear_event(state_.wake.get());
    } else {
      serve(id, events[static_cast<size_t>(index)].events, now);
    }
  }
  end_overdue(now);
  deliver_notices(now);
}

void Service::accept_some(TimePoint now) {
  for (int count = 0; count < kAcceptsPerTurn; ++count) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      const bool nothing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      if (!nothing) pause_accepting(now + kAcceptPause);  // out of descriptors or memory
      return;
    }
    if (!make_room(now)) continue;  // closes it
    tune(fd.get(), false, false);
    const uint64_t id = next_id_++;
    std::unique_ptr<Connection> connection;
    try {
      connection = std::make_unique<Connection>(id, std::move(fd), state_, *this, now);
      control_epoll(epoll_.get(), EPOLL_CTL_ADD, connection->fd(), EPOLLIN, id);
    } catch (const LinkError&) {  // out of memory, or of watches
      return pause_accepting(now + kAcceptPause);
    }
    if (connection->is_unauthenticated()) unauthenticated_.insert(id);
    next_sweep_ = std::min(next_sweep_, connection->deadline());
    connections_.emplace(id, std::move(connection));
  }
}

// Unauthenticated connections never take the place of peers. The oldest of too many is closed: a
// peer proves itself within milliseconds.
bool Service::make_room(TimePoint now) {
  if (connections_.size() - unauthenticated_.size() >= state_.options.max_connections) return false;
  if (unauthenticated_.size() >= kMaxUnauthenticated)
    remove(*unauthenticated_.begin(), "too many unauthenticated connections", now);
  return true;
}

void Service::pause_accepting(TimePoint until) {
  control_epoll(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), 0, kListener);
  accept_again_ = until;
}

void Service::serve(uint64_t id, uint32_t events, TimePoint now) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  try {
    if ((events & EPOLLOUT) != 0) connection.writable(now);
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) connection.readable(now);
    if (!connection.is_unauthenticated()) unauthenticated_.erase(id);
    if (connection.is_control()) sessions_[connection.session_id()] = id;
  } catch (const FrameError& error) {
    return broke_protocol(connection, error.what(), now);
  } catch (const LinkError& error) {
    if (error.status == Status::kPeerLost) return remove(id, error.what(), now);
    return drop(connection, error.what(), now);
  } catch (const std::exception& error) {  // a fault of this side: no other connection pays for it
    return broke_protocol(connection, error.what(), now);
  }
  watch(connection);
  next_sweep_ = std::min(next_sweep_, connection.deadline());
}

void Service::broke_protocol(Connection& connection, const std::string& reason, TimePoint now) {
  {
    const std::lock_guard lock(state_.mutex);
    ++(connection.is_unauthenticated() ? state_.counters.refused_unauthenticated
                                       : state_.counters.bad_frames);
  }
  try {
    connection.refuse(reason, now);
  } catch (const LinkError& error) {
    if (error.status == Status::kPeerLost) return remove(connection.id(), error.what(), now);
  }
  drop(connection, reason, now);
}

void Service::drop(Connection& connection, const std::string& reason, TimePoint now) {
  connection.drain(now);
  {
    const std::lock_guard lock(state_.mutex);
    state_.table.connection_dropped(connection.writer(), reason, now);
  }
  watch(connection);
  next_sweep_ = std::min(next_sweep_, connection.deadline());
}

void Service::remove(uint64_t id, const std::string& reason, TimePoint now) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const std::unique_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  unauthenticated_.erase(id);
  watching_write_.erase(id);
  const auto session = sessions_.find(connection->session_id());
  const bool is_session = session != sessions_.end() && session->second == id;
  if (is_session) sessions_.erase(session);
  const Connection* control = is_session ? nullptr : this->session(connection->session_id());
  // A session needs all of its data connections, and its sender may not know of the loss: what it
  // has sent is still read, then the session ends.
  if (control != nullptr) ::shutdown(control->fd(), SHUT_RDWR);
  const std::lock_guard lock(state_.mutex);
  // A data connection carries its session's name.
  state_.table.connection_lost(connection->writer(), reason, now);
  state_.counters.connections = connections_.size();
}

void Service::watch(Connection& connection) {
  bool& watching = watching_write_[connection.id()];
  const bool wanted = connection.wants_write();
  if (watching == wanted) return;
  watching = wanted;
  control_epoll(epoll_.get(), EPOLL_CTL_MOD, connection.fd(), wanted ? EPOLLIN | EPOLLOUT : EPOLLIN,
                connection.id());
}

void Service::deliver(const Notice& notice, TimePoint now) {
  const auto found = connections_.find(notice.connection);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  try {
    connection.notify(notice, now);
    watch(connection);
    next_sweep_ = std::min(next_sweep_, connection.deadline());
  } catch (const LinkError& error) {
    if (error.status == Status::kPeerLost) {
      remove(notice.connection, error.what(), now);
    } else {
      drop(connection, error.what(), now);
    }
  }
}

void Service::deliver_notices(TimePoint now) {
  const auto take = [this] {
    const std::lock_guard lock(state_.mutex);
    return state_.table.take_notices();
  };
  // Those that cannot be told are dropped, which others are told.
  for (std::vector<Notice> notices = take(); !notices.empty(); notices = take()) {
    for (const Notice& notice : notices) deliver(notice, now);
  }
  const std::lock_guard lock(state_.mutex);  // after the peers: those wait for one another
  state_.counters.connections = connections_.size();
  const uint64_t settled = state_.table.counters().settled;
  if (settled != announced_settled_) state_.changed.notify_all();
  announced_settled_ = settled;
}

void Service::end_overdue(TimePoint now) {
  if (accept_again_ <= now) {
    accept_again_ = TimePoint::max();
    control_epoll(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), EPOLLIN, kListener);
  }
  {
    const std::lock_guard lock(state_.mutex);
    state_.table.expire(now);
  }
  if (now < next_sweep_) return;
  next_sweep_ = TimePoint::max();
  std::vector<uint64_t> overdue;
  for (const auto& [id, connection] : connections_) {
    if (connection->deadline() <= now) {
      overdue.push_back(id);
    } else {
      next_sweep_ = std::min(next_sweep_, connection->deadline());
    }
  }
  for (const uint64_t id : overdue) {
    Connection& connection = *connections_.at(id);
    const std::string reason = "it stalled in the middle of a frame or of the handshake";
    if (connection.writes_shared() && !connection.draining()) {
      drop(connection, reason, now);
    } else {
      remove(id, reason, now);  // nothing but this connection could write for it
    }
  }
}

TimePoint Service::next_wake() {
  const std::lock_guard lock(state_.mutex);
  return std::min({state_.table.next_deadline(), next_sweep_, accept_again_});
}

}  // namespace tetri
