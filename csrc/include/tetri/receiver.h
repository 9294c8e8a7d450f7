// The decode side: an arena, a port, and what has arrived.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tetri/arena_state.h"

namespace tetri {

class Service;

struct ReceiverStats : TableCounters, ReceiverCounters {
  uint64_t arena_total_bytes = 0, arena_used_bytes = 0, quarantined_bytes = 0;
  uint64_t slots = 0, filling = 0, unclaimed = 0, quarantined = 0;
};

// Thread-safe. Owns the segment and the service thread; `close` ends both and wakes all waiters.
class Receiver {
 public:
  // Throws std::runtime_error (no room, address in use) or std::invalid_argument.
  explicit Receiver(const ReceiverOptions& options);
  ~Receiver();

  const std::string& endpoint() const { return endpoint_; }
  const std::string& segment() const { return state_.segment.path(); }
  // Adds to what later senders are offered. Throws std::invalid_argument: see check_offers.
  void offer(const std::string& kind, const std::string& bytes);
  std::optional<Slot> find(const std::string& transfer);
  bool wait(Duration timeout);  // blocks
  std::optional<Slot> take(const std::string& transfer);
  void release(const std::string& transfer);
  void cancel(const std::string& transfer);
  void abandon(const std::string& prefix, const std::vector<std::string>& kept,
               const std::string& reason);
  std::optional<std::string> receive();  // the oldest message, if there is one
  ReceiverStats stats();
  void close();

 private:
  ArenaState state_;
  std::unique_ptr<Service> service_;
  std::string endpoint_;
  uint64_t seen_settled_ = 0;
  std::mutex closing_;
};

}  // namespace tetri
