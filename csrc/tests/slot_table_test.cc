#include "tetri/slot_table.h"

#include <atomic>
#include <memory>
#include <thread>

#include "check.h"

using namespace tetri;
using std::chrono::seconds;

namespace {

constexpr uint64_t kPage = 4096;

struct Fixture {
  std::unique_ptr<ControlWord[]> words{new ControlWord[kMaxSlots]{}};
  SlotTable table{8 * kPage, kHeaderBytes, words.get(), seconds(10), seconds(20)};
  TimePoint now = Clock::now();

  Opened open(const std::string& name, const WriterId& writer, uint64_t blocks = 2) {
    return table.open(Open{1, name, blocks, kPage}, writer, now);
  }
};

WriterId writer(uint64_t connection, bool shared, uint32_t rank = 0, uint32_t num_ranks = 1) {
  return {connection, rank, num_ranks, shared};
}

bool granted(const Opened& opened) { return opened.status == static_cast<uint32_t>(Status::kOk); }

// A slot of two ranks that share memory, of which the first one has finished.
struct HalfDone : Fixture {
  WriterId first = writer(1, true, 0, 2);
  WriterId second = writer(2, true, 1, 2);
  Opened opened = open("t", first);

  HalfDone() {
    open("t", second);
    table.done({opened.generation, 2 * kPage}, first, now);
  }
};

}  // namespace

TEST(slot_goes_through_its_states) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, false));
  CHECK(granted(opened));
  CHECK(f.words[opened.control].live == opened.generation);
  CHECK(f.table.writable(opened.generation, writer(1, false), 0, 2 * kPage) == opened.offset);
  CHECK(!f.table.writable(opened.generation, writer(2, false), 0, 1));
  CHECK_THROWS(f.table.writable(opened.generation, writer(1, false), kPage, kPage + 1), FrameError);
  f.table.done({opened.generation, 2 * kPage}, writer(1, false), f.now);
  CHECK(!f.table.take("t"));
  f.table.received(opened.generation, writer(1, false), 2 * kPage, f.now);
  CHECK(f.table.take_notices().at(0).confirm);
  CHECK(f.table.take("t"));
  f.table.expire(f.now + seconds(1000));
  CHECK(f.table.find("t")->state == SlotState::kTaken);
  f.table.release("t");
  CHECK(!f.table.find("t"));
  CHECK(f.table.used_bytes() == 0);
  CHECK(f.words[opened.control].live == 0);
}

TEST(slot_of_a_shared_writer_is_quarantined_until_it_stopped) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, true), 8);
  f.table.cancel("t", f.now);
  CHECK(f.table.quarantined_bytes() == 8 * kPage);
  CHECK(!granted(f.open("u", writer(2, true), 1)));
  f.table.stopped(opened.generation, writer(2, true));
  CHECK(f.table.quarantined_bytes() == 8 * kPage);
  f.table.stopped(opened.generation, writer(1, true));
  CHECK(f.table.quarantined_bytes() == 0 && f.table.used_bytes() == 0);
  CHECK(granted(f.open("u", writer(2, true), 8)));
}

TEST(slot_of_a_dropped_shared_writer_waits_for_its_hang_up) {
  Fixture f;
  f.open("t", writer(1, true));
  f.table.connection_dropped(writer(1, true), "invalid frame", f.now);
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  CHECK(f.table.quarantined_bytes() == 2 * kPage);
  f.table.connection_lost(writer(1, true), "gone", f.now);
  CHECK(f.table.used_bytes() == 0);
}

TEST(slot_of_a_lost_remote_writer_waits_for_its_last_write) {
  Fixture f;
  WriterId remote = writer(1, true);
  remote.remote = true;
  f.open("t", remote, 8);
  f.table.connection_lost(remote, "gone", f.now);
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  for (const TimePoint now : {f.now, f.now + kRemoteWriteTime - seconds(1)}) {
    const TimePoint next = f.table.expire(now);
    CHECK(next <= f.now + kRemoteWriteTime);
    CHECK(f.table.quarantined_bytes() == 8 * kPage);
    CHECK(!granted(f.open("u", writer(2, true), 1)));
  }
  f.table.expire(f.now + kRemoteWriteTime);
  CHECK(f.table.quarantined_bytes() == 0 && f.table.used_bytes() == 0);
  CHECK(granted(f.open("u", writer(2, true), 8)));
}

TEST(slot_of_two_ranks_waits_for_both_and_for_both_to_stop) {
  Fixture f;
  const WriterId first = writer(1, true, 0, 2);
  const WriterId second = writer(2, true, 1, 2);
  const Opened opened = f.open("t", first);
  CHECK(f.open("t", second).offset == opened.offset + 2 * kPage);
  CHECK(!granted(f.open("t", second)));
  f.table.done({opened.generation, 2 * kPage}, first, f.now);
  CHECK(f.table.find("t")->state == SlotState::kFilling);
  f.table.connection_lost(first, "gone after it finished", f.now);
  CHECK(f.table.find("t")->state == SlotState::kFilling);
  f.table.cancelled_by_sender({opened.generation, "why"}, second, f.now);
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  CHECK(f.table.used_bytes() == 0);
}

TEST(a_name_may_be_opened_and_cancelled_more_often_than_notes_are_kept) {
  Fixture f;
  for (int round = 0; round < 5000; ++round) {
    const Opened opened = f.open("t", writer(1, false));
    CHECK(granted(opened));
    f.table.cancelled_by_sender({opened.generation, "why"}, writer(1, false), f.now);
    f.now += std::chrono::microseconds(round % 2);
  }
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  CHECK(f.table.used_bytes() == 0);
}

TEST(a_writer_is_told_why_its_slot_ended_before_that_its_bytes_are_of_no_use) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, false));
  f.table.cancel("t", f.now);
  f.table.discarded(opened.generation, writer(1, false));
  const auto notices = f.table.take_notices();
  CHECK(notices.size() == 2);
  CHECK(notices[0].status == Status::kCancelled && notices[1].status == Status::kStale);
}

TEST(slot_of_two_ranks_is_confirmed_to_both_at_once) {
  HalfDone f;
  CHECK(f.table.take_notices().empty());
  f.table.done({f.opened.generation, 2 * kPage}, f.second, f.now);
  const auto notices = f.table.take_notices();
  CHECK(notices.size() == 2 && notices[0].confirm && notices[1].confirm);
  CHECK(notices[0].connection == 1 && notices[1].connection == 2);
}

TEST(slot_that_one_of_two_ranks_fails_stops_the_one_that_finished) {
  HalfDone f;
  f.table.connection_dropped(f.second, "gone", f.now);
  f.table.connection_lost(f.second, "gone", f.now);
  const auto notices = f.table.take_notices();
  CHECK(!notices.at(0).confirm && notices[0].connection == 1);
  CHECK(f.table.used_bytes() == 0);
  CHECK(!granted(f.open("t", f.first)));  // the other rank has given this attempt up
}

TEST(slot_of_two_ranks_that_its_sender_took_back_opens_again) {
  Fixture f;
  const WriterId first = writer(1, false, 0, 2);
  const WriterId second = writer(2, false, 1, 2);
  const Opened opened = f.open("t", second);
  f.table.cancelled_by_sender({opened.generation, "no room for the other rank"}, second, f.now);
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  CHECK(granted(f.open("t", first)) && granted(f.open("t", second)));
  CHECK(f.table.find("t")->state == SlotState::kFilling);
}

TEST(slot_progress_in_shared_memory_counts) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, true));
  f.words[opened.control].progress = 1;
  CHECK(f.table.expire(f.now + seconds(11)) == f.now + seconds(21));
  CHECK(f.table.find("t")->state == SlotState::kFilling);
  f.table.expire(f.now + seconds(22));
  CHECK(f.table.find("t")->state == SlotState::kFailed);
  CHECK(f.table.counters().expired == 1);
}

TEST(slot_that_is_held_is_not_another_ones) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, true), 8);
  ControlWord& word = f.words[opened.control];
  CHECK(word.hold(opened.generation) && word.hold(opened.generation));
  f.table.cancel("t", f.now);
  f.table.stopped(opened.generation, writer(1, true));
  CHECK(f.table.quarantined_bytes() == 8 * kPage);
  CHECK(!word.hold(opened.generation) && !word.hold(0));
  word.let_go();
  CHECK(f.table.next_deadline() <= f.now);
  CHECK(f.table.expire(f.now) <= f.now + seconds(1));
  CHECK(f.table.quarantined_bytes() == 8 * kPage);
  word.let_go();
  f.table.expire(f.now + seconds(1));
  CHECK(f.table.quarantined_bytes() == 0 && f.table.used_bytes() == 0);
  CHECK(f.table.expire(f.now + seconds(1)) > f.now + seconds(2));
  CHECK(!word.hold(opened.generation));
}

TEST(slot_that_is_held_when_it_is_released_waits) {
  Fixture f;
  const Opened opened = f.open("t", writer(1, true));
  ControlWord& word = f.words[opened.control];
  CHECK(word.hold(opened.generation));
  f.table.done({opened.generation, 2 * kPage}, writer(1, true), f.now);
  CHECK(f.table.take("t"));
  f.table.release("t");
  CHECK(!f.table.find("t") && f.table.used_bytes() == 2 * kPage);
  word.let_go();
  f.table.expire(f.now);
  CHECK(f.table.used_bytes() == 0);
}

TEST(slot_is_held_or_freed_and_never_both) {
  Fixture f;
  int memory = 0;  // of the slot: an unordered write to it is a race
  for (int round = 0; round < 500; ++round) {
    const Opened opened = f.open("t" + std::to_string(round), writer(1, true), 8);
    ControlWord& word = f.words[opened.control];
    std::atomic<bool> begins{false};
    std::atomic<int> held{0};
    std::thread holder([&] {
      begins = true;
      while (word.hold(opened.generation)) {
        memory = ++held;
        word.let_go();
      }
    });
    while (!begins || (round % 2 != 0 && held == 0)) std::this_thread::yield();
    f.table.cancel("t" + std::to_string(round), f.now);
    f.table.stopped(opened.generation, writer(1, true));
    while (f.table.used_bytes() != 0) f.table.expire(f.now += seconds(1));
    memory = -1;  // another transfer's
    CHECK(!word.hold(opened.generation));
    holder.join();
    CHECK(memory == -1);
  }
}

TEST(slot_notes_and_refusals_end) {
  Fixture f;
  f.table.cancel("t", f.now);
  CHECK(!granted(f.open("t", writer(1, false))));
  f.now += seconds(11);
  const Opened opened = f.open("t", writer(1, false));
  CHECK(granted(opened));
  f.table.cancelled_by_sender({opened.generation, "why"}, writer(1, false), f.now);
  CHECK(f.table.find("t")->error == "the sender cancelled it: why");
  f.table.expire(f.now + seconds(21));
  CHECK(!f.table.find("t"));
  CHECK(f.table.next_deadline() == TimePoint::max());
}

TEST(slots_that_were_not_taken_are_abandoned_with_a_note) {
  Fixture f;
  const Opened filling = f.open("r/filling", writer(1, true), 1);
  const Opened arrived = f.open("r/arrived", writer(1, false), 1);
  const Opened kept = f.open("r/kept", writer(1, false), 1);
  const Opened taken = f.open("r/own", writer(1, false), 1);
  f.open("s/r/other", writer(1, false), 1);
  for (const Opened& opened : {arrived, kept, taken}) {
    f.table.received(opened.generation, writer(1, false), kPage, f.now);
    f.table.done({opened.generation, kPage}, writer(1, false), f.now);
  }
  f.table.take("r/own");
  CHECK(f.table.num_slots(SlotState::kFilling) == 2);
  CHECK(f.table.num_slots(SlotState::kArrived) == 2);
  f.table.abandon("r/", {"r/kept"}, "its router is gone", f.now);
  CHECK(f.table.find("r/arrived")->error == "its router is gone");
  CHECK(f.table.find("r/filling")->state == SlotState::kFailed);
  CHECK(f.table.find("r/kept")->state == SlotState::kArrived);
  CHECK(f.table.find("r/own")->state == SlotState::kTaken);
  CHECK(f.table.find("s/r/other")->state == SlotState::kFilling);
  CHECK(f.table.num_slots(SlotState::kFilling) == 1);
  CHECK(f.table.quarantined_bytes() == kPage && f.table.num_quarantined() == 1);
  f.table.stopped(filling.generation, writer(1, true));
  CHECK(f.table.used_bytes() == 3 * kPage);
}
