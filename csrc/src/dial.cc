// The sender's half of the handshake.
#include <fcntl.h>

#include <cstring>

#include "tetri/peer.h"
#include "tetri/proof.h"
#include "tetri/sender.h"

namespace tetri {

namespace {

Welcome introduce(ControlChannel& control, const SenderOptions& options, TimePoint deadline,
                  int cancel_fd) {
  Hello hello;
  hello.identity = options.identity;
  hello.rank = options.rank;
  hello.num_ranks = options.num_ranks;
  hello.boot_id = boot_id();
  hello.pid = static_cast<uint64_t>(::getpid());
  hello.wants_shm = options.link == LinkWish::kTcp ? 0 : 1;
  control.send(encode(hello));
  return decode<Welcome>(control.expect(deadline, cancel_fd));
}

// The receiver's arena, if this process can reach it and it is the one that was offered.
std::optional<Segment> shared_arena(const Welcome& welcome, std::string* why_not) {
  if (welcome.segment.empty()) {
    *why_not = "the receiver runs on another host or has no arena";
    return std::nullopt;
  }
  try {
    Segment segment = Segment::attach(welcome.segment);
    const Nonce nonce = segment.nonce();
    if (welcome.nonce.size() == nonce.size() &&
        std::memcmp(nonce.data(), welcome.nonce.data(), nonce.size()) == 0) {
      return segment;
    }
    *why_not = "the arena at " + welcome.segment + " is not the receiver's";
  } catch (const std::runtime_error& error) {
    *why_not = error.what();
  }
  return std::nullopt;
}

Fd join(const SenderOptions& options, const Endpoint& endpoint, uint64_t session,
        TimePoint deadline, int cancel_fd) {
  Fd fd = connect_to(endpoint, deadline, cancel_fd);
  tune(fd.get(), true, true);
  const int raw = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0);
  if (raw < 0) throw LinkError(Status::kPeerLost, "out of file descriptors");
  ControlChannel channel{Fd(raw)};
  prove(channel, options.key, endpoint, deadline, cancel_fd);
  channel.send(encode(Join{session}));
  decode<Joined>(channel.expect(deadline, cancel_fd));
  return fd;
}

Session handshake(const SenderOptions& options, const Endpoint& endpoint, TimePoint deadline,
                  int cancel_fd) {
  Session session;
  session.control = std::make_unique<ControlChannel>(connect_to(endpoint, deadline, cancel_fd));
  ControlChannel& control = *session.control;
  tune(control.fd(), false, true);
  prove(control, options.key, endpoint, deadline, cancel_fd);
  const Welcome welcome = introduce(control, options, deadline, cancel_fd);
  if (options.link != LinkWish::kTcp) {
    std::string why_not;
    auto segment = shared_arena(welcome, &why_not);
    if (segment) {
      control.send(encode(LinkChoice{1}));
      session.link = make_shm_link(std::move(*segment));
      return session;
    }
    if (options.link == LinkWish::kShm) {
      throw LinkError(Status::kRefused, "no shared memory link to " + endpoint.host + ":" +
                                            endpoint.port + ": " + why_not +
                                            "; use link 'auto' or 'tcp'");
    }
  }
  control.send(encode(LinkChoice{0}));
  std::vector<Fd> streams;
  for (uint32_t index = 0; index < options.streams; ++index) {
    streams.push_back(join(options, endpoint, welcome.session, deadline, cancel_fd));
  }
  session.link = make_tcp_link(std::move(streams), control);
  return session;
}

}  // namespace

Session dial(const SenderShared& shared, const Endpoint& endpoint, TimePoint deadline,
             int cancel_fd) {
  try {
    return handshake(shared.options, endpoint, deadline, cancel_fd);
  } catch (const FrameError& error) {
    throw LinkError(Status::kInvalid, endpoint.host + ":" + endpoint.port +
                                          " does not speak this protocol: " + error.what());
  }
}

}  // namespace tetri
