// The sender's half of the handshake, and the choice of the link.

#include <algorithm>
#include <cstring>

#include "tetri/peer.h"
#include "tetri/proof.h"
#include "tetri/sender.h"
#include "tetri/sha256.h"

namespace tetri {

namespace {

// A link that the caller moves: all writes are orders, and there is nothing to do here.
class MovedLink : public Link {
 public:
  void write(const Grant&, WriteOpPtr op) override {
    op->transfer->fail(Status::kInvalid, "the caller moves the writes of this link");
    completed_.push_back(std::move(op));
  }
  void cancel(const Transfer&) override {}
  bool pump() override { return false; }
};

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "nothing" : text;
}

// One attempt to reach a receiver.
class Dial {
 public:
  Dial(SenderShared& shared, const Endpoint& endpoint, const std::string& name, TimePoint deadline,
       int cancel_fd, std::shared_ptr<const Segment>* segment)
      : shared_(shared),
        options_(shared.options),
        endpoint_(endpoint),
        name_(name),
        deadline_(deadline),
        cancel_fd_(cancel_fd),
        segment_(*segment) {}

  Session handshake() {
    Session session;
    session.control = connect(false);
    ControlChannel& control = *session.control;
    const Proven proven = prove(control, options_.key, endpoint_, deadline_, cancel_fd_);
    const Hello hello{options_.identity, options_.rank, options_.num_ranks, boot_id()};
    control.send(encode(hello));
    Welcome welcome = decode<Welcome>(control.expect(deadline_, cancel_fd_));
    const std::string mac = std::exchange(welcome.mac, "");
    const std::string agreed = body_of(hello) + body_of(welcome);
    if (!equal_in_constant_time(mac, mac_of(proven, Side::kReceiver, agreed))) {
      throw LinkError(Status::kRefused,
                      name_ + ": frames of the handshake were changed on their way");
    }
    LinkChoice choice;
    choice.kind = choose(welcome);
    choice.mac = mac_of(proven, Side::kSender, agreed + body_of(choice));
    control.send(encode(choice));
    session.route = std::make_shared<const Route>(route(choice.kind, welcome));
    if (choice.kind == "shm") {
      session.link = make_shm_link(segment_);
    } else if (choice.kind == "tcp") {
      session.link = make_tcp_link(join(welcome.session));
    } else {
      session.link = std::make_unique<MovedLink>();
    }
    return session;
  }

 private:
  std::unique_ptr<ControlChannel> connect(bool for_data) const {
    auto channel = std::make_unique<ControlChannel>(connect_to(endpoint_, deadline_, cancel_fd_));
    tune(channel->fd(), for_data, true);
    return channel;
  }

  std::string choose(const Welcome& welcome) {
    std::vector<std::string> able;
    for (const std::string& kind : options_.links) {
      if (shared_.is_excluded(name_, kind)) continue;
      able.push_back(kind);
      const bool is_there =
          needs_host_memory(kind) ? welcome.has_host_memory != 0 : welcome.offers.count(kind) != 0;
      if (is_there && (!is_same_host(kind) || attach(welcome))) return kind;
    }
    std::vector<std::string> there;
    if (welcome.has_host_memory != 0) there = {"tcp"};
    if (welcome.has_host_memory != 0 && !welcome.segment.empty()) there = {"shm", "dma", "tcp"};
    for (const auto& offer : welcome.offers) there.push_back(printable(offer.first));
    throw LinkError(Status::kRefused, "no link to " + name_ + ": this side can use " +
                                          joined(able) + "; the receiver offers " + joined(there) +
                                          (why_not_.empty() ? "" : ", but " + why_not_) +
                                          "; set --tetri-link auto on both");
  }

  // Whether the receiver's segment is mapped here, and is the one that was offered.
  bool attach(const Welcome& welcome) {
    if (welcome.segment.empty()) {
      why_not_ = "it runs on another host or has no arena";
      return false;
    }
    const auto is_offered = [&](const Segment& segment) {
      const Nonce nonce = segment.nonce();
      return segment.path() == welcome.segment && welcome.nonce.size() == nonce.size() &&
             std::memcmp(nonce.data(), welcome.nonce.data(), nonce.size()) == 0;
    };
    if (segment_ && is_offered(*segment_)) return true;
    segment_.reset();
    try {
      auto segment = std::make_shared<const Segment>(Segment::attach(welcome.segment));
      if (is_offered(*segment)) segment_ = std::move(segment);
      why_not_ = "the arena at " + welcome.segment + " is not the receiver's";
    } catch (const std::runtime_error& error) {
      why_not_ = error.what();
    }
    return segment_ != nullptr;
  }

  Route route(const std::string& kind, const Welcome& welcome) const {
    Route route{name_, kind, "", nullptr};
    if (is_same_host(kind)) route.segment = segment_;
    const auto offer = welcome.offers.find(kind);
    if (!needs_host_memory(kind)) {
      route.offer = offer->second;
    } else if (route.segment) {
      route.offer = welcome.segment;
    }
    return route;
  }

  std::vector<Fd> join(uint64_t session) const {
    std::vector<Fd> streams;
    for (uint32_t index = 0; index < options_.streams; ++index) {
      const auto channel = connect(true);
      prove(*channel, options_.key, endpoint_, deadline_, cancel_fd_);
      channel->send(encode(Join{session}));
      decode<Joined>(channel->expect(deadline_, cancel_fd_));
      streams.push_back(channel->take());
    }
    return streams;
  }

  SenderShared& shared_;
  const SenderOptions& options_;
  const Endpoint& endpoint_;
  const std::string& name_;
  const TimePoint deadline_;
  const int cancel_fd_;
  std::shared_ptr<const Segment>& segment_;
  std::string why_not_;
};

}  // namespace

Session dial(SenderShared& shared, const Endpoint& endpoint, const std::string& name,
             TimePoint deadline, int cancel_fd, std::shared_ptr<const Segment>* segment) {
  try {
    return Dial(shared, endpoint, name, deadline, cancel_fd, segment).handshake();
  } catch (const FrameError& error) {
    throw LinkError(Status::kInvalid, name + " does not speak this protocol: " + error.what());
  }
}

}  // namespace tetri
