// One receiver, as a sender sees it: a thread, at most one session, and the transfers in it.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tetri/link.h"
#include "tetri/transfer.h"

namespace tetri {

struct SenderShared;

struct Command {
  enum class Kind { kOpen, kWrite, kRead, kFinish, kCancel, kMessage };
  Kind kind;
  TransferPtr transfer;
  WriteOpPtr write;
  ReadOpPtr read;
  MessageOpPtr message;
};

// A connection that has passed the handshake.
struct Session {
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<Link> link;  // after control: it may refer to it
};

// Blocks until the handshake is through, `deadline`, or cancel_fd is readable. Throws LinkError.
Session dial(const SenderShared& shared, const Endpoint& endpoint, TimePoint deadline,
             int cancel_fd);

class Peer {
 public:
  Peer(std::shared_ptr<SenderShared> shared, Endpoint endpoint);
  ~Peer();

  // False when the thread has ended or the queue of messages is full: it will not be sent.
  bool post(Command command);
  // Ends the thread. Its transfers must be cancelled before. Idempotent.
  void stop();
  bool retired();

 private:
  // A transfer that the receiver knows of, or will soon.
  struct Entry {
    TransferPtr transfer;
    bool granted = false;
    bool done_sent = false;
    bool finishing = false;
    Grant grant;
    std::deque<Command> waiting;  // until granted
    uint64_t bytes_queued = 0;
    uint64_t pending_writes = 0;
    uint64_t seen_bytes = 0;
    TimePoint progress;
  };

  void run();
  bool next_commands(std::deque<Command>* commands);
  void execute(std::deque<Command> commands);
  bool connect(std::deque<Command>* commands);
  void turn();
  void wait_and_receive(bool busy);
  void apply(Command& command);
  void open(const TransferPtr& transfer);
  void apply_granted(Entry& entry, Command& command);
  void cancelled(const TransferPtr& transfer);
  void settle(uint64_t request, Status status, const std::string& error);
  void drop(Command& command, Status status, const std::string& error);
  void handle(const Frame& frame);
  void handle_opened(const Opened& opened);
  void handle_stop(const Stop& stop);
  void collect_completed();
  void finish_if_ready(Entry& entry);
  TimePoint end_overdue();
  void lose_session(Status status, const std::string& error);
  Entry* find(const TransferPtr& transfer);

  const std::shared_ptr<SenderShared> shared_;
  const Endpoint endpoint_;
  Fd wake_;
  Fd ending_;

  std::mutex mutex_;  // guards the next three
  std::deque<Command> commands_;
  size_t queued_messages_ = 0;
  bool retired_ = false;
  std::atomic<bool> stopping_{false};

  // The thread's own.
  Session session_;
  uint64_t next_request_ = 1;
  std::unordered_map<uint64_t, Entry> entries_;
  std::unordered_map<const Transfer*, uint64_t> requests_;
  std::unordered_map<uint64_t, uint64_t> generations_;  // generation -> request
  std::unordered_map<uint64_t, MessageOpPtr> messages_;
  TimePoint last_used_;
  std::thread thread_;
};

}  // namespace tetri
