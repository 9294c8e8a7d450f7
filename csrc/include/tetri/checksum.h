// Checks that bytes arrived as they left: CRC32C of every fourth 8 bytes, four times, as fast as
// memory where the processor has an instruction for it.
//
// TCP's own sum has 16 bits and is taken anew by every device on the way. This one is no secret and
// authenticates nothing: an attacker who can write to a connection can write its sum, too.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace tetri {

class Checksum {
 public:
  // In pieces of any length; their ends do not matter.
  void feed(const uint8_t* bytes, size_t length);
  // Depends on the bytes, their order and their number.
  uint64_t value() const;

  static constexpr size_t kLanes = 4;
  using Lanes = std::array<uint32_t, kLanes>;

 private:
  static constexpr size_t kStripe = 8 * kLanes;

  Lanes lanes_{~0u, ~1u, ~2u, ~3u};
  std::array<uint8_t, kStripe> rest_{};  // of them, total_ % kStripe
  uint64_t total_ = 0;
};

// Ends a data frame, after its bytes.
constexpr uint64_t kGaveUp = 0;  // the sender stopped in the middle of it: these are not the bytes
inline uint64_t sum_of_frame(const Checksum& sum) { return std::max<uint64_t>(sum.value(), 1); }

// CRC32C without an instruction for it: the same values, more slowly.
void take_stripes_anywhere(Checksum::Lanes* lanes, const uint8_t* bytes, size_t count);

}  // namespace tetri
