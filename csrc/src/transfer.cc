#include "tetri/transfer.h"

#include <algorithm>
#include <numeric>

#include "tetri/peer.h"
#include "tetri/sender.h"

namespace tetri {

namespace {

bool is_over(TransferState state) {
  return state == TransferState::kDone || state == TransferState::kFailed ||
         state == TransferState::kCancelled;
}

}  // namespace

void MessageOp::settle(Status result) {
  const std::lock_guard lock(mutex);
  if (status == Status::kPending) status = result;
  changed.notify_all();
}

Status MessageOp::wait(Duration timeout) {
  std::unique_lock lock(mutex);
  if (!changed.wait_for(lock, timeout, [&] { return status != Status::kPending; })) {
    status = Status::kTimeout;
  }
  return status;
}

WriteOp::WriteOp(TransferPtr transfer, LayoutPtr layout, uint64_t first_block,
                 std::vector<int32_t> ids, uint64_t tag)
    : transfer(std::move(transfer)),
      layout(std::move(layout)),
      first_block(first_block),
      ids(std::move(ids)),
      tag(tag) {}

WriteOp::~WriteOp() {
  transfer->release_room(ids.size());
  if (unread) unread->store(true, std::memory_order_release);
}

Transfer::Transfer(std::shared_ptr<SenderShared> shared, std::shared_ptr<Peer> peer,
                   std::string name, uint64_t num_blocks, uint64_t block_bytes)
    : shared_(std::move(shared)),
      peer_(std::move(peer)),
      name_(std::move(name)),
      num_blocks_(num_blocks),
      block_bytes_(block_bytes),
      open_deadline_(Clock::now() + shared_->options.open_timeout),
      missing_(num_blocks, block_bytes) {}

TransferState Transfer::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

Status Transfer::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

std::string Transfer::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::string Transfer::link() const {
  const std::lock_guard lock(mutex_);
  return link_;
}

bool Transfer::quiesced() const {
  const std::lock_guard lock(mutex_);
  return is_over(state_) && copies_ == 0;
}

bool Transfer::post(Command command) const { return peer_ && peer_->post(std::move(command)); }

void Transfer::check(const Layout& layout, uint64_t first_block,
                     const std::vector<int32_t>& ids) const {
  if (layout.block_bytes() != block_bytes_) {
    throw std::invalid_argument("transfer " + name_ + " was opened with blocks of " +
                                std::to_string(block_bytes_) + " bytes, the layout has " +
                                std::to_string(layout.block_bytes()));
  }
  if (first_block > num_blocks_ || ids.size() > num_blocks_ - first_block) {
    throw std::invalid_argument("transfer " + name_ + ": blocks " + std::to_string(first_block) +
                                " to " + std::to_string(first_block + ids.size()) +
                                " are outside its " + std::to_string(num_blocks_) + " blocks");
  }
  layout.check_ids(ids);
}

Status Transfer::write(LayoutPtr layout, uint64_t first_block, std::vector<int32_t> ids,
                       uint64_t tag) {
  check(*layout, first_block, ids);
  const uint64_t count = ids.size();
  std::unique_lock lock(mutex_);
  if (is_over(state_)) return state_ == TransferState::kDone ? Status::kInvalid : status_;
  if (finishing_) return Status::kInvalid;
  if (count == 0) return Status::kOk;
  if (shared_->queued_blocks.fetch_add(count) + count > shared_->options.max_queued_blocks) {
    shared_->queued_blocks.fetch_sub(count);
    settle(TransferState::kFailed, Status::kFull,
           "more than " + std::to_string(shared_->options.max_queued_blocks) +
               " blocks are queued for sending; the receiver or the link is too slow");
    lock.unlock();
    post({Command::Kind::kCancel, shared_from_this(), nullptr, nullptr});
    return Status::kFull;
  }
  const uint64_t bytes = layout->payload_bytes();
  for (uint64_t block = first_block; block < first_block + count; ++block) {
    missing_[block] -= std::min(missing_[block], bytes);
  }
  auto op = std::make_shared<WriteOp>(shared_from_this(), std::move(layout), first_block,
                                      std::move(ids), tag);
  // Posted under the lock, so that a write never overtakes another one or its finish.
  const bool posted = post({Command::Kind::kWrite, op->transfer, op, nullptr});
  return posted ? Status::kOk : Status::kClosed;
}

void Transfer::finish() {
  std::unique_lock lock(mutex_);
  if (is_over(state_) || finishing_) return;
  finishing_ = true;
  for (uint64_t block = 0; block < num_blocks_; ++block) {
    if (missing_[block] == 0) continue;
    settle(TransferState::kFailed, Status::kInvalid,
           "finished although block " + std::to_string(block) + " of " +
               std::to_string(num_blocks_) + " was never written, or not all of it");
    lock.unlock();
    post({Command::Kind::kCancel, shared_from_this(), nullptr, nullptr});
    return;
  }
  post({Command::Kind::kFinish, shared_from_this(), nullptr, nullptr});
}

void Transfer::cancel() {
  {
    const std::lock_guard lock(mutex_);
    if (is_over(state_)) return;
    settle(TransferState::kCancelled, Status::kCancelled, "cancelled");
  }
  post({Command::Kind::kCancel, shared_from_this(), nullptr, nullptr});
}

bool Transfer::begin_copy() {
  const std::lock_guard lock(mutex_);
  if (is_over(state_)) return false;
  ++copies_;
  return true;
}

void Transfer::end_copy(uint64_t bytes) {
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  --copies_;
}

bool Transfer::is_copying() const {
  const std::lock_guard lock(mutex_);
  return copies_ > 0;
}

void Transfer::order_ended(WriteOpPtr op) {
  post({Command::Kind::kOrderEnded, shared_from_this(), std::move(op), nullptr});
}

std::shared_ptr<std::atomic<bool>> Transfer::order_staged(const WriteOp& op, LayoutPtr layout) {
  std::vector<int32_t> rows(op.ids.size());
  std::iota(rows.begin(), rows.end(), 0);
  layout->check_ids(rows);
  shared_->queued_blocks.fetch_add(rows.size());  // given back with the write
  auto staged = std::make_shared<WriteOp>(shared_from_this(), std::move(layout), op.first_block,
                                          std::move(rows));
  const auto unread = staged->unread = std::make_shared<std::atomic<bool>>(false);
  post({Command::Kind::kStaged, shared_from_this(), std::move(staged), nullptr});
  return unread;
}

void Transfer::granted(const std::string& link) {
  const std::lock_guard lock(mutex_);
  if (is_over(state_)) return;
  state_ = TransferState::kSending;
  link_ = link;
}

void Transfer::confirmed() {
  const std::lock_guard lock(mutex_);
  if (!is_over(state_)) settle(TransferState::kDone, Status::kOk, "");
}

void Transfer::fail(Status status, const std::string& error) {
  const std::lock_guard lock(mutex_);
  const bool is_ours = status == Status::kClosed;  // this side ended it
  if (!is_over(state_)) {
    settle(is_ours ? TransferState::kCancelled : TransferState::kFailed, status, printable(error));
  }
}

void Transfer::release_room(uint64_t num_blocks) { shared_->queued_blocks.fetch_sub(num_blocks); }

void Transfer::settle(TransferState state, Status status, const std::string& error) {
  state_ = state;
  status_ = status;
  error_ = error;
  stopped_.store(true, std::memory_order_release);
  const std::lock_guard lock(shared_->mutex);
  ++shared_->settled;
  shared_->changed.notify_all();
}

}  // namespace tetri
