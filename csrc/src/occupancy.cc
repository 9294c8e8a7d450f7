#include "tetri/occupancy.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace tetri {
namespace {

bool ends_later(const Held& one, const Held& other) { return one.rest > other.rest; }

void check(const Held& held) {
  if (held.tokens < 0 || held.rest < 0) throw std::invalid_argument("less than no tokens");
}

// Those who are still there at a moment, from the last moment back to now.
class Present {
 public:
  explicit Present(int64_t block_size) : block_size_(block_size), used_(block_size + 1) {}

  void join(Held held) {
    int64_t full = (held.tokens + block_size_ - 1) / block_size_;
    blocks_ += full;
    ++count_;
    ++used_[held.tokens - (full - 1) * block_size_];
  }

  // What they hold after so many steps, or, if that is within a limit, something that is, too. Each
  // takes a block per round of as many tokens as a block has, and one more unless its last block
  // has room for what is left of the last round.
  int64_t blocks_in(int64_t steps, int64_t limit = 0) const {
    int64_t rounds = steps / block_size_;
    int64_t at_most = blocks_ + count_ * (rounds + 1);
    if (at_most <= limit) return at_most;
    auto room_until = used_.begin() + (block_size_ - (steps - rounds * block_size_)) + 1;
    return at_most - std::accumulate(used_.begin(), room_until, int64_t{0});
  }

 private:
  int64_t block_size_;
  int64_t blocks_ = 0;
  int64_t count_ = 0;
  std::vector<int32_t> used_;  // how many use so many tokens of their last block
};

}  // namespace

Occupancy::Occupancy(int64_t block_size, std::vector<Held> batch)
    : block_size_(block_size), batch_(std::move(batch)) {
  if (block_size < 1) throw std::invalid_argument("a block holds at least one token");
  for (const Held& held : batch_) check(held);
  std::sort(batch_.begin(), batch_.end(), ends_later);
}

void Occupancy::add(Held held) {
  check(held);
  batch_.insert(std::upper_bound(batch_.begin(), batch_.end(), held, ends_later), held);
}

int64_t Occupancy::held_blocks() const {
  int64_t sum = 0;
  for (const Held& held : batch_) sum += blocks(held.tokens);
  return sum;
}

int64_t Occupancy::growth_blocks() const {
  int64_t sum = 0;
  for (const Held& held : batch_) sum += blocks(held.tokens + held.rest) - blocks(held.tokens);
  return sum;
}

int64_t Occupancy::most_growth_blocks() const {
  Present present(block_size_);
  int64_t held_now = held_blocks(), most = held_now;
  for (const Held& held : batch_) {
    present.join(held);
    most = std::max(most, present.blocks_in(held.rest));
  }
  return most - held_now;
}

bool Occupancy::fits(Held entering, int64_t limit_blocks) const {
  check(entering);
  Present present(block_size_);
  auto next = batch_.begin();
  while (next != batch_.end() && next->rest > entering.rest) present.join(*next++);
  present.join(entering);
  if (present.blocks_in(entering.rest, limit_blocks) > limit_blocks) return false;
  for (; next != batch_.end(); ++next) {
    present.join(*next);
    if (present.blocks_in(next->rest, limit_blocks) > limit_blocks) return false;
  }
  return true;
}

}  // namespace tetri
