// A write that the caller of a sender moves, because this library cannot: from a device's memory,
// or over a link that it does not know.
//
//             begin              placed, failed, staged
//   waiting ---------> begun ----------------------------> ended
//      |  the transfer is over: begin says false             ^
//      +-----------------------------------------------------+
//
// While an order is begun its transfer is not quiesced, and the receiver is told nothing that would
// let it use the slot again: a copy that the caller has submitted may still write.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "tetri/link.h"

namespace tetri {

// How a session's writes reach the receiver.
struct Route {
  std::string endpoint;
  std::string kind;   // of the link
  std::string offer;  // of that kind; for kinds without one, the path of the segment
  std::shared_ptr<const Segment> segment;  // on the same host
};
using RoutePtr = std::shared_ptr<const Route>;

// Thread-safe. One that is dropped before its end has failed.
class Order {
 public:
  Order(WriteOpPtr op, RoutePtr route, const Grant& grant)
      : op_(std::move(op)), route_(std::move(route)), grant_(grant) {}
  ~Order();

  const WriteOp& op() const { return *op_; }
  const std::string& endpoint() const { return route_->endpoint; }
  const std::string& offer() const { return route_->offer; }
  // "dma" also for memory of a device on a link of shared memory.
  std::string kind() const { return route_->kind == "shm" ? "dma" : route_->kind; }
  // Of the write's first byte, from where the receiver's slots count.
  uint64_t offset() const { return grant_.offset + op_->begin(); }

  // The slot's, by which the receiver's side can hold it.
  uint64_t generation() const { return grant_.generation; }
  uint32_t control() const { return grant_.control; }

  // False when the transfer is over: nothing may be read or written, and the order has ended.
  bool begin();
  // Whether the slot is still this transfer's; always true where that cannot be seen.
  bool live() const;
  // The ends throw std::invalid_argument unless the order is begun (`failed`: also before).
  void placed();
  void failed(const std::string& why);
  // Sends rows 0, 1, ... of `layout`, memory of this host, in place of the write's blocks.
  void staged(const LayoutPtr& layout);
  // Ended, and no thread reads what was staged.
  bool is_done() const;

 private:
  enum class State { kWaiting, kBegun, kEnded };
  void end();  // of a begun one; throws as above. mutex_ held

  const WriteOpPtr op_;
  const RoutePtr route_;
  const Grant grant_;
  mutable std::mutex mutex_;  // guards the next two
  State state_ = State::kWaiting;
  std::shared_ptr<const std::atomic<bool>> unread_;  // of what was staged
};
using OrderPtr = std::shared_ptr<Order>;

// Orders that wait for the caller, oldest first. Their number is bounded by the sender's
// max_queued_blocks.
class OrderQueue {
 public:
  void push(OrderPtr order);
  OrderPtr take(Duration timeout);  // blocks; none after the timeout, or when closed
  void withdraw(const Transfer& transfer);
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OrderPtr> orders_;
  bool closed_ = false;
};

}  // namespace tetri
