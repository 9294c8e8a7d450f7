#include "tetri/peer.h"

#include <poll.h>
#include <pthread.h>

#include "tetri/sender.h"

namespace tetri {

namespace {

constexpr auto kIdleTime = std::chrono::seconds(60);
constexpr size_t kMaxQueuedMessages = 1024;

Status status_of(uint32_t wire) {
  return wire < kNumStatuses ? static_cast<Status>(wire) : Status::kInvalid;
}

}  // namespace

Peer::Peer(std::shared_ptr<SenderShared> shared, Endpoint endpoint)
    : shared_(std::move(shared)),
      endpoint_(std::move(endpoint)),
      wake_(make_event()),
      ending_(make_event()),
      last_used_(Clock::now()) {
  thread_ = std::thread(&Peer::run, this);
  ::pthread_setname_np(thread_.native_handle(), "tetri-sender");
}

Peer::~Peer() { stop(); }

bool Peer::post(Command command) {
  const std::lock_guard lock(mutex_);
  if (retired_) return false;
  if (command.kind == Command::Kind::kMessage) {
    if (queued_messages_ >= kMaxQueuedMessages) {
      command.message->settle(Status::kFull);
      return true;
    }
    ++queued_messages_;
  }
  commands_.push_back(std::move(command));
  if (commands_.size() == 1) signal_event(wake_.get());
  return true;
}

void Peer::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  signal_event(ending_.get());
  signal_event(wake_.get());
  thread_.join();
  const std::lock_guard lock(mutex_);  // retired by now: no thread signals any more
  wake_.reset();
  ending_.reset();
}

bool Peer::retired() {
  const std::lock_guard lock(mutex_);
  return retired_;
}

void Peer::run() {
  std::deque<Command> commands;
  while (next_commands(&commands)) {
    execute(std::move(commands));
    commands.clear();
    if (!session_.control) continue;
    try {
      turn();
    } catch (const LinkError& error) {
      lose_session(error.status, error.what());
    } catch (const FrameError& error) {
      lose_session(Status::kInvalid,
                   std::string("the receiver sent an invalid frame: ") + error.what());
    }
  }
  lose_session(Status::kClosed, "the sender was closed");
  for (Command& command : commands) drop(command, Status::kClosed, "the sender was closed");
}

// Waits only when there is no session. False when the thread shall end; then `post` takes nothing
// any more and `commands` holds what was not processed.
bool Peer::next_commands(std::deque<Command>* commands) {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      commands->swap(commands_);
      const bool idle = commands->empty() && !session_.control;
      retired_ = stopping_ || (idle && Clock::now() >= last_used_ + kIdleTime);
      if (retired_) return false;
      if (!idle) return true;
    }
    pollfd woken{wake_.get(), POLLIN, 0};
    ::poll(&woken, 1, poll_timeout_ms(last_used_ + kIdleTime));
    clear_event(wake_.get());
  }
}

void Peer::execute(std::deque<Command> commands) {
  if (commands.empty()) return;
  last_used_ = Clock::now();
  while (!commands.empty()) {
    Command& command = commands.front();
    const bool needs_session =
        command.kind == Command::Kind::kOpen || command.kind == Command::Kind::kMessage;
    if (needs_session && !session_.control && !connect(&commands)) continue;
    try {
      apply(command);
    } catch (const LinkError& error) {
      lose_session(error.status, error.what());  // with everything that `apply` took on
    }
    commands.pop_front();
  }
}

// On failure everything that waits for the connection has failed, too.
bool Peer::connect(std::deque<Command>* commands) {
  try {
    const TimePoint deadline = Clock::now() + shared_->options.open_timeout;
    session_ = dial(*shared_, endpoint_, deadline, ending_.get());
    return true;
  } catch (const LinkError& error) {
    for (Command& command : *commands) drop(command, error.status, error.what());
    commands->clear();
  }
  last_used_ = Clock::now();
  return false;
}

void Peer::apply(Command& command) {
  if (command.kind == Command::Kind::kOpen) return open(command.transfer);
  if (command.kind == Command::Kind::kCancel) return cancelled(command.transfer);
  if (command.kind == Command::Kind::kMessage) {
    const uint64_t id = next_request_++;
    messages_.emplace(id, command.message);
    return session_.control->send(encode(Message{id, command.message->payload}));
  }
  Entry* entry = find(command.transfer);
  if (entry == nullptr || entry->transfer->stopped()) {
    return drop(command, Status::kCancelled, "cancelled");
  }
  if (!entry->granted) {
    entry->waiting.push_back(std::move(command));
  } else {
    apply_granted(*entry, command);
  }
}

void Peer::open(const TransferPtr& transfer) {
  if (transfer->stopped()) return;
  const uint64_t request = next_request_++;
  Entry& entry = entries_[request];
  entry.transfer = transfer;
  requests_[transfer.get()] = request;
  Open wanted;
  wanted.request = request;
  wanted.transfer = transfer->name();
  wanted.num_blocks = transfer->num_blocks();
  wanted.block_bytes = transfer->block_bytes();
  session_.control->send(encode(wanted));
}

void Peer::apply_granted(Entry& entry, Command& command) {
  switch (command.kind) {
    case Command::Kind::kWrite:
      if (entry.pending_writes++ == 0) entry.progress = Clock::now();
      entry.bytes_queued += command.write->bytes();
      return session_.link->write(entry.grant, command.write);
    case Command::Kind::kRead:
      return session_.link->read(entry.grant, command.read, entry.bytes_queued);
    case Command::Kind::kFinish:
      entry.finishing = true;
      return finish_if_ready(entry);
    default:
      return;
  }
}

void Peer::finish_if_ready(Entry& entry) {
  if (!entry.finishing || entry.done_sent || entry.pending_writes > 0) return;
  entry.done_sent = true;
  entry.progress = Clock::now();
  session_.control->send(encode(Done{entry.grant.generation, entry.bytes_queued}));
}

void Peer::turn() {
  const bool busy = session_.link->pump();
  collect_completed();
  wait_and_receive(busy);
}

void Peer::wait_and_receive(bool busy) {
  ControlChannel& control = *session_.control;
  const short events = control.wants_write() ? POLLIN | POLLOUT : POLLIN;
  std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {control.fd(), events, 0}};
  session_.link->watch(&fds);
  const TimePoint deadline = end_overdue();
  ::poll(fds.data(), fds.size(), busy ? 0 : poll_timeout_ms(deadline));
  if (fds[0].revents != 0) clear_event(wake_.get());
  if ((fds[1].revents & POLLOUT) != 0) control.flush();
  if ((fds[1].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
    control.receive();
    Frame frame;
    while (control.next(&frame)) handle(frame);
  }
  for (size_t index = 2; index < fds.size(); ++index) {
    if (fds[index].revents != 0) session_.link->ready(fds[index]);
  }
  const bool unused = entries_.empty() && messages_.empty();
  if (unused && Clock::now() >= last_used_ + kIdleTime) session_ = {};
}

void Peer::handle(const Frame& frame) {
  switch (frame.type) {
    case Type::kOpened:
      return handle_opened(decode<Opened>(frame));
    case Type::kStop:
      return handle_stop(decode<Stop>(frame));
    case Type::kReadData:
      return session_.link->read_data(decode<ReadData>(frame));
    case Type::kConfirm: {
      const auto found = generations_.find(decode<Confirm>(frame).generation);
      if (found == generations_.end()) return;
      const uint64_t request = found->second;
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
    transfer->granted(session_.link->name());
    std::deque<Command> waiting = std::move(entry.waiting);
    for (Command& command : waiting) apply_granted(entry, command);
    return;
  }
  if (granted) {
    session_.control->send(encode(Cancel{opened.generation, "cancelled before it was granted"}));
  } else {
    transfer->fail(status_of(opened.status), printable(opened.error));
  }
  for (Command& command : entry.waiting) drop(command, transfer->status(), transfer->error());
  requests_.erase(transfer.get());
  entries_.erase(found);
}

void Peer::handle_stop(const Stop& stop) {
  const auto found = generations_.find(stop.generation);
  if (found != generations_.end()) {
    const uint64_t request = found->second;
    const TransferPtr transfer = entries_.at(request).transfer;
    transfer->fail(status_of(stop.status), printable(stop.reason));
    session_.link->cancel(*transfer);
    generations_.erase(found);
    requests_.erase(transfer.get());
    entries_.erase(request);
  }
  // This thread is the only writer, and it is here: nothing of this slot is being written.
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
  for (Command& command : entry->waiting) drop(command, transfer->status(), transfer->error());
  entry->waiting.clear();
  if (!entry->granted) return;
  session_.link->cancel(*transfer);
  const Cancel cancel{entry->grant.generation, transfer->error()};
  generations_.erase(entry->grant.generation);
  const auto request = requests_.find(transfer.get());
  entries_.erase(request->second);
  requests_.erase(request);
  session_.control->send(encode(cancel));
}

void Peer::drop(Command& command, Status status, const std::string& error) {
  if (command.kind == Command::Kind::kOpen) {
    if (status == Status::kClosed) command.transfer->sender_closed();
    command.transfer->fail(status, error);
  }
  if (command.read) command.read->settle(status);
  if (command.message) {
    command.message->settle(status);
    const std::lock_guard lock(mutex_);
    --queued_messages_;
  }
}

void Peer::collect_completed() {
  for (const WriteOpPtr& op : session_.link->take_completed()) {
    Entry* entry = find(op->transfer);
    if (entry == nullptr) continue;
    --entry->pending_writes;
    if (entry->transfer->stopped()) {
      cancelled(op->transfer);
    } else {
      finish_if_ready(*entry);
    }
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
      const uint64_t bytes = entry.transfer->bytes_sent();
      if (bytes != entry.seen_bytes) entry.progress = now;
      entry.seen_bytes = bytes;
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
  for (auto& [request, entry] : entries_) {
    if (status == Status::kClosed) entry.transfer->sender_closed();
    entry.transfer->fail(status, error);
    if (session_.link) session_.link->cancel(*entry.transfer);
    for (Command& command : entry.waiting) drop(command, status, error);
  }
  entries_.clear();
  requests_.clear();
  generations_.clear();
  const size_t lost = messages_.size();
  for (auto& [id, message] : messages_) message->settle(status);
  messages_.clear();
  session_.link.reset();
  session_.control.reset();
  const std::lock_guard lock(mutex_);
  queued_messages_ -= lost;
}

}  // namespace tetri
