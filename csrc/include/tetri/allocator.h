// Best-fit allocator over a range of bytes that it never touches.
//
// Not thread-safe. Freed neighbours merge at once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tetri {

class Allocator {
 public:
  static constexpr uint64_t kGranule = 4096;

  explicit Allocator(uint64_t total_bytes);

  // Offset of a range of at least `bytes`, or nothing when no gap is large enough.
  std::optional<uint64_t> allocate(uint64_t bytes);
  // `offset` must come from `allocate` and not have been freed since.
  void free(uint64_t offset);

  uint64_t total_bytes() const { return total_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t size_of(uint64_t offset) const { return used_.at(offset); }

 private:
  void add_gap(uint64_t offset, uint64_t bytes);
  void remove_gap(std::map<uint64_t, uint64_t>::iterator gap);

  uint64_t total_bytes_;
  uint64_t used_bytes_ = 0;
  std::map<uint64_t, uint64_t> gaps_;                // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (bytes, offset)
  std::map<uint64_t, uint64_t> used_;                // offset -> bytes
};

}  // namespace tetri
