// What the engine's threads and the service thread of a receiver share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>

#include "tetri/net.h"
#include "tetri/segment.h"
#include "tetri/slot_table.h"

namespace tetri {

struct ReceiverOptions {
  uint64_t arena_bytes = 0;
  std::string host;
  int port = 0;
  Identity identity;
  Duration fill_timeout{};
  Duration hold_timeout{};
  uint32_t max_connections = 4096;  // a rank of a sender has up to three
  std::string key;                  // senders must prove that they hold it; empty: anybody may come
  bool has_host_memory = true;      // otherwise slots are offsets into memory of the caller's
};

struct ReceiverCounters {
  uint64_t connections = 0;  // open now
  uint64_t refused_identity = 0;
  uint64_t refused_unauthenticated = 0;  // peers without proof of the key
  uint64_t bad_frames = 0;
  uint64_t bytes_received = 0;
};

struct ArenaState {
  explicit ArenaState(const ReceiverOptions& options)
      : options(options),
        segment(Segment::create(options.has_host_memory ? options.arena_bytes : 0,
                                options.arena_bytes > 0)),
        wake(make_event()),
        table(options.has_host_memory ? segment.arena_bytes() : options.arena_bytes,
              options.has_host_memory ? kHeaderBytes : 0, segment.control(), options.fill_timeout,
              options.hold_timeout) {}

  const ReceiverOptions options;
  Segment segment;
  Fd wake;  // signalled when the service thread has notices to send or must end

  std::mutex mutex;  // guards everything below
  std::condition_variable changed;
  Offers offers;  // to senders, beside the segment
  SlotTable table;
  std::deque<std::string> messages;
  std::atomic<size_t> num_messages{0};  // read without the mutex, by an engine in every step
  ReceiverCounters counters;
  bool closing = false;
};

}  // namespace tetri
