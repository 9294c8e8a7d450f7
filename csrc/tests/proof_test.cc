#include "tetri/proof.h"

#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "tetri/receiver.h"
#include "tetri/sender.h"
#include "tetri/sha256.h"

using namespace tetri;
using std::chrono::seconds;

namespace {

using Links = std::vector<std::string>;

std::string hex(const std::string& bytes) {
  std::string text;
  char digits[3];
  for (const char byte : bytes) {
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<uint8_t>(byte));
    text += digits;
  }
  return text;
}

const std::string kHere = "127.0.0.1:1";

std::string key_of(char letter) { return std::string(kKeyBytes, letter); }

ReceiverOptions receiving(const std::string& key) {
  return {1 << 20, "127.0.0.1", 0, {{"model", "tiny"}}, seconds(20), seconds(20), 8, key};
}

SenderOptions sending(const std::string& key, const Links& links = {"shm", "tcp"}) {
  SenderOptions options;
  options.identity = {{"model", "tiny"}};
  options.links = links;
  options.open_timeout = seconds(10);
  options.io_timeout = seconds(10);
  options.key = key;
  return options;
}

// What becomes of a message from one to the other.
Status said(const std::string& here, const std::string& there,
            const Links& links = {"shm", "tcp"}) {
  Receiver receiver(receiving(there));
  Sender sender(sending(here, links));
  return sender.send(receiver.endpoint(), "hello", seconds(10));
}

// Feeds an authenticator as a socket would; returns what it answers.
std::string feed(Authenticator* authenticator, std::string bytes) {
  std::string answers;
  while (!bytes.empty() && !authenticator->has_proof()) {
    const size_t count = std::min(bytes.size(), authenticator->wants());
    std::memcpy(authenticator->room(), bytes.data(), count);
    bytes.erase(0, count);
    answers += authenticator->take(count);
  }
  return answers;
}

template <typename T>
T only(const std::string& bytes) {
  FrameParser parser;
  parser.feed(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  Frame frame;
  CHECK(parser.next(&frame));
  CHECK(parser.empty());
  return decode<T>(frame);
}

}  // namespace

// NIST's examples of FIPS 180.
TEST(sha256_of_known_texts) {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                   "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")) ==
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(hex(sha256(std::string(1000000, 'a'))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, cases 1, 2, 3, 6 and 7.
TEST(hmac_of_known_texts) {
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  const std::string long_key(131, '\xaa');
  CHECK(hex(hmac_sha256(long_key, "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hex(hmac_sha256(long_key,
                        "This is a test using a larger than block-size key and a larger than "
                        "block-size data. The key needs to be hashed before being used by the "
                        "HMAC algorithm.")) ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(comparison_looks_at_every_byte) {
  CHECK(equal_in_constant_time("abc", "abc"));
  CHECK(equal_in_constant_time("", ""));
  CHECK(!equal_in_constant_time("abc", "abd"));
  CHECK(!equal_in_constant_time("abc", "xbc"));
  CHECK(!equal_in_constant_time("abc", "ab"));
}

TEST(proof_depends_on_everything) {
  const std::string one = make_nonce();
  const std::string other = make_nonce();
  CHECK(one.size() == kNonceBytes && one != other);
  const std::string proof = proof_of(key_of('k'), Side::kSender, one, other, kHere);
  CHECK(proof == proof_of(key_of('k'), Side::kSender, one, other, kHere));
  CHECK(proof != proof_of(key_of('l'), Side::kSender, one, other, kHere));
  CHECK(proof != proof_of(key_of('k'), Side::kReceiver, one, other, kHere));
  CHECK(proof != proof_of(key_of('k'), Side::kSender, other, one, kHere));
  CHECK(proof != proof_of(key_of('k'), Side::kSender, one, other, "127.0.0.1:2"));
}

TEST(authenticator_accepts_a_holder_of_the_key) {
  Authenticator authenticator(key_of('k'), kHere);
  const std::string mine = make_nonce();
  const std::string theirs = only<Challenge>(feed(&authenticator, encode(Challenge{mine}))).nonce;
  const std::string proof = proof_of(key_of('k'), Side::kSender, mine, theirs, kHere);
  const std::string answer = feed(&authenticator, encode(Proof{proof}));
  CHECK(only<Proof>(answer).proof == proof_of(key_of('k'), Side::kReceiver, mine, theirs, kHere));
  CHECK(authenticator.has_proof());
}

TEST(authenticator_refuses_all_others) {
  const std::string mine = make_nonce();
  const auto refused = [&](const std::string& second) {
    Authenticator authenticator(key_of('k'), kHere);
    feed(&authenticator, encode(Challenge{mine}));
    CHECK_THROWS(feed(&authenticator, second), FrameError);
    CHECK(!authenticator.has_proof());
  };
  refused(encode(Proof{std::string(kNonceBytes, 'x')}));
  refused(encode(Proof{std::string(kNonceBytes - 1, 'x')}));
  refused(encode(Challenge{mine}));
  refused(encode(Done{1, 2}));
  Authenticator authenticator(key_of('k'), kHere);
  CHECK_THROWS(feed(&authenticator, encode(Proof{std::string(kNonceBytes, 'x')})), FrameError);
  // Its own proof is of no use to who hands it back.
  Authenticator twin(key_of('k'), kHere);
  const std::string theirs = only<Challenge>(feed(&twin, encode(Challenge{mine}))).nonce;
  const std::string reflected = proof_of(key_of('k'), Side::kReceiver, mine, theirs, kHere);
  CHECK_THROWS(feed(&twin, encode(Proof{reflected})), FrameError);
}

TEST(authenticator_refuses_random_and_mutated_frames) {
  std::mt19937 dice(3);
  for (int turn = 0; turn < 20000; ++turn) {
    Authenticator authenticator(key_of('k'), kHere);
    std::string bytes = encode(Challenge{make_nonce()});
    if (turn % 2 == 0) bytes += encode(Proof{make_nonce()});
    for (unsigned flips = dice() % 6; flips > 0; --flips) {
      bytes[dice() % bytes.size()] = static_cast<char>(dice());
    }
    try {
      feed(&authenticator, bytes);
    } catch (const FrameError&) {
    }
    CHECK(!authenticator.has_proof());
  }
}

TEST(peers_with_the_same_key_talk) {
  for (const char* kind : {"shm", "tcp"}) {
    CHECK(said(key_of('k'), key_of('k'), {kind}) == Status::kOk);
  }
}

TEST(peers_with_another_key_or_none_do_not) {
  CHECK(said(key_of('k'), key_of('l')) == Status::kRefused);
  CHECK(said("", key_of('l')) == Status::kRefused);
  CHECK(said(key_of('k'), "") == Status::kRefused);
  CHECK_THROWS(said("short", "short"), std::invalid_argument);
}

TEST(receiver_that_does_not_hold_the_key_learns_nothing) {
  Fd listener = listen_on("127.0.0.1", 0);
  std::string seen;
  std::thread impostor([&] {
    // The listener does not wait, so this does.
    CHECK(wait_for(listener.get(), POLLIN, Clock::now() + seconds(10), -1));
    Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string answer =
        encode(Challenge{make_nonce()}) + encode(Proof{std::string(kNonceBytes, 'x')});
    CHECK(::send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL) > 0);
    char buffer[4096];
    for (ssize_t got = 1; got > 0;) {
      got = ::recv(fd.get(), buffer, sizeof(buffer), 0);
      if (got > 0) seen.append(buffer, static_cast<size_t>(got));
    }
  });
  Sender sender(sending(key_of('k')));
  const Status status = sender.send(local_endpoint(listener.get()), "hello", seconds(10));
  impostor.join();
  CHECK(status == Status::kRefused);
  CHECK(seen.size() == 2 * (kHeaderSize + kProofBodyBytes));  // a challenge and a proof, no more
}

TEST(unauthenticated_connections_make_room_for_peers) {
  Receiver receiver(receiving(key_of('k')));
  const Endpoint endpoint = parse_endpoint(receiver.endpoint());
  std::vector<Fd> unauthenticated;
  for (int count = 0; count < 300; ++count) {
    unauthenticated.push_back(connect_to(endpoint, Clock::now() + seconds(10), -1));
  }
  Sender sender(sending(key_of('k')));
  CHECK(sender.send(receiver.endpoint(), "hello", seconds(10)) == Status::kOk);
  CHECK(receiver.stats().connections <= 256 + 8);
}

TEST(text_of_peers_becomes_fit_for_logs) {
  CHECK(printable("plain text") == "plain text");
  CHECK(printable("\xff\x01\n\x7f!") == std::string(4, '?') + "!");
  CHECK(printable(std::string(1 << 20, 'x')).size() == 4096);
}
