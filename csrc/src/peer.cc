#include "tetri/peer.h"

#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>

#include "tetri/sender.h"

namespace tetri {

namespace {

constexpr size_t kMaxQueuedMessages = 1024;

}  // namespace

Peer::Peer(std::shared_ptr<SenderShared> shared, std::string name, Endpoint endpoint)
    : shared_(std::move(shared)),
      name_(std::move(name)),
      endpoint_(std::move(endpoint)),
      wake_(make_event()),
      ending_(make_event()),
      pacer_(shared_->options.emulated),
      last_used_(Clock::now()) {
  thread_ = std::thread(&Peer::run, this);
  ::pthread_setname_np(thread_.native_handle(), "tetri-sender");
}

Peer::~Peer() { stop(); }

bool Peer::post(Command command) {
  const std::lock_guard lock(mutex_);
  if (retired_) {
    if (wake_) signal_event(wake_.get());  // it may be waiting for an order's end
    return false;
  }
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

void Peer::end() {
  stopping_ = true;
  signal_event(ending_.get());
  signal_event(wake_.get());
}

void Peer::stop() {
  if (!thread_.joinable()) return;
  end();
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
  if (shared_->options.emulated) ::prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds
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
  await_orders();
}

// Waits only when there is no session. False when the thread shall end; then `post` takes nothing
// any more and `commands` holds what was not processed.
bool Peer::next_commands(std::deque<Command>* commands) {
  while (true) {
    bool unmaps = false;
    {
      const std::lock_guard lock(mutex_);
      commands->swap(commands_);
      const bool idle = commands->empty() && !session_.control && remnants_.empty();
      const bool unused = idle && Clock::now() >= last_used_ + kIdleTime;
      // To unmap an arena takes long: before anybody waits for the end of this thread.
      unmaps = unused && segment_ != nullptr && !stopping_;
      retired_ = stopping_ || (unused && !unmaps);
      if (retired_) {
        if (wake_) signal_event(wake_.get());  // it may be waiting for an order's end
        return false;
      }
      if (!commands->empty() || session_.control) return true;
    }
    if (unmaps) {
      segment_.reset();
      continue;
    }
    pollfd woken{wake_.get(), POLLIN, 0};
    ::poll(&woken, 1, remnants_.empty() ? poll_timeout_ms(last_used_ + kIdleTime) : -1);
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
    session_ = dial(*shared_, endpoint_, name_, deadline, ending_.get(), &segment_);
    return true;
  } catch (const LinkError& error) {
    for (Command& command : *commands) drop(command, error.status, error.what());
    commands->clear();
    reap();  // the end of an order may have been among them
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
  const bool is_moot = command.kind == Command::Kind::kStaged && command.transfer->stopped();
  if (command.kind == Command::Kind::kOrderEnded || is_moot) return order_ended(command.write);
  if (command.kind == Command::Kind::kExclude) {
    if (!session_.control || !shared_->is_excluded(name_, session_.route->kind)) return;
    throw LinkError(Status::kPeerLost, "the " + session_.route->kind + " link to " + name_ +
                                           " was given up; the next attempt uses another one");
  }
  Entry* entry = find(command.transfer);
  if (entry == nullptr || entry->transfer->stopped()) return;
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
  session_.control->send(
      encode(Open{request, transfer->name(), transfer->num_blocks(), transfer->block_bytes()}));
}

void Peer::apply_granted(Entry& entry, Command& command) {
  switch (command.kind) {
    case Command::Kind::kWrite:
      return write(entry, command.write);
    case Command::Kind::kStaged:
      return session_.link->write(entry.grant, command.write);
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
  ControlChannel& control = *session_.control;
  const short events = control.wants_write() ? POLLIN | POLLOUT : POLLIN;
  std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {control.fd(), events, 0}};
  session_.link->watch(&fds);
  const TimePoint deadline = std::min(end_overdue(), pacer_.due());
  wait_until(&fds, busy ? TimePoint::min() : deadline);
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

}  // namespace tetri
