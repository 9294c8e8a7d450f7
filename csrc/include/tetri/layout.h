// Where paged blocks live, and copies between them and contiguous bytes.
//
// Slot bytes are block-major: block 0 of all layers, block 1 of all layers, ...
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace tetri {

// One rank's paged cache. Immutable after construction, so any thread may read it; the memory that
// it describes has another owner.
class Layout {
 public:
  // With `starts`, page i is at starts[i] of blocks of `wire_bytes` whose other bytes are skipped.
  // With `is_device`, bases are addresses of a device, which nothing here dereferences. Throws
  // std::invalid_argument when the description is empty, overlaps or overflows.
  Layout(std::vector<uint64_t> bases, std::vector<uint64_t> strides,
         std::vector<uint64_t> page_bytes, uint64_t num_blocks, std::vector<uint64_t> starts = {},
         uint64_t wire_bytes = 0, bool is_device = false);

  // Pages [first, first + count) alone, at the same places of the same blocks. Throws
  // std::invalid_argument when there are no such pages.
  Layout part(size_t first, size_t count) const;

  uint64_t num_blocks() const { return num_blocks_; }
  uint64_t block_bytes() const { return block_bytes_; }
  uint64_t payload_bytes() const { return payload_bytes_; }  // of a block, without what is skipped
  bool is_whole() const { return payload_bytes_ == block_bytes_; }
  bool is_device() const { return is_device_; }
  const std::vector<uint64_t>& bases() const { return bases_; }
  const std::vector<uint64_t>& strides() const { return strides_; }
  const std::vector<uint64_t>& page_bytes() const { return page_bytes_; }
  const std::vector<uint64_t>& starts() const { return starts_; }
  uint8_t* page(size_t layer, uint64_t block) const {
    return reinterpret_cast<uint8_t*>(bases_[layer] + block * strides_[layer]);
  }

  void gather_block(uint64_t block, uint8_t* destination) const;
  void scatter_block(uint64_t block, const uint8_t* source) const;

  // Calls visit(pointer, length) for the pieces of bytes [begin, end) of the run `ids`, where the
  // run's block i covers [i * block_bytes, (i + 1) * block_bytes), none of which may be skipped.
  // Stops when visit returns false.
  template <typename Visit>
  void pieces(const std::vector<int32_t>& ids, uint64_t begin, uint64_t end, Visit visit) const {
    if (begin >= end) return;
    size_t index = begin / block_bytes_;
    uint64_t within = begin % block_bytes_;
    size_t layer = layer_at(within);
    uint64_t skip = within - starts_[layer];
    while (begin < end) {
      const uint64_t length = std::min(page_bytes_[layer] - skip, end - begin);
      if (!visit(page(layer, static_cast<uint64_t>(ids[index])) + skip, length)) return;
      begin += length;
      skip = 0;
      if (++layer == bases_.size()) {
        layer = 0;
        ++index;
      }
    }
  }

  // Calls visit(begin, end) for each range of a block's bytes that is not skipped.
  template <typename Visit>
  void ranges(Visit visit) const {
    uint64_t begin = starts_[0];
    for (size_t layer = 0; layer < starts_.size(); ++layer) {
      const uint64_t end = starts_[layer] + page_bytes_[layer];
      if (layer + 1 < starts_.size() && starts_[layer + 1] == end) continue;
      visit(begin, end);
      if (layer + 1 < starts_.size()) begin = starts_[layer + 1];
    }
  }

  // Copies block ids[i] to the i-th of `rows` of the `size` bytes at `memory`, which are as long as
  // a block, or with `to_blocks` back. Throws std::invalid_argument when anything is out of range.
  void copy_rows(const std::vector<int32_t>& ids, uint8_t* memory, uint64_t size,
                 const std::vector<int32_t>& rows, bool to_blocks) const;

  // Throws std::invalid_argument naming the first id outside [0, num_blocks).
  void check_ids(const std::vector<int32_t>& ids) const;

 private:
  size_t layer_at(uint64_t within) const;

  std::vector<uint64_t> bases_;
  std::vector<uint64_t> strides_;
  std::vector<uint64_t> page_bytes_;
  std::vector<uint64_t> starts_;  // where each layer's page begins inside a block
  uint64_t num_blocks_;
  bool is_device_;
  uint64_t block_bytes_ = 0;
  uint64_t payload_bytes_ = 0;
};

using LayoutPtr = std::shared_ptr<const Layout>;

}  // namespace tetri
