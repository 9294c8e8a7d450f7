// The prefill side: dials receivers and pushes blocks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tetri/frame.h"
#include "tetri/order.h"
#include "tetri/peer.h"
#include "tetri/transfer.h"

namespace tetri {

struct SenderOptions {
  Identity identity;
  uint32_t rank = 0;
  uint32_t num_ranks = 1;
  std::vector<std::string> links{"shm", "tcp"};  // kinds, the best one first
  uint32_t streams = 2;
  Duration open_timeout{};
  Duration io_timeout{};
  uint64_t max_queued_blocks = 1 << 20;
  std::optional<Emulated> emulated;  // by delays; none: as fast as it is
  std::string key;                   // receivers must prove that they hold it; empty: any will do
};

// What a sender, its transfers and its peers' threads share; outlives each of them.
struct SenderShared {
  explicit SenderShared(SenderOptions wanted) : options(std::move(wanted)) {}

  const SenderOptions options;
  std::atomic<uint64_t> queued_blocks{0};
  OrderQueue orders;

  std::mutex mutex;  // guards everything below; taken last
  std::condition_variable changed;
  uint64_t settled = 0;  // transfers that are over
  bool closed = false;
  std::set<std::pair<std::string, std::string>> excluded;  // (endpoint, kind of link)

  bool is_excluded(const std::string& endpoint, const std::string& kind) {
    const std::lock_guard lock(mutex);
    return excluded.count({endpoint, kind}) != 0;
  }
};

// Thread-safe. Owns one thread for each receiver that it has talked to lately.
class Sender {
 public:
  // Throws std::invalid_argument.
  explicit Sender(SenderOptions options);
  ~Sender();

  // Throws std::invalid_argument for a malformed endpoint or size.
  TransferPtr open(const std::string& endpoint, const std::string& transfer, uint64_t num_blocks,
                   uint64_t block_bytes);
  Status send(const std::string& endpoint, std::string message, Duration timeout);  // blocks
  bool wait(Duration timeout);                                                      // blocks
  OrderPtr take_order(Duration timeout);  // blocks; none in time, or when closed
  // Uses this kind of link to the endpoint no more. A session that does is lost.
  void exclude(const std::string& endpoint, const std::string& kind);
  void close();

 private:
  std::shared_ptr<Peer> peer(const std::string& endpoint);  // mutex_ held

  const std::shared_ptr<SenderShared> shared_;
  std::mutex mutex_;  // guards the next two
  bool closed_ = false;
  std::unordered_map<std::string, std::shared_ptr<Peer>> peers_;
  uint64_t seen_settled_ = 0;
};

}  // namespace tetri
