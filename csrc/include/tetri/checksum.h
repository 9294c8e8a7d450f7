// Tells whether bytes arrived as they left: XXH64, as its specification says, with seed 0.
//
// TCP's own sum has 16 bits and is taken anew by every device on the way. This one is no secret and
// keeps nobody out: who can write to a connection can write its sum, too.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace tetri {

class Checksum {
 public:
  Checksum();
  // In pieces of any length; their ends do not matter.
  void feed(const uint8_t* bytes, size_t length);
  uint64_t value() const;

 private:
  static constexpr size_t kStripe = 32;

  std::array<uint64_t, 4> lanes_;
  std::array<uint8_t, kStripe> rest_;  // of them, total_ % kStripe
  uint64_t total_ = 0;
};

// Ends a data frame, behind its bytes.
constexpr uint64_t kGaveUp = 0;  // the sender stopped in the middle of it: these are not the bytes
inline uint64_t sum_of_frame(const Checksum& sum) { return std::max<uint64_t>(sum.value(), 1); }

}  // namespace tetri
