// The wire: frames, and the messages inside them.
//
//   [ magic u32 | version u16 | type u16 | length u32 ] [ length bytes ]
//
// Little-endian. A message is its fields in the order of `fields`; text is a u32 length and bytes.
// Nothing here trusts the bytes it reads: a wrong one throws FrameError.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

namespace tetri {

constexpr uint32_t kMagic = 0x564b5454;  // "TTKV"
constexpr uint16_t kVersion = 3;
constexpr size_t kHeaderSize = 12;
constexpr uint32_t kMaxControlBytes = 160 << 10;
constexpr uint32_t kMaxMessageBytes = 64 << 10;
constexpr uint32_t kDataChunkBytes = 512 << 10;
constexpr size_t kDataPrefixBytes = 16;  // generation, offset
constexpr size_t kDataSumBytes = 8;      // after the bytes, over all before it but the header
constexpr uint32_t kMaxRanks = 1024;
constexpr size_t kMaxOffers = 8;
constexpr size_t kMaxOfferBytes = 64 << 10;
constexpr size_t kMaxKindBytes = 32;
constexpr size_t kNonceBytes = 32;
constexpr uint32_t kProofBodyBytes = 4 + kNonceBytes;  // of a challenge and of a proof

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire order is the host's order");

enum class Type : uint16_t {
  kHello = 1,  // sender: who I am
  kWelcome,    // receiver: identity fits; these links reach me
  kRefused,    // receiver: reason, then the connection ends
  kLink,       // sender: the link that it will use; ends the handshake
  kJoin,       // sender, on a new connection: carries data of that session
  kJoined,     // receiver
  kOpen,       // sender: a slot, please
  kOpened,     // receiver: granted, full or refused
  kData,       // sender, data connections only: generation, offset, bytes, checksum
  kDone,       // sender: that was all, with the number of bytes
  kConfirm,    // receiver: everything of this rank is here
  kCancel,     // sender: forget it; it has stopped writing
  kStop,       // receiver: this slot is no longer yours; stop writing and say so
  kStopped,    // sender: it has stopped writing

  kMessage = 17,  // sender: a small message; nothing has 15 and 16 any more
  kMessageAck,    // receiver
  kChallenge,     // both, before all others: random bytes to prove oneself by
  kProof,         // both: who has sent it holds the key
  kProgress,      // sender: it has written into the slot where the receiver cannot see it
};

class FrameError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Header {
  Type type;
  uint32_t length;
};

// `bytes` holds kHeaderSize bytes. Throws FrameError.
Header parse_header(const uint8_t* bytes);
void write_header(uint8_t* bytes, Type type, uint32_t length);

using Identity = std::map<std::string, std::string>;
// By the kind of link: what its writer needs to reach the receiver's memory, opaque here.
using Offers = std::map<std::string, std::string>;

class Encoder {
 public:
  template <typename Number>
  void operator()(const Number& value) {
    static_assert(std::is_integral_v<Number>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void operator()(const std::string& value);
  void operator()(const Identity& value);
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

class Decoder {
 public:
  explicit Decoder(std::string_view bytes) : rest_(bytes) {}
  template <typename Number>
  void operator()(Number& value) {
    static_assert(std::is_integral_v<Number>);
    std::memcpy(&value, cut(sizeof(value)).data(), sizeof(value));
  }
  void operator()(std::string& value);
  void operator()(Identity& value);
  void end() const;  // throws FrameError when bytes are left over

 private:
  std::string_view cut(size_t bytes);
  std::string_view rest_;
};

struct Hello {
  static constexpr Type kType = Type::kHello;
  Identity identity;
  uint32_t rank = 0, num_ranks = 1;
  std::string boot_id;
  auto fields() { return std::tie(identity, rank, num_ranks, boot_id); }
};

struct Welcome {
  static constexpr Type kType = Type::kWelcome;
  uint64_t session = 0;
  std::string segment;  // empty: no shared memory from there
  std::string nonce;
  uint32_t has_host_memory = 1;  // slots are in the segment, not in memory that an offer names
  Offers offers;
  std::string mac;  // of Hello and this, without it; empty without a key
  auto fields() { return std::tie(session, segment, nonce, has_host_memory, offers, mac); }
};

struct Refused {
  static constexpr Type kType = Type::kRefused;
  std::string reason;
  auto fields() { return std::tie(reason); }
};

struct LinkChoice {
  static constexpr Type kType = Type::kLink;
  std::string kind;
  std::string mac;  // of Hello, Welcome and this, without it; empty without a key
  auto fields() { return std::tie(kind, mac); }
};

struct Join {
  static constexpr Type kType = Type::kJoin;
  uint64_t session = 0;
  auto fields() { return std::tie(session); }
};

struct Joined {
  static constexpr Type kType = Type::kJoined;
  auto fields() { return std::tie(); }
};

struct Open {
  static constexpr Type kType = Type::kOpen;
  uint64_t request = 0;
  std::string transfer;
  uint64_t num_blocks = 0, block_bytes = 0;
  auto fields() { return std::tie(request, transfer, num_blocks, block_bytes); }
};

struct Opened {
  static constexpr Type kType = Type::kOpened;
  uint64_t request = 0;
  uint32_t status = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;  // of this rank's part, from the start of the segment
  uint32_t control = 0;
  std::string error;
  auto fields() { return std::tie(request, status, generation, offset, control, error); }
};

struct Done {
  static constexpr Type kType = Type::kDone;
  uint64_t generation = 0, total_bytes = 0;
  auto fields() { return std::tie(generation, total_bytes); }
};

// All that these say is which slot they are about.
template <Type type>
struct OfSlot {
  static constexpr Type kType = type;
  uint64_t generation = 0;
  auto fields() { return std::tie(generation); }
};
using Confirm = OfSlot<Type::kConfirm>;
using Stopped = OfSlot<Type::kStopped>;
using Progress = OfSlot<Type::kProgress>;

struct Cancel {
  static constexpr Type kType = Type::kCancel;
  uint64_t generation = 0;
  std::string reason;
  auto fields() { return std::tie(generation, reason); }
};

struct Stop {
  static constexpr Type kType = Type::kStop;
  uint64_t generation = 0;
  uint32_t status = 0;
  std::string reason;
  auto fields() { return std::tie(generation, status, reason); }
};

struct Message {
  static constexpr Type kType = Type::kMessage;
  uint64_t id = 0;
  std::string payload;
  auto fields() { return std::tie(id, payload); }
};

struct MessageAck {
  static constexpr Type kType = Type::kMessageAck;
  uint64_t id = 0;
  uint32_t status = 0;
  auto fields() { return std::tie(id, status); }
};

struct Challenge {
  static constexpr Type kType = Type::kChallenge;
  std::string nonce;
  auto fields() { return std::tie(nonce); }
};

struct Proof {
  static constexpr Type kType = Type::kProof;
  std::string proof;
  auto fields() { return std::tie(proof); }
};

template <typename T>
std::string body_of(T message) {
  Encoder encoder;
  std::apply([&](const auto&... values) { (encoder(values), ...); }, message.fields());
  return encoder.take();
}

template <typename T>
std::string encode(T message) {
  const std::string body = body_of(std::move(message));
  uint8_t header[kHeaderSize];
  write_header(header, T::kType, static_cast<uint32_t>(body.size()));
  return std::string(reinterpret_cast<const char*>(header), kHeaderSize) + body;
}

struct Frame {
  Type type;
  std::string body;
};

// Throws FrameError unless the frame is a whole T and nothing else.
template <typename T>
T decode(const Frame& frame) {
  if (frame.type != T::kType) {
    throw FrameError("unexpected frame type " + std::to_string(static_cast<int>(frame.type)));
  }
  T message;
  Decoder decoder(frame.body);
  std::apply([&](auto&... values) { (decoder(values), ...); }, message.fields());
  decoder.end();
  return message;
}

// Cuts a byte stream into control frames. Holds at most one frame plus what was fed last.
class FrameParser {
 public:
  void feed(const uint8_t* bytes, size_t length) {
    buffer_.append(reinterpret_cast<const char*>(bytes), length);
  }
  // False when no whole frame is there yet. Throws FrameError for a frame that cannot be right;
  // after that the stream is useless.
  bool next(Frame* frame);
  bool empty() const { return buffer_.size() == begin_; }

 private:
  std::string buffer_;
  size_t begin_ = 0;
};

// Kinds of links: "shm" and "tcp" are moved by this library, all others by its caller.
inline bool is_moved_here(const std::string& kind) { return kind == "shm" || kind == "tcp"; }
// The writer reaches the control words, and the receiver's kernel knows when it is gone.
inline bool is_same_host(const std::string& kind) {
  return kind == "shm" || kind == "dma" || kind == "ipc";
}
// Slots are in the receiver's segment; other kinds need an offer that says where they are.
inline bool needs_host_memory(const std::string& kind) {
  return kind == "shm" || kind == "tcp" || kind == "dma";
}

// What a peer has written, fit for logs and for Python: short, and nothing but ASCII that prints.
std::string printable(std::string_view text);

// "name: here 128, there 16" for every key that differs, sorted; empty when nothing does.
std::string identity_difference(const Identity& here, const Identity& there);

}  // namespace tetri
