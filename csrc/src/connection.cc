#include "tetri/connection.h"

#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "tetri/service.h"
#include "tetri/sha256.h"

namespace tetri {

namespace {

constexpr auto kHandshakeTime = std::chrono::seconds(5);
constexpr auto kStallTime = std::chrono::seconds(30);
constexpr size_t kMaxQueuedOut = 1 << 20;
constexpr size_t kMaxMessages = 1024;
constexpr int kReceivesPerTurn = 16;
constexpr size_t kMaxLocked = 128 << 10;  // received under the lock: some 20 microseconds
constexpr char kCorrupt[] = "bytes changed on their way";

}  // namespace

Connection::Connection(uint64_t id, Fd fd, ArenaState& state, Service& service, TimePoint now)
    : id_(id),
      fd_(std::move(fd)),
      state_(state),
      service_(service),
      handshake_deadline_(now + kHandshakeTime),
      last_in_(now),
      last_out_(now) {
  writer_.connection = id;
  if (state.options.key.empty()) return;
  authenticator_.emplace(state.options.key, local_endpoint(fd_.get()));
  phase_ = Phase::kProving;
}

TimePoint Connection::deadline() const {
  if (phase_ == Phase::kProving || phase_ == Phase::kNew || phase_ == Phase::kAgreed) {
    return handshake_deadline_;
  }
  if (phase_ == Phase::kDraining) {
    return is_immortal() ? TimePoint::max() : handshake_deadline_;
  }
  TimePoint deadline = TimePoint::max();
  if (!out_.empty()) deadline = std::min(deadline, last_out_ + kStallTime);
  if (head_bytes_ > 0 || !parser_.empty()) deadline = std::min(deadline, last_in_ + kStallTime);
  return deadline;
}

void Connection::readable(TimePoint now) {
  switch (phase_) {
    case Phase::kProving:
      return read_proof(now);
    case Phase::kDraining:
      return discard();
    case Phase::kData:
      return read_data(now);
    default:
      return read_control(now);
  }
}

void Connection::discard() {
  uint8_t buffer[16384];
  for (int turn = 0; turn < kReceivesPerTurn; ++turn) {
    if (receive_some(fd_.get(), buffer, sizeof(buffer)) == 0) return;
  }
}

void Connection::read_proof(TimePoint now) {
  while (!authenticator_->has_proof()) {
    const size_t got = receive_some(fd_.get(), authenticator_->room(), authenticator_->wants());
    if (got == 0) return;
    last_in_ = now;
    const std::string answer = authenticator_->take(got);
    if (!answer.empty()) send(answer, now);
  }
  proven_ = authenticator_->proven();
  authenticator_.reset();
  phase_ = Phase::kNew;
}

void Connection::read_control(TimePoint now) {
  uint8_t buffer[65536];
  const size_t got = receive_some(fd_.get(), buffer, sizeof(buffer));
  if (got == 0) return;
  last_in_ = now;
  parser_.feed(buffer, got);
  Frame frame;
  while (phase_ != Phase::kDraining && parser_.next(&frame)) {
    if (phase_ == Phase::kData) throw FrameError("data before the answer to join");
    handle(frame, now);
  }
  if (phase_ == Phase::kData && !parser_.empty()) throw FrameError("bytes after join");
}

void Connection::handle(const Frame& frame, TimePoint now) {
  if (phase_ == Phase::kControl) return handle_control(frame, now);
  if (phase_ == Phase::kAgreed) return handle_choice(frame);
  if (frame.type == Type::kChallenge) {
    throw FrameError(
        "this receiver was given no secret to prove; start it with the --tetri-secret-file of the "
        "sender");
  }
  if (frame.type == Type::kJoin) return join(decode<Join>(frame).session, now);
  handle_hello(frame, now);
}

void Connection::handle_hello(const Frame& frame, TimePoint now) {
  const auto hello = decode<Hello>(frame);
  const std::string difference = identity_difference(hello.identity, state_.options.identity);
  if (!difference.empty()) {
    {
      const std::lock_guard lock(state_.mutex);
      ++state_.counters.refused_identity;
    }
    return refuse("KV identity differs: " + difference, now);
  }
  if (hello.num_ranks == 0 || hello.num_ranks > kMaxRanks || hello.rank >= hello.num_ranks) {
    throw FrameError("impossible rank");
  }
  writer_.rank = hello.rank;
  writer_.num_ranks = hello.num_ranks;
  Welcome welcome;
  welcome.session = session_ = random_u64();
  welcome.has_host_memory = state_.options.has_host_memory ? 1 : 0;
  {
    const std::lock_guard lock(state_.mutex);
    welcome.offers = state_.offers;
  }
  if (hello.boot_id == boot_id()) {
    const Nonce nonce = state_.segment.nonce();
    welcome.segment = state_.segment.path();
    welcome.nonce.assign(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  }
  agreed_ = frame.body + body_of(welcome);
  welcome.mac = mac_of(proven_, Side::kReceiver, agreed_);
  offered_ = welcome.offers;
  is_same_host_ = !welcome.segment.empty();
  phase_ = Phase::kAgreed;
  send(encode(std::move(welcome)), now);
}

void Connection::handle_choice(const Frame& frame) {
  auto choice = decode<LinkChoice>(frame);
  const std::string mac = std::exchange(choice.mac, "");
  if (!equal_in_constant_time(mac, mac_of(proven_, Side::kSender, agreed_ + body_of(choice)))) {
    throw FrameError("frames of the handshake were changed on their way");
  }
  const std::string& kind = choice.kind;
  const bool is_offered =
      needs_host_memory(kind) ? state_.options.has_host_memory : offered_.count(kind) != 0;
  if (!is_offered || (tetri::is_same_host(kind) && !is_same_host_)) {
    throw FrameError("choice of a link that was not offered: " + printable(kind));
  }
  writer_.shared = kind != "tcp";
  is_same_host_ = tetri::is_same_host(kind);
  writer_.remote = writer_.shared && !is_same_host_;
  tune(fd_.get(), false, !is_same_host_);
  agreed_.clear();
  offered_.clear();
  phase_ = Phase::kControl;
}

void Connection::join(uint64_t session, TimePoint now) {
  const Connection* control = service_.session(session);
  if (control == nullptr || control->writes_shared()) throw FrameError("join of no session");
  writer_ = control->writer_;
  session_ = session;
  phase_ = Phase::kData;
  tune(fd_.get(), true, true);
  send(encode(Joined{}), now);
}

void Connection::handle_control(const Frame& frame, TimePoint now) {
  switch (frame.type) {
    case Type::kOpen:
      return handle_open(decode<Open>(frame), now);
    case Type::kMessage:
      return handle_message(decode<Message>(frame), now);
    default:
      break;
  }
  const std::lock_guard lock(state_.mutex);
  switch (frame.type) {
    case Type::kDone:
      return state_.table.done(decode<Done>(frame), writer_, now);
    case Type::kCancel:
      return state_.table.cancelled_by_sender(decode<Cancel>(frame), writer_, now);
    case Type::kStopped:
      return state_.table.stopped(decode<Stopped>(frame).generation, writer_);
    case Type::kProgress:
      return state_.table.received(decode<Progress>(frame).generation, writer_, 0, now);
    default:
      throw FrameError("unexpected frame type " + std::to_string(static_cast<int>(frame.type)));
  }
}

void Connection::handle_open(const Open& open, TimePoint now) {
  Opened opened;
  {
    const std::lock_guard lock(state_.mutex);
    opened = state_.table.open(open, writer_, now);
  }
  send(encode(opened), now);
}

void Connection::handle_message(Message message, TimePoint now) {
  if (message.payload.size() > kMaxMessageBytes) throw FrameError("message too long");
  MessageAck ack;
  ack.id = message.id;
  {
    const std::lock_guard lock(state_.mutex);
    const bool full = state_.messages.size() >= kMaxMessages;
    ack.status = static_cast<uint32_t>(full ? Status::kFull : Status::kOk);
    if (!full) {
      state_.messages.push_back(std::move(message.payload));
      ++state_.num_messages;
    }
    state_.changed.notify_all();
  }
  send(encode(ack), now);
}

void Connection::read_data(TimePoint now) {
  for (int turn = 0; turn < kReceivesPerTurn; ++turn) {
    size_t got = 0;
    if (head_bytes_ < head_.size()) {
      got = receive_some(fd_.get(), head_.data() + head_bytes_, head_.size() - head_bytes_);
      head_bytes_ += got;
      if (got > 0 && head_bytes_ == head_.size()) begin_payload();
    } else if (filled_ < length_) {
      got = receive_payload();
      filled_ += got;
    } else {
      got = receive_some(fd_.get(), tail_.data() + tail_bytes_, tail_.size() - tail_bytes_);
      tail_bytes_ += got;
    }
    if (got == 0) return;
    last_in_ = now;
    if (tail_bytes_ == tail_.size()) finish_payload(now);
  }
}

void Connection::begin_payload() {
  const Header header = parse_header(head_.data());
  if (header.type != Type::kData || header.length < kDataPrefixBytes + kDataSumBytes) {
    throw FrameError("only data frames on a data connection");
  }
  std::memcpy(&generation_, head_.data() + kHeaderSize, sizeof(generation_));
  std::memcpy(&offset_, head_.data() + kHeaderSize + sizeof(generation_), sizeof(offset_));
  sum_ = Checksum();
  sum_.feed(head_.data() + kHeaderSize, kDataPrefixBytes);
  length_ = header.length - kDataPrefixBytes - kDataSumBytes;
  filled_ = 0;
  tail_bytes_ = 0;
  discarding_ = false;
}

// Bytes of the payload that came: into the slot, or nowhere when another transfer has it by now.
size_t Connection::receive_payload() {
  if (!discarding_) {
    // Locked while it writes: the slot could end, and its memory belong to another slot.
    const std::lock_guard lock(state_.mutex);
    if (const auto place = state_.table.writable(generation_, writer_, offset_, length_)) {
      uint8_t* bytes = state_.segment.data() + *place + filled_;
      const size_t got =
          receive_some(fd_.get(), bytes, std::min<uint64_t>(kMaxLocked, length_ - filled_));
      sum_.feed(bytes, got);
      return got;
    }
  }
  discarding_ = true;
  uint8_t discarded[65536];
  return receive_some(fd_.get(), discarded,
                      std::min<uint64_t>(sizeof(discarded), length_ - filled_));
}

void Connection::finish_payload(TimePoint now) {
  head_bytes_ = tail_bytes_ = 0;
  uint64_t sum = 0;
  std::memcpy(&sum, tail_.data(), sizeof(sum));
  const bool gave_up = sum == kGaveUp;  // the reason follows on the control connection
  const bool corrupt = !discarding_ && !gave_up && sum != sum_of_frame(sum_);
  {
    const std::lock_guard lock(state_.mutex);
    state_.counters.bytes_received += length_;
    if (corrupt) {
      state_.table.end_filling(generation_, writer_, Status::kInvalid, kCorrupt, now);
    } else if (!discarding_ && !gave_up) {
      state_.table.received(generation_, writer_, length_, now);
    } else if (discarding_) {
      state_.table.discarded(generation_, writer_);
    }
  }
  if (service_.session(session_) == nullptr) {
    throw LinkError(Status::kPeerLost, "the session ended");
  }
}

void Connection::notify(const Notice& notice, TimePoint now) {
  if (phase_ != Phase::kControl) return;
  if (notice.confirm) return send(encode(Confirm{notice.generation}), now);
  send(encode(Stop{notice.generation, static_cast<uint32_t>(notice.status), notice.reason}), now);
}

void Connection::send(const std::string& frame, TimePoint now) {
  if (phase_ == Phase::kDraining) return;
  if (out_.size() > kMaxQueuedOut) {
    throw LinkError(Status::kTimeout, "the peer does not read its answers");
  }
  if (out_.empty()) last_out_ = now;
  out_ += frame;
  flush(now);
}

void Connection::writable(TimePoint now) {
  flush(now);
  if (phase_ == Phase::kDraining && out_.empty()) ::shutdown(fd_.get(), SHUT_WR);
}

void Connection::flush(TimePoint now) {
  if (send_queued(fd_.get(), &out_) > 0) last_out_ = now;
}

void Connection::refuse(const std::string& reason, TimePoint now) {
  if (phase_ == Phase::kDraining) return;
  send(encode(Refused{reason}), now);
  drain(now);
}

void Connection::drain(TimePoint now) {
  if (phase_ == Phase::kDraining) return;
  handshake_deadline_ = now + (writer_.shared ? kRemoteWriteTime : kHandshakeTime);
  phase_ = Phase::kDraining;
  if (out_.empty()) ::shutdown(fd_.get(), SHUT_WR);
}

}  // namespace tetri
