// What a peer's thread does with the receiver's answers, and when transfers end.
#include <poll.h>

#include "tetri/peer.h"
#include "tetri/sender.h"

namespace tetri {

namespace {

constexpr auto kOrderTime = std::chrono::seconds(5);  // that a closing sender waits for orders

Status status_of(uint32_t wire) {
  return wire < kNumStatuses ? static_cast<Status>(wire) : Status::kInvalid;
}

}  // namespace

// A write of a slot that was granted: by this library, or as an order.
void Peer::write(Entry& entry, const WriteOpPtr& op) {
  if (entry.pending_writes++ == 0) entry.progress = Clock::now();
  entry.bytes_queued += op->bytes();
  if (op->layout->is_device() || !is_moved_here(session_.route->kind)) return order(entry, op);
  session_.link->write(entry.grant, op);
}

void Peer::order(const Entry& entry, const WriteOpPtr& op) {
  const Segment* segment = session_.route->segment.get();
  const bool fits =
      segment == nullptr || (needs_host_memory(session_.route->kind)
                                 ? is_inside(*segment, entry.grant, op->begin(), op->span())
                                 : entry.grant.control < kMaxSlots);
  if (fits) return shared_->orders.push(std::make_shared<Order>(op, session_.route, entry.grant));
  op->transfer->fail(Status::kInvalid, "the receiver granted a slot outside its arena");
  op->transfer->order_ended(op);
}

void Peer::order_ended(const WriteOpPtr& op) {
  reap();
  const Entry* entry = find(op->transfer);
  if (entry == nullptr) return;
  if (!entry->transfer->stopped()) {
    if (!session_.route->segment) session_.control->send(encode(Progress{entry->grant.generation}));
    return pacer_.add(op);
  }
  leave(op->transfer, encode(Cancel{entry->grant.generation, op->transfer->error()}));
}

// Lets receivers of lost sessions know once all of their orders have ended; true when none is left.
bool Peer::reap() {
  const auto has_ended = [](const Remnant& remnant) {
    return std::none_of(remnant.transfers.begin(), remnant.transfers.end(),
                        [](const TransferPtr& transfer) { return transfer->is_copying(); });
  };
  remnants_.erase(std::remove_if(remnants_.begin(), remnants_.end(), has_ended), remnants_.end());
  return remnants_.empty();
}

// Connections of orders that never end stay open, so that no receiver reuses their slots while this
// process lives.
void Peer::await_orders() {
  const TimePoint deadline = Clock::now() + kOrderTime;
  while (!reap() && Clock::now() < deadline) {
    pollfd woken{wake_.get(), POLLIN, 0};
    ::poll(&woken, 1, poll_timeout_ms(deadline));
    clear_event(wake_.get());
  }
  for (Remnant& remnant : remnants_) remnant.control->leak();
  remnants_.clear();  // transfers hold their peer
}

void Peer::handle(const Frame& frame) {
  switch (frame.type) {
    case Type::kOpened:
      return handle_opened(decode<Opened>(frame));
    case Type::kStop:
      return handle_stop(decode<Stop>(frame));
    case Type::kConfirm: {
      const auto found = generations_.find(decode<Confirm>(frame).generation);
      if (found == generations_.end()) return;
      const uint64_t request = found->second;
      if (!entries_.at(request).done_sent) throw FrameError("a confirmation before the end");
      const TransferPtr transfer = entries_.at(request).transfer;
      transfer->confirmed();
      generations_.erase(found);
      requests_.erase(transfer.get());
      entries_.erase(request);
      last_used_ = Clock::now();
      return;
    }
    case Type::kMessageAck: {
      const auto ack = decode<MessageAck>(frame);
      const auto found = messages_.find(ack.id);
      if (found == messages_.end()) return;
      found->second->settle(status_of(ack.status));
      messages_.erase(found);
      const std::lock_guard lock(mutex_);
      --queued_messages_;
      return;
    }
    case Type::kRefused:
      throw LinkError(Status::kRefused, printable(decode<Refused>(frame).reason));
    default:
      throw FrameError("unexpected frame type " + std::to_string(static_cast<int>(frame.type)));
  }
}

void Peer::handle_opened(const Opened& opened) {
  const auto found = entries_.find(opened.request);
  if (found == entries_.end() || found->second.granted) throw FrameError("an answer to nothing");
  Entry& entry = found->second;
  const TransferPtr transfer = entry.transfer;
  const bool granted = opened.status == static_cast<uint32_t>(Status::kOk);
  if (granted && !transfer->stopped()) {
    entry.granted = true;
    entry.grant = {opened.generation, opened.offset, opened.control};
    generations_[opened.generation] = opened.request;
    transfer->granted(session_.route->kind);
    std::deque<Command> waiting = std::move(entry.waiting);
    for (Command& command : waiting) apply_granted(entry, command);
    return;
  }
  if (granted) {
    session_.control->send(encode(Cancel{opened.generation, "cancelled before it was granted"}));
  } else {
    transfer->fail(status_of(opened.status), printable(opened.error));
  }
  requests_.erase(transfer.get());
  entries_.erase(found);
}

void Peer::handle_stop(const Stop& stop) {
  const auto found = generations_.find(stop.generation);
  if (found != generations_.end()) {
    const uint64_t request = found->second;
    const TransferPtr transfer = entries_.at(request).transfer;
    transfer->fail(status_of(stop.status), printable(stop.reason));
    return leave(transfer, encode(Stopped{stop.generation}));
  }
  // No order of this slot is begun, and this thread is here: nothing of it is being written.
  session_.control->send(encode(Stopped{stop.generation}));
}

Peer::Entry* Peer::find(const TransferPtr& transfer) {
  const auto request = requests_.find(transfer.get());
  return request == requests_.end() ? nullptr : &entries_.at(request->second);
}

// The transfer is over on this side: the receiver must know. Before the grant there is nothing to
// name; then the answer to open is what gets cancelled.
void Peer::cancelled(const TransferPtr& transfer) {
  Entry* entry = find(transfer);
  if (entry == nullptr) return;
  entry->waiting.clear();
  if (entry->granted) leave(transfer, encode(Cancel{entry->grant.generation, transfer->error()}));
}

// Says goodbye to the slot of a transfer that is over, unless an order is begun: then its end calls
// this again.
void Peer::leave(const TransferPtr& transfer, std::string goodbye) {
  const uint64_t request = requests_.at(transfer.get());
  Entry& entry = entries_.at(request);
  if (entry.goodbye.empty()) entry.goodbye = std::move(goodbye);
  session_.link->cancel(*transfer);
  shared_->orders.withdraw(*transfer);
  if (transfer->is_copying()) return;
  const std::string said = std::move(entry.goodbye);
  generations_.erase(entry.grant.generation);
  entries_.erase(request);
  requests_.erase(transfer.get());
  session_.control->send(said);
}

void Peer::drop(Command& command, Status status, const std::string& error) {
  if (command.kind == Command::Kind::kOpen) command.transfer->fail(status, error);
  if (command.message) {
    command.message->settle(status);
    const std::lock_guard lock(mutex_);
    --queued_messages_;
  }
}

void Peer::collect_completed() {
  for (const WriteOpPtr& op : session_.link->take_completed()) pacer_.add(op);
  while (const WriteOpPtr op = pacer_.next(Clock::now())) completed(op);
}

void Peer::completed(const WriteOpPtr& op) {
  Entry* entry = find(op->transfer);
  if (entry == nullptr) return;
  --entry->pending_writes;
  entry->progress = Clock::now();
  if (entry->transfer->stopped()) {
    cancelled(op->transfer);
  } else {
    finish_if_ready(*entry);
  }
}

// Fails what has waited for too long; returns when to look again.
TimePoint Peer::end_overdue() {
  const TimePoint now = Clock::now();
  TimePoint next = TimePoint::max();
  std::vector<std::pair<TransferPtr, std::string>> overdue;
  for (auto& [request, entry] : entries_) {
    if (entry.transfer->stopped()) continue;
    TimePoint deadline = TimePoint::max();
    if (!entry.granted) {
      deadline = entry.transfer->open_deadline();
    } else if (entry.pending_writes > 0 || entry.done_sent) {
      const uint64_t progress = entry.transfer->progress();
      if (progress != entry.seen_progress) entry.progress = now;
      entry.seen_progress = progress;
      deadline = entry.progress + shared_->options.io_timeout;
    }
    if (deadline > now) {
      next = std::min(next, deadline);
    } else {
      overdue.emplace_back(entry.transfer, entry.granted ? "no progress within io_timeout_s"
                                                         : "no slot within open_timeout_s");
    }
  }
  for (const auto& [transfer, error] : overdue) {
    transfer->fail(Status::kTimeout, error);
    cancelled(transfer);
  }
  const bool unused = entries_.empty() && messages_.empty();
  return unused ? std::min(next, last_used_ + kIdleTime) : next;
}

void Peer::lose_session(Status status, const std::string& error) {
  Remnant remnant;
  for (auto& [request, entry] : entries_) {
    entry.transfer->fail(status, error);
    if (session_.link) session_.link->cancel(*entry.transfer);
    shared_->orders.withdraw(*entry.transfer);
    if (entry.transfer->is_copying()) remnant.transfers.push_back(entry.transfer);
  }
  entries_.clear();
  requests_.clear();
  generations_.clear();
  pacer_.clear();
  const size_t lost = messages_.size();
  for (auto& [id, message] : messages_) message->settle(status);
  messages_.clear();
  session_.link.reset();
  if (!remnant.transfers.empty()) {
    remnant.control = std::move(session_.control);
    remnants_.push_back(std::move(remnant));
  }
  session_ = {};
  // Else the memory of a receiver that died stays in use.
  if (status == Status::kPeerLost || status == Status::kClosed) segment_.reset();
  const std::lock_guard lock(mutex_);
  queued_messages_ -= lost;
}

}  // namespace tetri
