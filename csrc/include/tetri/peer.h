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
#include "tetri/order.h"
#include "tetri/pacer.h"
#include "tetri/transfer.h"

namespace tetri {

struct SenderShared;

struct Command {
  // kOrderEnded: `write` was an order. kStaged: `write` replaces one. kExclude: the session's kind
  // of link may have been excluded.
  enum class Kind { kOpen, kWrite, kFinish, kCancel, kMessage, kOrderEnded, kStaged, kExclude };
  Kind kind;
  TransferPtr transfer;
  WriteOpPtr write;
  MessageOpPtr message;
};

// A connection that has passed the handshake.
struct Session {
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<Link> link;
  RoutePtr route;
};

// Blocks until the handshake is through, `deadline`, or cancel_fd is readable. `segment` is the
// mapping of an earlier session's, or none; afterwards it is this one's. Throws LinkError.
Session dial(SenderShared& shared, const Endpoint& endpoint, const std::string& name,
             TimePoint deadline, int cancel_fd, std::shared_ptr<const Segment>* segment);

class Peer {
 public:
  Peer(std::shared_ptr<SenderShared> shared, std::string name, Endpoint endpoint);
  ~Peer();

  // False when the thread has ended or the queue of messages is full: it will not be sent.
  bool post(Command command);
  // Lets the thread end, which waits some seconds for orders that were begun.
  void end();
  // Waits for its end. Idempotent.
  void stop();
  bool retired();

 private:
  // Then an unused session is closed, and an unused thread ends.
  static constexpr auto kIdleTime = std::chrono::seconds(60);

  // A transfer that the receiver knows of, or will soon.
  struct Entry {
    TransferPtr transfer;
    bool granted = false;
    bool done_sent = false;
    bool finishing = false;
    Grant grant;
    std::deque<Command> waiting;  // until granted
    std::string goodbye;          // sent as soon as no order is begun; the transfer is over
    uint64_t bytes_queued = 0;
    uint64_t pending_writes = 0;
    uint64_t seen_progress = 0;
    TimePoint progress;
  };
  // A session that was lost while orders were begun: its receiver must not hear of it before they
  // have ended.
  struct Remnant {
    std::unique_ptr<ControlChannel> control;
    std::vector<TransferPtr> transfers;
  };

  void run();
  bool next_commands(std::deque<Command>* commands);
  void execute(std::deque<Command> commands);
  bool connect(std::deque<Command>* commands);
  void turn();
  void apply(Command& command);
  void open(const TransferPtr& transfer);
  void apply_granted(Entry& entry, Command& command);
  void write(Entry& entry, const WriteOpPtr& op);
  void order(const Entry& entry, const WriteOpPtr& op);
  void order_ended(const WriteOpPtr& op);
  void leave(const TransferPtr& transfer, std::string goodbye);
  bool reap();
  void await_orders();
  void cancelled(const TransferPtr& transfer);
  void drop(Command& command, Status status, const std::string& error);
  void handle(const Frame& frame);
  void handle_opened(const Opened& opened);
  void handle_stop(const Stop& stop);
  void collect_completed();
  void completed(const WriteOpPtr& op);
  void finish_if_ready(Entry& entry);
  TimePoint end_overdue();
  void lose_session(Status status, const std::string& error);
  Entry* find(const TransferPtr& transfer);

  const std::shared_ptr<SenderShared> shared_;
  const std::string name_;  // the endpoint, as text
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
  std::shared_ptr<const Segment> segment_;  // of the last session; attaching takes long
  std::vector<Remnant> remnants_;
  Pacer pacer_;
  uint64_t next_request_ = 1;
  std::unordered_map<uint64_t, Entry> entries_;
  std::unordered_map<const Transfer*, uint64_t> requests_;
  std::unordered_map<uint64_t, uint64_t> generations_;  // generation -> request
  std::unordered_map<uint64_t, MessageOpPtr> messages_;
  TimePoint last_used_;
  std::thread thread_;
};

}  // namespace tetri
