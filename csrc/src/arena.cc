#include "tetri/arena.h"

#include <mutex>
#include <stdexcept>

namespace tetri {

void Arena::load(uint64_t slot_offset, uint64_t first_block, const Layout& layout,
                 const std::vector<int32_t>& ids) {
  layout.check_ids(ids);
  if (layout.is_device()) throw std::invalid_argument("the layout describes memory of a device");
  const std::shared_lock lock(mutex_);
  if (!segment_) throw std::invalid_argument("the arena is closed");
  const uint64_t block_bytes = layout.block_bytes();
  uint64_t begin = 0;
  uint64_t end = 0;
  if (slot_offset < kHeaderBytes || __builtin_mul_overflow(first_block, block_bytes, &begin) ||
      __builtin_add_overflow(begin, slot_offset, &begin) ||
      __builtin_mul_overflow(uint64_t{ids.size()}, block_bytes, &end) ||
      __builtin_add_overflow(begin, end, &end) || end > segment_->size()) {
    throw std::invalid_argument("blocks " + std::to_string(first_block) + " to " +
                                std::to_string(first_block + ids.size()) + " of the slot at " +
                                std::to_string(slot_offset) + " are outside the arena");
  }
  const uint8_t* source = segment_->data() + begin;
  for (size_t index = 0; index < ids.size(); ++index) {
    layout.scatter_block(static_cast<uint64_t>(ids[index]), source + index * block_bytes);
  }
}

uint64_t Arena::address() {
  const std::shared_lock lock(mutex_);
  return segment_ ? reinterpret_cast<uint64_t>(segment_->data()) : 0;
}

uint64_t Arena::num_bytes() {
  const std::shared_lock lock(mutex_);
  return segment_ ? segment_->size() : 0;
}

ControlWord& Arena::word(uint32_t control) {
  const std::shared_lock lock(mutex_);
  if (!segment_) throw std::invalid_argument("the arena is closed");
  if (control >= kMaxSlots) throw std::invalid_argument("no slot has such a control word");
  return segment_->control()[control];
}

void Arena::close() {
  const std::unique_lock lock(mutex_);
  segment_.reset();
}

}  // namespace tetri
