#include "tetri/allocator.h"

#include <random>

#include "check.h"

using tetri::Allocator;

TEST(allocator_rounds_up_and_refuses_what_does_not_fit) {
  Allocator arena(3 * Allocator::kGranule);
  CHECK(arena.allocate(1) == 0u);
  CHECK(arena.used_bytes() == Allocator::kGranule);
  CHECK(arena.allocate(2 * Allocator::kGranule) == Allocator::kGranule);
  CHECK(!arena.allocate(1));
  CHECK(!arena.allocate(0));
  CHECK(!arena.allocate(UINT64_MAX));
}

TEST(allocator_merges_neighbours) {
  Allocator arena(4 * Allocator::kGranule);
  uint64_t places[4];
  for (uint64_t& place : places) place = *arena.allocate(1);
  arena.free(places[1]);
  arena.free(places[3]);
  CHECK(!arena.allocate(2 * Allocator::kGranule));
  arena.free(places[2]);
  CHECK(arena.allocate(3 * Allocator::kGranule) == places[1]);
  arena.free(places[0]);
  arena.free(places[0]);
  CHECK(arena.used_bytes() == 3 * Allocator::kGranule);
}

TEST(allocator_takes_the_smallest_gap) {
  Allocator arena(10 * Allocator::kGranule);
  const uint64_t large = *arena.allocate(3 * Allocator::kGranule);
  CHECK(arena.allocate(1));
  const uint64_t small = *arena.allocate(Allocator::kGranule);
  CHECK(arena.allocate(1));
  arena.free(large);
  arena.free(small);
  CHECK(arena.allocate(1) == small);
}

TEST(allocator_never_overlaps_under_random_use) {
  std::mt19937 dice(1);
  Allocator arena(256 * Allocator::kGranule);
  std::map<uint64_t, uint64_t> held;
  for (int turn = 0; turn < 20000; ++turn) {
    if (held.empty() || dice() % 2 == 0) {
      const uint64_t bytes = 1 + dice() % (40 * Allocator::kGranule);
      const auto place = arena.allocate(bytes);
      if (!place) continue;
      const auto after = held.lower_bound(*place);
      CHECK(after == held.end() || *place + bytes <= after->first);
      CHECK(after == held.begin() || std::prev(after)->first + std::prev(after)->second <= *place);
      CHECK(*place + bytes <= arena.total_bytes());
      held.emplace(*place, bytes);
    } else {
      auto victim = held.begin();
      std::advance(victim, dice() % held.size());
      arena.free(victim->first);
      held.erase(victim);
    }
  }
  for (const auto& [place, bytes] : held) arena.free(place);
  CHECK(arena.used_bytes() == 0);
  CHECK(arena.allocate(arena.total_bytes()) == 0u);
}
