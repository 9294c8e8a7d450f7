#include "tetri/transfer.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "tetri/arena.h"
#include "tetri/control_channel.h"
#include "tetri/receiver.h"
#include "tetri/sender.h"

using namespace tetri;
using std::chrono::seconds;
using tetri::test::eventually;

namespace {

using Links = std::vector<std::string>;

constexpr uint64_t kBlocks = 64;

struct Cache {
  Cache(size_t layers, uint64_t page, unsigned seed) : memory(layers * kBlocks * page) {
    std::mt19937 dice(seed);
    if (seed != 0) {
      for (uint8_t& byte : memory) byte = static_cast<uint8_t>(dice());
    }
    std::vector<uint64_t> bases;
    for (size_t layer = 0; layer < layers; ++layer) {
      bases.push_back(reinterpret_cast<uint64_t>(memory.data() + layer * kBlocks * page));
    }
    layout = std::make_shared<Layout>(bases, std::vector<uint64_t>(layers, page),
                                      std::vector<uint64_t>(layers, page), kBlocks);
  }
  std::vector<uint8_t> memory;
  LayoutPtr layout;
};

ReceiverOptions receiving() {
  return {32 << 20, "127.0.0.1", 0, {{"model", "tiny"}}, seconds(20), seconds(20), 64};
}

SenderOptions sending(const Links& links) {
  SenderOptions options;
  options.identity = {{"model", "tiny"}};
  options.links = links;
  options.open_timeout = seconds(10);
  options.io_timeout = seconds(10);
  return options;
}

std::vector<int32_t> all_ids(unsigned seed) {
  std::vector<int32_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  return ids;
}

void push_and_compare(const Links& links) {
  Receiver receiver(receiving());
  Sender sender(sending(links));
  const Cache source(3, 10000, 1);
  Cache target(3, 10000, 0);
  const auto ids = all_ids(1);
  const TransferPtr transfer =
      sender.open(receiver.endpoint(), "t", kBlocks, source.layout->block_bytes());
  CHECK(transfer->write(source.layout, 0, ids) == Status::kOk);
  transfer->finish();
  eventually([&] { return transfer->state() == TransferState::kDone; });
  Arena arena(receiver.segment());
  arena.load(receiver.take("t")->offset, 0, *target.layout, ids);
  CHECK(target.memory == source.memory);
  receiver.release("t");
  CHECK(receiver.stats().arena_used_bytes == 0);
}

// Threads that send, cancel on both sides and take, all at once.
void stress(const Links& links) {
  Receiver receiver(receiving());
  Sender sender(sending(links));
  const Cache source(2, 4096, 1);
  std::atomic<int> done{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 dice(seed);
    for (int turn = 0; turn < 40; ++turn) {
      const std::string name = std::to_string(seed) + "-" + std::to_string(turn);
      const TransferPtr transfer =
          sender.open(receiver.endpoint(), name, kBlocks, source.layout->block_bytes());
      const auto ids = all_ids(dice());
      transfer->write(source.layout, 0, ids);
      const unsigned fate = dice() % 4;
      if (fate == 0) transfer->cancel();
      if (fate == 1) receiver.cancel(name);
      transfer->finish();
      eventually([&] { return transfer->quiesced(); });
      if (transfer->state() != TransferState::kDone) continue;
      ++done;
      if (!receiver.take(name)) continue;
      receiver.release(name);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  CHECK(done > 40);
  eventually([&] { return receiver.stats().arena_used_bytes == 0; });
}

}  // namespace

TEST(transfer_over_shm) { push_and_compare({"shm"}); }
TEST(transfer_over_tcp) { push_and_compare({"tcp"}); }
TEST(transfer_stress_over_shm) { stress({"shm"}); }
TEST(transfer_stress_over_tcp) { stress({"tcp"}); }

TEST(arena_refuses_what_lies_outside) {
  Receiver receiver(receiving());
  Arena arena(receiver.segment());
  const Cache target(1, 4096, 1);
  const uint64_t offset = tetri::kHeaderBytes;
  arena.load(offset, 1, *target.layout, {0});
  CHECK_THROWS(arena.load(0, 0, *target.layout, {0}), std::invalid_argument);
  CHECK_THROWS(arena.load(offset, uint64_t{1} << 60, *target.layout, {0}), std::invalid_argument);
  CHECK_THROWS(arena.load(offset, 0, *target.layout, {-1}), std::invalid_argument);
  arena.close();
  CHECK_THROWS(arena.load(offset, 0, *target.layout, {0}), std::invalid_argument);
}

TEST(transfer_ends_when_the_receiver_closes_in_the_middle) {
  for (const char* kind : {"shm", "tcp"}) {
    Receiver receiver(receiving());
    Sender sender(sending({kind}));
    const Cache source(4, 65536, 1);
    const TransferPtr transfer =
        sender.open(receiver.endpoint(), "t", kBlocks, source.layout->block_bytes());
    transfer->write(source.layout, 0, all_ids(1));
    eventually([&] { return transfer->bytes_sent() > 0; });
    receiver.close();
    eventually([&] { return transfer->quiesced(); });
    CHECK(transfer->status() == Status::kPeerLost);
  }
}

TEST(messages_from_many_threads_all_arrive) {
  Receiver receiver(receiving());
  Sender sender(sending({"shm", "tcp"}));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) {
        CHECK(sender.send(receiver.endpoint(), "hello", seconds(10)) == Status::kOk);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int turn = 0; turn < 200; ++turn) CHECK(receiver.receive() == "hello");
}

// It breaks the protocol just when it has left too many answers unread to be told so: until it is
// gone it may write into its slot.
TEST(a_writer_that_cannot_be_refused_keeps_its_memory) {
  Receiver receiver(receiving());
  const TimePoint deadline = Clock::now() + seconds(20);
  ControlChannel control(connect_to(parse_endpoint(receiver.endpoint()), deadline, -1));
  control.send(encode(Hello{receiving().identity, 0, 1, boot_id()}));
  control.expect(deadline, -1);
  control.send(encode(LinkChoice{"shm", ""}) + encode(Open{1, "mine", 1, 4096}));
  control.expect(deadline, -1);
  const std::string wrong = encode(Open{2, std::string(1000, 'x'), 1, uint64_t{1} << 60});
  control.send(wrong);
  const size_t answer = kHeaderSize + control.expect(deadline, -1).body.size();
  int accepted = -1;
  for (int fd = 3; fd < 1024 && accepted < 0; ++fd) {
    try {
      if (remote_endpoint(fd) == local_endpoint(control.fd())) accepted = fd;
    } catch (const LinkError&) {  // no socket
    }
  }
  const int small = 1 << 14;  // buffers in the kernel
  CHECK(::setsockopt(accepted, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
  CHECK(::setsockopt(control.fd(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0);
  const auto say = [&](size_t times, const std::string& last) {
    for (size_t time = 0; time < times; ++time) control.send(wrong);
    control.send(last);
    eventually([&] {
      control.flush();
      return !control.wants_write();
    });
  };
  constexpr size_t kMost = 1 << 20;  // of answers that wait for a peer
  say(kMost / answer, encode(Message{3, "now"}));
  eventually([&] { return receiver.receive().has_value(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until the kernel moves no more
  int unsent = 0, unread = 0;
  CHECK(::ioctl(accepted, SIOCOUTQ, &unsent) == 0 && ::ioctl(control.fd(), FIONREAD, &unread) == 0);
  const size_t said = kMost / answer * answer + encode(MessageAck{}).size();
  const size_t waiting = said - static_cast<size_t>(unsent + unread);
  say((kMost - waiting) / answer + 1, encode(Joined{}));
  eventually([&] { return receiver.find("mine")->state == SlotState::kFailed; });
  CHECK(receiver.stats().quarantined_bytes > 0);
  control.take();
  eventually([&] { return receiver.stats().arena_used_bytes == 0; });
}
