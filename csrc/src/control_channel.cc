#include "tetri/control_channel.h"

#include <poll.h>

namespace tetri {

void ControlChannel::send(const std::string& frame) {
  out_ += frame;
  flush();
}

void ControlChannel::receive() {
  uint8_t buffer[65536];
  const size_t got = receive_some(fd_.get(), buffer, sizeof(buffer));
  parser_.feed(buffer, got);
}

Frame ControlChannel::expect(TimePoint deadline, int cancel_fd) {
  Frame frame;
  while (!parser_.next(&frame)) {
    const short events = wants_write() ? POLLIN | POLLOUT : POLLIN;
    if (!wait_for(fd_.get(), events, deadline, cancel_fd)) {
      throw LinkError(Status::kTimeout, "the receiver did not answer the handshake in time");
    }
    flush();
    receive();
  }
  if (frame.type == Type::kRefused) {
    throw LinkError(Status::kRefused, printable(decode<Refused>(frame).reason));
  }
  return frame;
}

}  // namespace tetri
