// One accepted connection of a receiver. Everything here runs on the service thread.
//
// With a key, the peer proves first that it holds it; until then it is unauthenticated. A
// connection starts unknown, and becomes a control connection with Hello or a data connection with
// Join. Data connections receive straight into the arena.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tetri/arena_state.h"
#include "tetri/checksum.h"
#include "tetri/frame.h"
#include "tetri/proof.h"

namespace tetri {

class Service;

class Connection {
 public:
  Connection(uint64_t id, Fd fd, ArenaState& state, Service& service, TimePoint now);

  // Moves what can be moved now. Throw LinkError when the connection is over, FrameError when the
  // peer broke the protocol.
  void readable(TimePoint now);
  void writable(TimePoint now);
  // Queues a frame and tries to send it.
  void send(const std::string& frame, TimePoint now);
  void notify(const Notice& notice, TimePoint now);
  // Sends the reason and closes: the peer gets what is queued, then end of file.
  void refuse(const std::string& reason, TimePoint now);
  // Only waits for the peer to close from here on: for some time, or forever if only its kernel
  // knows whether it still writes.
  void drain(TimePoint now);

  int fd() const { return fd_.get(); }
  uint64_t id() const { return id_; }
  const WriterId& writer() const { return writer_; }
  bool is_control() const { return phase_ == Phase::kControl || phase_ == Phase::kAgreed; }
  bool writes_shared() const { return writer_.shared; }
  // Its kernel closes the connection when the writer is gone, and nothing else may end it.
  bool is_immortal() const { return writer_.shared && is_same_host_; }
  bool is_unauthenticated() const { return authenticator_.has_value(); }
  bool draining() const { return phase_ == Phase::kDraining; }
  uint64_t session_id() const { return session_; }
  bool wants_write() const { return !out_.empty(); }
  // When the peer must have moved on; max when it may rest.
  TimePoint deadline() const;

 private:
  // kAgreed: identity fits, the choice of the link is missing.
  enum class Phase { kProving, kNew, kAgreed, kControl, kData, kDraining };

  void read_proof(TimePoint now);
  void read_control(TimePoint now);
  void read_data(TimePoint now);
  void discard();
  void begin_payload();
  size_t receive_payload();
  void finish_payload(TimePoint now);
  void handle(const Frame& frame, TimePoint now);
  void handle_hello(const Frame& frame, TimePoint now);
  void handle_choice(const Frame& frame);
  void handle_control(const Frame& frame, TimePoint now);
  void handle_open(const Open& open, TimePoint now);
  void handle_message(Message message, TimePoint now);
  void join(uint64_t session, TimePoint now);
  void flush(TimePoint now);

  const uint64_t id_;
  Fd fd_;
  ArenaState& state_;
  Service& service_;  // knows the other connections of the same sender
  Phase phase_ = Phase::kNew;
  std::optional<Authenticator> authenticator_;  // until the peer has proved that it holds the key
  Proven proven_;
  std::string agreed_;  // bodies of Hello and Welcome, until the choice is made
  Offers offered_;
  WriterId writer_;
  bool is_same_host_ = false;
  uint64_t session_ = 0;
  TimePoint handshake_deadline_;
  TimePoint last_in_;
  TimePoint last_out_;

  FrameParser parser_;
  std::string out_;

  // Data connections: the frame under way.
  std::array<uint8_t, kHeaderSize + kDataPrefixBytes> head_{};
  size_t head_bytes_ = 0;
  uint64_t generation_ = 0;
  uint64_t offset_ = 0;
  uint64_t length_ = 0;
  uint64_t filled_ = 0;
  Checksum sum_;
  std::array<uint8_t, kDataSumBytes> tail_{};
  size_t tail_bytes_ = 0;
  bool discarding_ = false;
};

}  // namespace tetri
