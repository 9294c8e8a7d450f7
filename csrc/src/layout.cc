#include "tetri/layout.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace tetri {

namespace {
constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 40;
}

Layout::Layout(std::vector<uint64_t> bases, std::vector<uint64_t> strides,
               std::vector<uint64_t> page_bytes, uint64_t num_blocks, std::vector<uint64_t> starts,
               uint64_t wire_bytes, bool is_device)
    : bases_(std::move(bases)),
      strides_(std::move(strides)),
      page_bytes_(std::move(page_bytes)),
      starts_(std::move(starts)),
      num_blocks_(num_blocks),
      is_device_(is_device) {
  const bool is_dense = starts_.empty();
  if (bases_.empty() || bases_.size() != strides_.size() || bases_.size() != page_bytes_.size() ||
      (!is_dense && bases_.size() != starts_.size())) {
    throw std::invalid_argument(
        "a layout needs one base, one stride and one page size for each of at least one layer");
  }
  if (num_blocks_ == 0 || num_blocks_ > INT32_MAX) {
    throw std::invalid_argument("a layout has between 1 and 2147483647 blocks, not " +
                                std::to_string(num_blocks_));
  }
  for (size_t layer = 0; layer < bases_.size(); ++layer) {
    uint64_t span = 0;
    const bool too_long = __builtin_mul_overflow(num_blocks_ - 1, strides_[layer], &span) ||
                          __builtin_add_overflow(span, page_bytes_[layer], &span) ||
                          __builtin_add_overflow(span, bases_[layer], &span);
    if (bases_[layer] == 0 || page_bytes_[layer] == 0 || page_bytes_[layer] > kMaxBlockBytes ||
        too_long || (num_blocks_ > 1 && strides_[layer] < page_bytes_[layer])) {
      throw std::invalid_argument("layer " + std::to_string(layer) + ": page of " +
                                  std::to_string(page_bytes_[layer]) + " bytes, stride " +
                                  std::to_string(strides_[layer]) + " do not describe blocks");
    }
    if (is_dense) starts_.push_back(block_bytes_);
    if (starts_[layer] < block_bytes_ || starts_[layer] > kMaxBlockBytes - page_bytes_[layer]) {
      throw std::invalid_argument("blocks are too large, or their pieces overlap");
    }
    block_bytes_ = starts_[layer] + page_bytes_[layer];
    payload_bytes_ += page_bytes_[layer];
  }
  if (is_dense) return;
  if (wire_bytes < block_bytes_ || wire_bytes > kMaxBlockBytes) {
    throw std::invalid_argument("blocks of " + std::to_string(wire_bytes) +
                                " bytes do not hold their pieces");
  }
  block_bytes_ = wire_bytes;
}

Layout Layout::part(size_t first, size_t count) const {
  if (count == 0 || first > bases_.size() || count > bases_.size() - first) {
    throw std::invalid_argument("pages " + std::to_string(first) + " to " +
                                std::to_string(first + count) + " of a layout with " +
                                std::to_string(bases_.size()) + " pages");
  }
  const auto cut = [&](const std::vector<uint64_t>& all) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<uint64_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  return Layout(cut(bases_), cut(strides_), cut(page_bytes_), num_blocks_, cut(starts_),
                block_bytes_, is_device_);
}

size_t Layout::layer_at(uint64_t within) const {
  return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), within) -
                             starts_.begin() - 1);
}

void Layout::gather_block(uint64_t block, uint8_t* destination) const {
  for (size_t layer = 0; layer < bases_.size(); ++layer) {
    std::memcpy(destination + starts_[layer], page(layer, block), page_bytes_[layer]);
  }
}

void Layout::scatter_block(uint64_t block, const uint8_t* source) const {
  for (size_t layer = 0; layer < bases_.size(); ++layer) {
    std::memcpy(page(layer, block), source + starts_[layer], page_bytes_[layer]);
  }
}

void Layout::copy_rows(const std::vector<int32_t>& ids, uint8_t* memory, uint64_t size,
                       const std::vector<int32_t>& rows, bool to_blocks) const {
  check_ids(ids);
  const auto num_rows = static_cast<int64_t>(size / block_bytes_);
  const auto is_row = [&](int32_t row) { return row >= 0 && row < num_rows; };
  if (is_device_ || ids.size() != rows.size() || !std::all_of(rows.begin(), rows.end(), is_row)) {
    throw std::invalid_argument("blocks of host memory and as many of " + std::to_string(num_rows) +
                                " rows are expected");
  }
  for (size_t index = 0; index < ids.size(); ++index) {
    uint8_t* row = memory + static_cast<uint64_t>(rows[index]) * block_bytes_;
    const auto block = static_cast<uint64_t>(ids[index]);
    to_blocks ? scatter_block(block, row) : gather_block(block, row);
  }
}

void Layout::check_ids(const std::vector<int32_t>& ids) const {
  for (const int32_t id : ids) {
    if (id < 0 || static_cast<uint64_t>(id) >= num_blocks_) {
      throw std::invalid_argument("block id " + std::to_string(id) + " is outside the layout's " +
                                  std::to_string(num_blocks_) + " blocks");
    }
  }
}

}  // namespace tetri
