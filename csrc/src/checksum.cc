#include "tetri/checksum.h"

#include <cstring>

namespace tetri {

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;

uint64_t rotated(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

template <typename Number>
uint64_t number_at(const uint8_t* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof(number));
  return number;
}

uint64_t mixed(uint64_t lane, uint64_t word) {
  return rotated(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merged(uint64_t sum, uint64_t lane) { return (sum ^ mixed(0, lane)) * kPrime1 + kPrime4; }

void take_stripe(std::array<uint64_t, 4>* lanes, const uint8_t* bytes) {
  for (size_t lane = 0; lane < 4; ++lane) {
    (*lanes)[lane] = mixed((*lanes)[lane], number_at<uint64_t>(bytes + 8 * lane));
  }
}

}  // namespace

Checksum::Checksum() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1}, rest_{} {}

void Checksum::feed(const uint8_t* bytes, size_t length) {
  const size_t held = total_ % kStripe;
  total_ += length;
  if (held > 0) {
    const size_t taken = std::min(kStripe - held, length);
    std::memcpy(rest_.data() + held, bytes, taken);
    if (held + taken < kStripe) return;
    take_stripe(&lanes_, rest_.data());
    bytes += taken;
    length -= taken;
  }
  std::array<uint64_t, 4> lanes = lanes_;  // in registers
  for (; length >= kStripe; bytes += kStripe, length -= kStripe) take_stripe(&lanes, bytes);
  lanes_ = lanes;
  if (length > 0) std::memcpy(rest_.data(), bytes, length);
}

uint64_t Checksum::value() const {
  uint64_t sum = kPrime5;
  if (total_ >= kStripe) {
    sum = rotated(lanes_[0], 1) + rotated(lanes_[1], 7) + rotated(lanes_[2], 12) +
          rotated(lanes_[3], 18);
    for (const uint64_t lane : lanes_) sum = merged(sum, lane);
  }
  sum += total_;
  const uint8_t* at = rest_.data();
  size_t left = total_ % kStripe;
  for (; left >= 8; at += 8, left -= 8) {
    sum = rotated(sum ^ mixed(0, number_at<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    sum = rotated(sum ^ (number_at<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) sum = rotated(sum ^ (*at * kPrime5), 11) * kPrime1;
  sum = (sum ^ (sum >> 33)) * kPrime2;
  sum = (sum ^ (sum >> 29)) * kPrime3;
  return sum ^ (sum >> 32);
}

}  // namespace tetri
