// The sender's control connection: frames out, frames in, never waiting except in `expect`.
#pragma once

#include <optional>
#include <string>

#include "tetri/frame.h"
#include "tetri/net.h"
#include "tetri/segment.h"

namespace tetri {

class ControlChannel {
 public:
  explicit ControlChannel(Fd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  bool wants_write() const { return !out_.empty(); }
  void send(const std::string& frame);  // queues, and sends what fits
  void flush() { send_queued(fd_.get(), &out_); }
  void receive();  // feeds the parser with what is there
  bool next(Frame* frame) { return parser_.next(frame); }
  // Blocks for one frame of the handshake. Throws LinkError, also for Refused.
  Frame expect(TimePoint deadline, int cancel_fd);
  // Gives the connection away, whose peer has sent nothing that was not taken.
  Fd take() { return std::move(fd_); }
  // Leaves the connection open until the process ends.
  void leak() { fd_.release(); }

 private:
  Fd fd_;
  std::string out_;
  FrameParser parser_;
};

}  // namespace tetri
