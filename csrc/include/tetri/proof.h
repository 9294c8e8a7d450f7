// Both ends of a connection prove that they hold the same key, before anything else is read.
//
//   sender                              receiver
//   CHALLENGE, 32 random bytes  ---->
//                               <----   CHALLENGE, 32 random bytes
//   PROOF as the sender         ---->   checks it, and closes if it is wrong
//   checks it                   <----   PROOF as the receiver
//
// A proof is HMAC-SHA256(key, role | sender's bytes | receiver's bytes | protocol version |
// receiver's address). The role keeps either end from being handed its own proof, the bytes keep
// a proof from being replayed, and the address keeps a process that listens elsewhere (at the port
// of a dead receiver, say) from relaying both ends' frames. WELCOME and LINK, which say where the
// receiver's memory is and how it will be written, are signed with the same ingredients. The proof
// authenticates the beginning of a connection only: bytes that follow are neither encrypted nor
// signed.
#pragma once

#include <array>
#include <string>

#include "tetri/control_channel.h"
#include "tetri/frame.h"
#include "tetri/net.h"

namespace tetri {

constexpr size_t kKeyBytes = 32;

// Empty, which means that no proof is asked for, or kKeyBytes long. Throws
// std::invalid_argument.
void check_key(const std::string& key);

enum class Side { kSender, kReceiver };

std::string make_nonce();

// What both ends know once they have proved themselves. An empty key: there was no proof.
struct Proven {
  std::string key;
  std::string sender_nonce;
  std::string receiver_nonce;
  std::string receiver_address;
};
// Signs frames of the handshake as this side; empty without a key.
std::string mac_of(const Proven& proven, Side side, const std::string& frames);

// `receiver_address` is that of its end of the connection, as both ends see it.
std::string proof_of(const std::string& key, Side side, const std::string& sender_nonce,
                     const std::string& receiver_nonce, const std::string& receiver_address);

// The sender's half. Blocks until `deadline` or until cancel_fd is readable. Throws LinkError, also
// when the other end does not hold the key, and FrameError.
Proven prove(ControlChannel& control, const std::string& key, const Endpoint& endpoint,
             TimePoint deadline, int cancel_fd);

// The receiver's half: takes the bytes of two small frames, and none beyond them.
class Authenticator {
 public:
  Authenticator(std::string key, std::string address)
      : key_(std::move(key)), address_(std::move(address)) {}

  // Whether the peer has proved itself; nothing more is to be read here then.
  bool has_proof() const { return has_proof_; }
  Proven proven() const { return {key_, theirs_, mine_, address_}; }
  // Where the peer's next bytes go, and how many of them.
  uint8_t* room() { return frame_.data() + filled_; }
  size_t wants() const { return frame_.size() - filled_; }
  // Takes `bytes` bytes that were read into `room`. Returns what to answer, often nothing. Throws
  // FrameError with a message for the peer when it does not hold the key.
  std::string take(size_t bytes);

 private:
  std::string answer(const Frame& frame);

  const std::string key_;
  const std::string address_;
  std::array<uint8_t, kHeaderSize + kProofBodyBytes> frame_{};
  size_t filled_ = 0;
  std::string theirs_;
  std::string mine_;
  bool has_proof_ = false;
};

}  // namespace tetri
