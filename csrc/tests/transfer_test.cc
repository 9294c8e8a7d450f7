#include "tetri/transfer.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "tetri/arena.h"
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
