// One request's blocks on their way to one receiver, and the work items that move them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tetri/layout.h"
#include "tetri/status.h"

namespace tetri {

enum class TransferState : uint32_t {
  kOpening = 0,
  kSending = 1,
  kDone = 2,
  kFailed = 3,
  kCancelled = 4,
};

struct Command;
struct SenderShared;
class Peer;
class Transfer;
using TransferPtr = std::shared_ptr<Transfer>;

// A run of blocks to send. Slot blocks start at first_block.
struct WriteOp {
  WriteOp(TransferPtr transfer, LayoutPtr layout, uint64_t first_block, std::vector<int32_t> ids,
          uint64_t tag = 0);
  WriteOp(const WriteOp&) = delete;
  WriteOp& operator=(const WriteOp&) = delete;
  ~WriteOp();  // gives the blocks' room in the sender's queue back

  const TransferPtr transfer;
  const LayoutPtr layout;
  const uint64_t first_block;
  const std::vector<int32_t> ids;
  const uint64_t tag;  // the caller's, for orders
  const TimePoint started = Clock::now();
  std::shared_ptr<std::atomic<bool>> unread;  // set when this ends, if there is one

  uint64_t begin() const { return first_block * layout->block_bytes(); }
  uint64_t span() const { return ids.size() * layout->block_bytes(); }
  uint64_t bytes() const { return ids.size() * layout->payload_bytes(); }
};
using WriteOpPtr = std::shared_ptr<WriteOp>;

// A message, whose sender waits until it is settled.
struct MessageOp {
  std::string payload;
  std::mutex mutex;
  std::condition_variable changed;
  Status status = Status::kPending;

  void settle(Status result);
  Status wait(Duration timeout);  // blocks; kTimeout when it takes longer
};
using MessageOpPtr = std::shared_ptr<MessageOp>;

// Thread-safe. Callers use the first half, the peer's thread the second.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<SenderShared> shared, std::shared_ptr<Peer> peer, std::string name,
           uint64_t num_blocks, uint64_t block_bytes);

  const std::string& name() const { return name_; }
  uint64_t num_blocks() const { return num_blocks_; }
  uint64_t block_bytes() const { return block_bytes_; }
  TransferState state() const;
  Status status() const;
  std::string error() const;
  std::string link() const;
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  bool quiesced() const;
  // Throws std::invalid_argument for ids or ranges outside of the layout or the slot.
  Status write(LayoutPtr layout, uint64_t first_block, std::vector<int32_t> ids, uint64_t tag = 0);
  void finish();
  void cancel();

  // False when the transfer is over: neither the source nor the slot may be touched. Pairs with
  // end_copy; copies may overlap.
  bool begin_copy();
  void end_copy(uint64_t bytes);
  // Whether a copy is under way. Once the transfer is over, none begins any more.
  bool is_copying() const;
  // Grows whenever bytes were sent or an order was begun.
  uint64_t progress() const { return bytes_sent() + orders_begun_.load(std::memory_order_relaxed); }
  // An order of this transfer was begun, was ended, or is sent as `staged` now.
  void order_begun() { orders_begun_.fetch_add(1, std::memory_order_relaxed); }
  void order_ended(WriteOpPtr op);
  // Returns what becomes true as soon as no thread reads `layout` any more.
  std::shared_ptr<std::atomic<bool>> order_staged(const WriteOp& op, LayoutPtr layout);
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }
  void granted(const std::string& link);
  void confirmed();
  void fail(Status status, const std::string& error);
  void release_room(uint64_t num_blocks);
  TimePoint open_deadline() const { return open_deadline_; }

 private:
  bool post(Command command) const;
  void check(const Layout& layout, uint64_t first_block, const std::vector<int32_t>& ids) const;
  void settle(TransferState state, Status status, const std::string& error);  // mutex_ held

  const std::shared_ptr<SenderShared> shared_;
  const std::shared_ptr<Peer> peer_;  // none: the sender was closed before
  const std::string name_;
  const uint64_t num_blocks_;
  const uint64_t block_bytes_;
  const TimePoint open_deadline_;
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> orders_begun_{0};
  std::atomic<bool> stopped_{false};

  mutable std::mutex mutex_;  // guards everything below
  TransferState state_ = TransferState::kOpening;
  Status status_ = Status::kPending;
  std::string error_;
  std::string link_;
  uint64_t copies_ = 0;  // under way
  bool finishing_ = false;
  std::vector<uint64_t> missing_;  // bytes of each slot block that no write has named
};

}  // namespace tetri
