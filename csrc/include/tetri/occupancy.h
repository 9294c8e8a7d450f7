// What a decode batch will hold, from what it holds now and how long its answers still get.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tetri {

// A request in the batch: tokens whose KV it holds, and tokens that it will write on top. It writes
// one per step and gives all its blocks back behind the last one.
struct Held {
  int64_t tokens;
  int64_t rest;
};

// A batch that nobody but `add` changes. Not for several threads at once.
class Occupancy {
 public:
  // Throws std::invalid_argument, as all that take a request do, for numbers below 0, and when a
  // block holds no token.
  Occupancy(int64_t block_size, std::vector<Held> batch);

  void add(Held held);
  size_t size() const { return batch_.size(); }
  int64_t held_blocks() const;         // now, as if none were shared
  int64_t growth_blocks() const;       // what all will take on top if nothing comes back
  int64_t most_growth_blocks() const;  // what is held on top at the end at which most are held

  // Whether with one more request no more than `limit_blocks` are held just before any end that
  // it lives to see, its own included.
  bool fits(Held entering, int64_t limit_blocks) const;

 private:
  int64_t blocks(int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

  int64_t block_size_;
  std::vector<Held> batch_;  // by rest, longest first
};

}  // namespace tetri
