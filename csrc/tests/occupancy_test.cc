#include "tetri/occupancy.h"

#include <random>
#include <stdexcept>

#include "check.h"

using tetri::Held;
using tetri::Occupancy;

namespace {

// As the definition has it: step by step, everybody who is still there.
int64_t blocks_in(const std::vector<Held>& batch, int64_t steps, int64_t size) {
  int64_t sum = 0;
  for (const Held& held : batch)
    if (held.rest >= steps) sum += (held.tokens + steps + size - 1) / size;
  return sum;
}

}  // namespace

TEST(occupancy_counts_what_comes_back_before_it_is_needed) {
  Occupancy batch(10, {{50, 5}, {10, 10}});
  CHECK(batch.held_blocks() == 6);
  CHECK(batch.growth_blocks() == 2);
  CHECK(batch.most_growth_blocks() == 2);  // 6 and 2 in 5 steps
  CHECK(batch.fits({10, 70}, 10));         // it ends alone, with 8
  CHECK(!batch.fits({30, 5}, 11));         // 6, 2 and 4 in 5 steps
  batch.add({30, 5});
  CHECK(batch.size() == 3);
  CHECK(batch.most_growth_blocks() == 3);
}

TEST(occupancy_of_nobody) {
  Occupancy batch(16, {});
  CHECK(batch.held_blocks() == 0);
  CHECK(batch.growth_blocks() == 0);
  CHECK(batch.most_growth_blocks() == 0);
  CHECK(batch.fits({16, 0}, 1));
  CHECK(!batch.fits({16, 1}, 1));
}

TEST(occupancy_refuses_numbers_that_make_no_sense) {
  auto is_refused = [](auto call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(is_refused([] { Occupancy(0, {}); }));
  CHECK(is_refused([] { Occupancy(16, {{-1, 1}}); }));
  Occupancy batch(16, {});
  CHECK(is_refused([&] { batch.add({1, -1}); }));
  CHECK(is_refused([&] { batch.fits({-17, 1}, 10); }));
  CHECK(batch.size() == 0);
}

TEST(occupancy_is_what_counting_step_by_step_finds) {
  std::mt19937 random(7);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t size = draw(1, 20);
    std::vector<Held> all(draw(0, 8));
    for (Held& held : all) held = {draw(0, 60), draw(1, 80)};
    Occupancy batch(size, all);
    Held entering{draw(0, 60), draw(1, 80)};
    std::vector<Held> with = all;
    with.push_back(entering);
    int64_t most_in_its_life = 0;
    for (int64_t steps = 0; steps <= entering.rest; ++steps)
      most_in_its_life = std::max(most_in_its_life, blocks_in(with, steps, size));
    CHECK(batch.fits(entering, most_in_its_life));
    CHECK(!batch.fits(entering, most_in_its_life - 1));
    batch.add(entering);
    int64_t most = 0;
    for (int64_t steps = 0; steps <= 80; ++steps)
      most = std::max(most, blocks_in(with, steps, size));
    CHECK(batch.most_growth_blocks() == most - batch.held_blocks());
  }
}
