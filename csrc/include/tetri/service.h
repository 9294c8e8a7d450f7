// The one thread of a receiver: accepts, reads, answers, and ends what is overdue.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "tetri/connection.h"

namespace tetri {

// Owns the listening socket, all connections and the thread. Sleeps until a socket, the wake event
// or the next deadline.
class Service {
 public:
  // Throws LinkError when the address cannot be bound.
  explicit Service(ArenaState& state);
  ~Service() { stop(); }

  const std::string& endpoint() const { return endpoint_; }
  // `state.closing` must be set before. Idempotent.
  void stop();
  // The control connection of a session; null if there is none.
  Connection* session(uint64_t id);

 private:
  void run();
  void turn();
  void accept_some(TimePoint now);
  bool make_room(TimePoint now);
  void pause_accepting(TimePoint until);
  void serve(uint64_t id, uint32_t events, TimePoint now);
  void deliver(const Notice& notice, TimePoint now);
  void deliver_notices(TimePoint now);
  void end_overdue(TimePoint now);
  // The peer is gone for sure: no writer is left.
  void remove(uint64_t id, const std::string& reason, TimePoint now);
  // This side closes it. Slots of shared-memory writers stay in quarantine until the peer closes.
  void drop(Connection& connection, const std::string& reason, TimePoint now);
  void broke_protocol(Connection& connection, const std::string& reason, TimePoint now);
  void watch(Connection& connection);
  TimePoint next_wake();

  ArenaState& state_;
  Fd listener_;
  Fd epoll_;
  std::string endpoint_;
  uint64_t next_id_ = 2;  // 0 is the listener, 1 the wake event
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<uint64_t, uint64_t> sessions_;  // session -> control connection
  std::set<uint64_t> unauthenticated_;               // without a proof yet, oldest first
  std::unordered_map<uint64_t, bool> watching_write_;
  TimePoint accept_again_ = TimePoint::max();
  TimePoint next_sweep_ = TimePoint::max();
  uint64_t announced_settled_ = 0;
  std::thread thread_;
};

}  // namespace tetri
