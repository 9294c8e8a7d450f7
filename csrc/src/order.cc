#include "tetri/order.h"

#include <algorithm>
#include <stdexcept>

namespace tetri {

Order::~Order() {
  const bool was_begun = state_ == State::kBegun;
  if (state_ == State::kEnded || (!was_begun && op_->transfer->stopped())) return;
  op_->transfer->fail(Status::kInvalid, "the order for a write was dropped without an end");
  if (was_begun) op_->transfer->end_copy(0);
  op_->transfer->order_ended(op_);
}

bool Order::begin() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kBegun) throw std::invalid_argument("the order was begun before");
  if (state_ == State::kEnded) return false;
  const bool goes_on = op_->transfer->begin_copy();
  state_ = goes_on ? State::kBegun : State::kEnded;
  if (goes_on) op_->transfer->order_begun();
  return goes_on;
}

bool Order::live() const {
  return !route_->segment || route_->segment->control()[grant_.control].is_of(grant_.generation);
}

void Order::placed() {
  if (route_->kind == "tcp") throw std::invalid_argument("orders of kind tcp are staged");
  const std::lock_guard lock(mutex_);
  end();
  if (route_->segment) {
    route_->segment->control()[grant_.control].progress.fetch_add(1, std::memory_order_release);
  }
  op_->transfer->end_copy(op_->bytes());
  op_->transfer->order_ended(op_);
}

void Order::failed(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kEnded) throw std::invalid_argument("the order has ended");
  op_->transfer->fail(Status::kInvalid, why);
  if (state_ == State::kBegun) op_->transfer->end_copy(0);
  state_ = State::kEnded;
  op_->transfer->order_ended(op_);
}

void Order::staged(const LayoutPtr& layout) {
  const Layout& wanted = *op_->layout;
  if (layout->is_device() || layout->block_bytes() != wanted.block_bytes() ||
      layout->payload_bytes() != wanted.payload_bytes() || layout->num_blocks() < op_->ids.size()) {
    throw std::invalid_argument("what is staged must be in host memory, with " +
                                std::to_string(op_->ids.size()) + " blocks of " +
                                std::to_string(wanted.block_bytes()) + " bytes");
  }
  if (route_->kind != "tcp") throw std::invalid_argument("only orders of kind tcp are staged");
  const std::lock_guard lock(mutex_);
  end();
  op_->transfer->end_copy(0);
  unread_ = op_->transfer->order_staged(*op_, layout);
}

bool Order::is_done() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kEnded &&
         (!unread_ || unread_->load(std::memory_order_acquire) || op_->transfer->quiesced());
}

void Order::end() {
  if (state_ != State::kBegun) throw std::invalid_argument("the order was not begun, or has ended");
  state_ = State::kEnded;
}

void OrderQueue::push(OrderPtr order) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  orders_.push_back(std::move(order));
  changed_.notify_one();
}

OrderPtr OrderQueue::take(Duration timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return closed_ || !orders_.empty(); });
  if (closed_ || orders_.empty()) return nullptr;
  OrderPtr order = std::move(orders_.front());
  orders_.pop_front();
  return order;
}

void OrderQueue::withdraw(const Transfer& transfer) {
  std::deque<OrderPtr> withdrawn;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  const auto first = std::stable_partition(orders_.begin(), orders_.end(), [&](const auto& order) {
    return order->op().transfer.get() != &transfer;
  });
  withdrawn.insert(withdrawn.end(), std::make_move_iterator(first),
                   std::make_move_iterator(orders_.end()));
  orders_.erase(first, orders_.end());
}

void OrderQueue::close() {
  std::deque<OrderPtr> withdrawn;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  withdrawn.swap(orders_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace tetri
