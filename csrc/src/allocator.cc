#include "tetri/allocator.h"

#include <iterator>

namespace tetri {

Allocator::Allocator(uint64_t total_bytes) : total_bytes_(total_bytes / kGranule * kGranule) {
  if (total_bytes_ > 0) add_gap(0, total_bytes_);
}

std::optional<uint64_t> Allocator::allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > total_bytes_) return std::nullopt;
  const uint64_t needed = (bytes + kGranule - 1) / kGranule * kGranule;
  const auto best = by_size_.lower_bound({needed, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [gap_bytes, offset] = *best;
  remove_gap(gaps_.find(offset));
  if (gap_bytes > needed) add_gap(offset + needed, gap_bytes - needed);
  used_.emplace(offset, needed);
  used_bytes_ += needed;
  return offset;
}

void Allocator::free(uint64_t offset) {
  const auto range = used_.find(offset);
  if (range == used_.end()) return;
  uint64_t bytes = range->second;
  used_bytes_ -= bytes;
  used_.erase(range);
  auto next = gaps_.lower_bound(offset);
  if (next != gaps_.end() && offset + bytes == next->first) {
    bytes += next->second;
    remove_gap(next);
    next = gaps_.lower_bound(offset);
  }
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_gap(before);
    }
  }
  add_gap(offset, bytes);
}

void Allocator::add_gap(uint64_t offset, uint64_t bytes) {
  gaps_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void Allocator::remove_gap(std::map<uint64_t, uint64_t>::iterator gap) {
  by_size_.erase({gap->second, gap->first});
  gaps_.erase(gap);
}

}  // namespace tetri
