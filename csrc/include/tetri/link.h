// What a backend implements: how blocks move once a slot is granted.
//
// The peer's thread makes every call, and a link never waits: `pump` moves what can be moved now.
// Opening a slot and small messages travel over the control channel, which is the same for all
// links; `write`, completion and `cancel` are the link's.
#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tetri/control_channel.h"
#include "tetri/transfer.h"

namespace tetri {

// A slot in a receiver's arena, as the handshake gave it to this rank.
struct Grant {
  uint64_t generation = 0;
  uint64_t offset = 0;  // of this rank's part, from the start of the segment
  uint32_t control = 0;
};

// Whether these bytes of a slot are in the arena that was mapped, as a receiver should have it.
bool is_inside(const Segment& segment, const Grant& grant, uint64_t begin, uint64_t bytes);

class Link {
 public:
  virtual ~Link() = default;
  virtual void write(const Grant& grant, WriteOpPtr op) = 0;
  // Drops what is queued for this transfer. When it returns, nothing reads the source any more.
  virtual void cancel(const Transfer& transfer) = 0;
  // Moves some bytes; true when it could go on at once. Throws LinkError when the peer is lost.
  virtual bool pump() = 0;
  // Sockets to wait for, and what became of them.
  virtual void watch(std::vector<pollfd>*) const {}
  virtual void ready(const pollfd&) {}
  // Writes that are through (or dropped because their transfer is over) since the last call.
  std::vector<WriteOpPtr> take_completed() { return std::exchange(completed_, {}); }

 protected:
  std::vector<WriteOpPtr> completed_;
};

// `segment` is the receiver's arena, mapped and verified.
std::unique_ptr<Link> make_shm_link(std::shared_ptr<const Segment> segment);
// `streams` are data connections that have joined the session.
std::unique_ptr<Link> make_tcp_link(std::vector<Fd> streams);

}  // namespace tetri
