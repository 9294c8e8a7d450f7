// Sockets: the few calls that both sides need. Every function throws LinkError on failure.
#pragma once

#include <poll.h>

#include <string>
#include <vector>

#include "tetri/fd.h"
#include "tetri/status.h"

namespace tetri {

struct Endpoint {
  std::string host;
  std::string port;
};

// "host:port" or "[v6 host]:port". Throws std::invalid_argument.
Endpoint parse_endpoint(const std::string& text);

Fd listen_on(const std::string& host, int port);
std::string local_endpoint(int fd);   // "host:port", in numbers
std::string remote_endpoint(int fd);  // of the other side

// Non-blocking from here on. `cancel_fd` becoming readable ends the attempt with kClosed.
Fd connect_to(const Endpoint& endpoint, TimePoint deadline, int cancel_fd);

// `data`: this connection carries blocks. `mortal`: give up on a peer that acknowledges nothing;
// never for a peer that writes into shared memory, because giving up proves nothing about it.
void tune(int fd, bool data, bool mortal);

// Bytes moved; 0 when the call would block. Throws kPeerLost when the other side is gone.
size_t receive_some(int fd, void* buffer, size_t length);
size_t send_some(int fd, const void* buffer, size_t length);
size_t moved_or_throw(ssize_t moved, int error);  // what a send returned, with its errno
// Sends what fits of what is queued, and takes it out.
size_t send_queued(int fd, std::string* queued);

// Waits for `events` on fd. False after `deadline`; throws kClosed when cancel_fd is readable.
bool wait_for(int fd, short events, TimePoint deadline, int cancel_fd);

// Like poll, to the microsecond; TimePoint::min() looks only, TimePoint::max() waits for ever.
void wait_until(std::vector<pollfd>* fds, TimePoint deadline);

int poll_timeout_ms(TimePoint deadline);  // rounded up; -1 for TimePoint::max()

Fd make_event();
void signal_event(int fd);
void clear_event(int fd);

}  // namespace tetri
