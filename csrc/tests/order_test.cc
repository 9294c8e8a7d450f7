// Orders under sanitizers: what tests in Python cannot see is a copy that is too late, or a race.
#include "tetri/order.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "tetri/arena.h"
#include "tetri/proof.h"
#include "tetri/receiver.h"
#include "tetri/sender.h"

using namespace tetri;
using std::chrono::milliseconds;
using std::chrono::seconds;
using tetri::test::eventually;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kBlocks = 16;

struct Cache {
  explicit Cache(bool is_device = true) : memory(kBlocks * kPage) {
    for (size_t index = 0; index < memory.size(); ++index) {
      memory[index] = static_cast<uint8_t>(index / 7);
    }
    layout =
        std::make_shared<Layout>(std::vector<uint64_t>{reinterpret_cast<uint64_t>(memory.data())},
                                 std::vector<uint64_t>{kPage}, std::vector<uint64_t>{kPage},
                                 kBlocks, std::vector<uint64_t>{}, 0, is_device);
  }
  std::vector<uint8_t> memory;
  LayoutPtr layout;
};

ReceiverOptions receiving(const std::string& key = "") {
  return {1 << 20, "127.0.0.1", 0, {{"model", "tiny"}}, seconds(20), seconds(20), 64, key};
}

SenderOptions sending(std::vector<std::string> links = {"dma"}, const std::string& key = "") {
  SenderOptions options;
  options.identity = {{"model", "tiny"}};
  options.links = std::move(links);
  options.open_timeout = seconds(10);
  options.io_timeout = seconds(10);
  options.key = key;
  return options;
}

std::vector<int32_t> ids(size_t count) {
  std::vector<int32_t> found(count);
  for (size_t index = 0; index < count; ++index) found[index] = static_cast<int32_t>(index);
  return found;
}

// A mover: copies what an order names into the arena, as a device's engine would.
void carry_out(const Order& order) {
  const Segment segment = Segment::attach(order.offer());
  for (size_t row = 0; row < order.op().ids.size(); ++row) {
    const auto* page = order.op().layout->page(0, static_cast<uint64_t>(order.op().ids[row]));
    std::memcpy(segment.data() + order.offset() + row * kPage, page, kPage);
  }
}

// A receiver, a sender, and a transfer `t` whose one order is begun.
struct Begun {
  Receiver receiver{receiving()};
  Sender sender{sending()};
  Cache cache;
  TransferPtr transfer = sender.open(receiver.endpoint(), "t", 4, kPage);
  OrderPtr order;

  Begun() {
    CHECK(transfer->write(cache.layout, 0, ids(4), 9) == Status::kOk);
    order = sender.take_order(seconds(10));
    CHECK(order && order->op().tag == 9 && order->begin());
  }
  // Whether another transfer, as large as the arena, gets a slot: then memory was given back.
  bool is_free() {
    const TransferPtr all = sender.open(receiver.endpoint(), "all", 256, kPage);
    eventually([&] { return all->state() != TransferState::kOpening; });
    const bool granted = all->state() == TransferState::kSending;
    all->cancel();
    return granted;
  }
};

}  // namespace

TEST(order_is_placed) {
  Begun it;
  it.transfer->finish();
  carry_out(*it.order);
  it.order->placed();
  eventually([&] { return it.transfer->state() == TransferState::kDone; });
  Cache target(false);
  target.memory.assign(target.memory.size(), 0);
  Arena(it.receiver.segment()).load(it.receiver.take("t")->offset, 0, *target.layout, ids(4));
  CHECK(std::memcmp(target.memory.data(), it.cache.memory.data(), 4 * kPage) == 0);
  CHECK_THROWS(it.order->placed(), std::invalid_argument);
}

TEST(order_that_is_begun_keeps_the_slot_of_a_cancelled_transfer) {
  Begun it;
  it.transfer->cancel();
  CHECK(!it.is_free());
  CHECK(!it.transfer->quiesced());
  carry_out(*it.order);  // late, and still into memory of its own
  it.order->placed();
  CHECK(it.transfer->quiesced());
  eventually([&] { return it.is_free(); });
}

TEST(order_that_is_begun_keeps_the_slot_of_a_transfer_that_the_receiver_stops) {
  Begun it;
  it.receiver.cancel("t");
  eventually([&] { return it.transfer->state() == TransferState::kFailed; });
  CHECK(!it.order->live());
  CHECK(!it.is_free());
  CHECK(it.receiver.stats().quarantined == 1);
  it.order->failed("stopped");
  eventually([&] { return it.is_free(); });
}

TEST(order_that_is_begun_keeps_the_slot_of_a_lost_session) {
  Begun it;
  it.sender.exclude(it.receiver.endpoint(), "dma");
  eventually([&] { return it.transfer->status() == Status::kPeerLost; });
  CHECK(it.receiver.stats().filling == 1);
  CHECK(it.receiver.stats().connections == 1);
  it.order.reset();
  eventually([&] { return it.receiver.stats().connections == 0; });
  CHECK(it.receiver.stats().arena_used_bytes == 0);
}

TEST(order_that_is_begun_keeps_the_slot_of_a_closed_sender) {
  Begun it;
  std::thread closing([&] { it.sender.close(); });
  eventually([&] { return it.transfer->status() == Status::kClosed; });
  CHECK(it.receiver.stats().filling == 1);
  carry_out(*it.order);
  it.order->placed();
  closing.join();
  eventually([&] { return it.receiver.stats().arena_used_bytes == 0; });
}

TEST(order_that_never_ends_keeps_the_connection_for_good) {
  Begun it;
  it.sender.close();
  CHECK(it.receiver.stats().filling == 1);
  CHECK(it.receiver.stats().connections == 1);
  CHECK(!it.transfer->quiesced());
  it.order->failed("late");
  CHECK(it.transfer->quiesced());
}

TEST(order_outlives_its_sender) {
  OrderPtr order;
  Cache cache;
  Receiver receiver(receiving());
  {
    Sender sender(sending());
    sender.open(receiver.endpoint(), "t", 4, kPage)->write(cache.layout, 0, ids(4));
    order = sender.take_order(seconds(10));
    CHECK(order);
  }
  CHECK(!order->begin());
  CHECK(order->is_done());
}

TEST(order_that_nobody_takes_fails_its_transfer) {
  Receiver receiver(receiving());
  SenderOptions options = sending();
  options.io_timeout = milliseconds(100);
  Sender sender(options);
  const Cache cache;
  const TransferPtr transfer = sender.open(receiver.endpoint(), "t", 4, kPage);
  transfer->write(cache.layout, 0, ids(4));
  eventually([&] { return transfer->status() == Status::kTimeout; });
  eventually([&] { return receiver.stats().arena_used_bytes == 0; });
  CHECK(!sender.take_order({}));
}

TEST(order_over_tcp_is_staged) {
  Receiver receiver(receiving());
  Sender sender(sending({"tcp"}));
  const Cache cache;
  const TransferPtr transfer = sender.open(receiver.endpoint(), "t", 4, kPage);
  transfer->write(cache.layout, 0, ids(4));
  transfer->finish();
  const OrderPtr order = sender.take_order(seconds(10));
  CHECK(order && order->kind() == "tcp" && order->begin());
  CHECK_THROWS(order->placed(), std::invalid_argument);
  CHECK_THROWS(order->staged(cache.layout), std::invalid_argument);
  Cache stage(false);
  order->staged(stage.layout);
  eventually([&] { return order->is_done(); });
  stage.memory.assign(stage.memory.size(), 0xEE);
  eventually([&] { return transfer->state() == TransferState::kDone; });
}

TEST(excluded_kinds_are_passed_over_and_no_common_link_is_one_line) {
  Receiver receiver(receiving());
  receiver.offer("ipc", "handle");
  Sender sender(sending({"ipc", "shm"}));
  sender.exclude(receiver.endpoint(), "ipc");
  CHECK(sender.send(receiver.endpoint(), "hello", seconds(10)) == Status::kOk);
  Sender other(sending({"nixl", "nccl"}));
  const TransferPtr transfer = other.open(receiver.endpoint(), "t", 4, kPage);
  eventually([&] { return transfer->state() == TransferState::kFailed; });
  CHECK(transfer->error() == "no link to " + receiver.endpoint() +
                                 ": this side can use nixl, nccl; the receiver offers shm, dma, "
                                 "tcp, ipc; set --tetri-link auto on both");
}

TEST(offer_that_was_changed_is_refused_where_there_is_a_key) {
  const Proven proven{std::string(kKeyBytes, 'k'), make_nonce(), make_nonce(), "127.0.0.1:1"};
  Welcome welcome;
  welcome.offers = {{"nixl", "good"}};
  const std::string mac = mac_of(proven, Side::kReceiver, body_of(welcome));
  CHECK(mac == mac_of(proven, Side::kReceiver, body_of(welcome)));
  CHECK(mac != mac_of(proven, Side::kSender, body_of(welcome)));
  welcome.offers["nixl"] = "evil";
  CHECK(mac != mac_of(proven, Side::kReceiver, body_of(welcome)));
  for (const bool has_key : {true, false}) {
    const std::string key = has_key ? std::string(kKeyBytes, 'k') : "";
    Receiver receiver(receiving(key));
    Sender sender(sending({"dma"}, key));
    CHECK(sender.send(receiver.endpoint(), "hello", seconds(10)) == Status::kOk);
  }
}

// Movers, cancels of both sides and exclusions at once; every page that was taken is right.
TEST(orders_under_stress) {
  Receiver receiver(receiving());
  Sender sender(sending({"dma", "shm"}));
  const Cache cache;
  std::atomic<bool> is_over{false};
  std::vector<std::thread> movers;
  for (unsigned seed = 1; seed <= 2; ++seed) {
    movers.emplace_back([&, seed] {
      std::mt19937 dice(seed);
      while (!is_over) {
        const OrderPtr order = sender.take_order(milliseconds(5));
        if (!order || !order->begin()) continue;
        if (dice() % 8 == 0) std::this_thread::sleep_for(milliseconds(1));
        carry_out(*order);
        if (dice() % 16 != 0) order->placed();
      }
    });
  }
  std::atomic<int> done{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 dice(seed);
    for (int turn = 0; turn < 60; ++turn) {
      const std::string name = std::to_string(seed) + "-" + std::to_string(turn);
      const TransferPtr transfer = sender.open(receiver.endpoint(), name, 8, kPage);
      transfer->write(cache.layout, 0, ids(5));
      transfer->write(cache.layout, 5, {5, 6, 7});
      const unsigned fate = dice() % 4;
      if (fate == 0) transfer->cancel();
      if (fate == 1) receiver.cancel(name);
      transfer->finish();
      if (seed == 1 && turn == 30) sender.exclude(receiver.endpoint(), "dma");
      eventually([&] { return transfer->quiesced(); });
      if (transfer->state() != TransferState::kDone) continue;
      const auto slot = receiver.take(name);
      if (!slot) continue;
      Cache target(false);
      target.memory.assign(target.memory.size(), 0);
      Arena(receiver.segment()).load(slot->offset, 0, *target.layout, ids(8));
      CHECK(std::memcmp(target.memory.data(), cache.memory.data(), 8 * kPage) == 0);
      receiver.release(name);
      ++done;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  is_over = true;
  for (std::thread& mover : movers) mover.join();
  CHECK(done > 30);
  eventually([&] { return receiver.stats().arena_used_bytes == 0; });
}
