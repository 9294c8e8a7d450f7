#include "tetri/proof.h"

#include <cstring>

#include "tetri/segment.h"
#include "tetri/sha256.h"

namespace tetri {

namespace {

constexpr char kSenderRole[] = "vllm-tetri KV sender";
constexpr char kReceiverRole[] = "vllm-tetri KV receiver";

constexpr char kSenderFrames[] = "vllm-tetri KV frames of the sender";
constexpr char kReceiverFrames[] = "vllm-tetri KV frames of the receiver";

// The role, then what makes this connection different from all others.
std::string signed_text(const char* role, const std::string& sender_nonce,
                        const std::string& receiver_nonce, const std::string& receiver_address) {
  std::string text = role;
  text += '\0';
  text += sender_nonce;
  text += receiver_nonce;
  text += static_cast<char>(kVersion & 0xff);
  text += static_cast<char>(kVersion >> 8);
  text += receiver_address;
  return text;
}

static_assert(kNonceBytes == kDigestBytes, "challenges and proofs are frames of the same length");

}  // namespace

void check_key(const std::string& key) {
  if (!key.empty() && key.size() != kKeyBytes) {
    throw std::invalid_argument("a key has " + std::to_string(kKeyBytes) + " bytes, or none");
  }
}

std::string make_nonce() {
  std::string nonce;
  while (nonce.size() < kNonceBytes) {
    const uint64_t word = random_u64();
    nonce.append(reinterpret_cast<const char*>(&word), sizeof(word));
  }
  return nonce;
}

std::string proof_of(const std::string& key, Side side, const std::string& sender_nonce,
                     const std::string& receiver_nonce, const std::string& receiver_address) {
  const char* role = side == Side::kSender ? kSenderRole : kReceiverRole;
  return hmac_sha256(key, signed_text(role, sender_nonce, receiver_nonce, receiver_address));
}

std::string mac_of(const Proven& proven, Side side, const std::string& frames) {
  if (proven.key.empty()) return "";
  const char* role = side == Side::kSender ? kSenderFrames : kReceiverFrames;
  return hmac_sha256(proven.key, signed_text(role, proven.sender_nonce, proven.receiver_nonce,
                                             proven.receiver_address) +
                                     '\0' + frames);
}

Proven prove(ControlChannel& control, const std::string& key, const Endpoint& endpoint,
             TimePoint deadline, int cancel_fd) {
  if (key.empty()) return {};
  const std::string mine = make_nonce();
  const std::string address = remote_endpoint(control.fd());
  control.send(encode(Challenge{mine}));
  const auto theirs = decode<Challenge>(control.expect(deadline, cancel_fd)).nonce;
  if (theirs.size() != kNonceBytes) throw FrameError("a challenge of another length");
  control.send(encode(Proof{proof_of(key, Side::kSender, mine, theirs, address)}));
  const auto proof = decode<Proof>(control.expect(deadline, cancel_fd)).proof;
  if (!equal_in_constant_time(proof, proof_of(key, Side::kReceiver, mine, theirs, address))) {
    throw LinkError(Status::kRefused,
                    endpoint.host + ":" + endpoint.port + " does not hold this cluster's secret");
  }
  return {key, mine, theirs, address};
}

std::string Authenticator::take(size_t bytes) {
  filled_ += bytes;
  if (filled_ < kHeaderSize) return "";
  const Header header = parse_header(frame_.data());
  const Type wanted = theirs_.empty() ? Type::kChallenge : Type::kProof;
  if (header.type != wanted) {
    throw FrameError(
        "this receiver wants to be shown the cluster's secret first; start the sender with the "
        "same --tetri-secret-file");
  }
  if (header.length != kProofBodyBytes) throw FrameError("a challenge or proof of another length");
  if (filled_ < frame_.size()) return "";
  filled_ = 0;
  return answer({header.type, std::string(frame_.begin() + kHeaderSize, frame_.end())});
}

std::string Authenticator::answer(const Frame& frame) {
  if (theirs_.empty()) {
    const auto challenge = decode<Challenge>(frame);
    if (challenge.nonce.size() != kNonceBytes) throw FrameError("a challenge of another length");
    theirs_ = challenge.nonce;
    mine_ = make_nonce();
    return encode(Challenge{mine_});
  }
  const auto proof = decode<Proof>(frame).proof;
  if (!equal_in_constant_time(proof, proof_of(key_, Side::kSender, theirs_, mine_, address_))) {
    throw FrameError(
        "the sender holds another secret than this receiver, or came by another address");
  }
  has_proof_ = true;
  return encode(Proof{proof_of(key_, Side::kReceiver, theirs_, mine_, address_)});
}

}  // namespace tetri
