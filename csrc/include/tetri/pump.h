// Events of streams, moved from socket to socket: what instances write reaches clients without
// Python. Everything here belongs to one thread, never waits, and throws nothing because of a peer.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tetri/fd.h"

namespace tetri {

// Replaces the token ids of events by null. `with_prompt`: those of the prompt, too, once.
// `drops_empty`: events of a chat are left out that hold nothing but ids.
std::string hide_ids(std::string_view events, bool with_prompt, bool drops_empty);

enum class FlowState {
  kOpen,
  kFull,   // the client reads too slowly or has left: some bytes are unsent
  kKept,   // many events are kept, and more will be: open, but they should be taken
  kEnded,  // the rest is for the caller to read
};

struct FlowRules {
  bool keeps = false;        // what passes is kept, until it is taken
  bool hides_ids = false;    // see `hide_ids`
  bool drops_empty = false;  // see `hide_ids`
  std::string theirs;        // a part of every event that is replaced, unless it is empty
  std::string ours;          // by this
};

class Pump;

// One response: HTTP chunks of whole events are read from `from` and written to `to`. It ends
// before a chunk that is anything else or holds a word of the pump's, with its connection, and by
// `end`. Both sockets are duplicates of the caller's, which must not read or write meanwhile.
class Flow {
 public:
  Flow(Pump& pump, int from, int to, FlowRules rules);
  ~Flow() { end(); }
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  FlowState state() const { return state_; }
  uint64_t num_events() const { return num_events_; }  // that the client got or will get
  double last_s() const { return last_s_; }            // when bytes came last, monotonic; 0: never
  std::string take_kept();
  // The bytes that were read but are no part of it. Idempotent, but they are returned once.
  std::string end();
  // The bytes to be written before anything else.
  std::string take_unsent() { return std::exchange(unsent_, {}); }

  int from() const { return from_.get(); }
  void pass();  // reads once; called by the pump

 private:
  friend class Pump;
  size_t take_chunks(std::string_view data);
  void deliver();

  Pump* pump_;  // null once it forgot this
  Fd from_, to_;
  FlowRules rules_;
  FlowState state_ = FlowState::kOpen;
  uint64_t num_events_ = 0;
  double last_s_ = 0;
  std::string rest_, events_, kept_, unsent_;  // `events_`: of the chunks that were read last
};

using FlowPtr = std::shared_ptr<Flow>;

// All flows of an event loop. `fd` is readable when `turn` has something to do.
class Pump {
 public:
  // `words` end a flow before the chunk that holds one of them. Throws std::runtime_error without
  // descriptors.
  explicit Pump(std::vector<std::string> words);
  ~Pump();
  int fd() const { return epoll_.get(); }
  // Throws std::runtime_error without descriptors.
  FlowPtr begin(int from, int to, FlowRules rules);
  // Reads of at most `most` sockets, and sets how many that were; returns the flows that stopped,
  // which are not read again, and those whose events should be taken.
  std::vector<FlowPtr> turn(size_t most, size_t* num_read);

 private:
  friend class Flow;
  void forget(Flow& flow);
  bool ends_before(std::string_view chunk) const;

  Fd epoll_;
  std::vector<std::string> words_;
  std::string scratch_;
  std::unordered_map<int, std::weak_ptr<Flow>> flows_;  // by descriptor
};

}  // namespace tetri
