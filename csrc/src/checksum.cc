#include "tetri/checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tetri {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // of CRC32C, reflected

using Table = std::array<uint32_t, 256>;

const Table& table() {
  static const Table made = [] {
    Table found{};
    for (uint32_t byte = 0; byte < found.size(); ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
      found[byte] = crc;
    }
    return found;
  }();
  return made;
}

uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Every bit of the input changes about half of the output's (the finalizer of SplitMix64).
uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) void take_stripes_here(Checksum::Lanes* lanes,
                                                         const uint8_t* bytes, size_t count) {
  uint64_t one = (*lanes)[0];  // in registers; 64 bits, since that is what the instruction takes
  uint64_t two = (*lanes)[1];
  uint64_t three = (*lanes)[2];
  uint64_t four = (*lanes)[3];
  for (; count > 0; --count, bytes += 8 * Checksum::kLanes) {
    one = _mm_crc32_u64(one, word_at(bytes));
    two = _mm_crc32_u64(two, word_at(bytes + 8));
    three = _mm_crc32_u64(three, word_at(bytes + 16));
    four = _mm_crc32_u64(four, word_at(bytes + 24));
  }
  *lanes = {static_cast<uint32_t>(one), static_cast<uint32_t>(two), static_cast<uint32_t>(three),
            static_cast<uint32_t>(four)};
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__linux__)
// Compilers target processors without the instruction, which all servers have.
uint32_t crc_of(uint32_t crc, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}

void take_stripes_here(Checksum::Lanes* lanes, const uint8_t* bytes, size_t count) {
  Checksum::Lanes crcs = *lanes;
  for (; count > 0; --count) {
    for (uint32_t& crc : crcs) {
      crc = crc_of(crc, word_at(bytes));
      bytes += 8;
    }
  }
  *lanes = crcs;
}
bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
constexpr bool has_instruction() { return false; }
constexpr auto take_stripes_here = take_stripes_anywhere;
#endif

void take_stripes(Checksum::Lanes* lanes, const uint8_t* bytes, size_t count) {
  static const bool is_fast = has_instruction();
  (is_fast ? take_stripes_here : take_stripes_anywhere)(lanes, bytes, count);
}

}  // namespace

void take_stripes_anywhere(Checksum::Lanes* lanes, const uint8_t* bytes, size_t count) {
  for (; count > 0; --count) {
    for (uint32_t& crc : *lanes) {
      for (int byte = 0; byte < 8; ++byte) crc = (crc >> 8) ^ table()[(crc ^ *bytes++) & 0xff];
    }
  }
}

void Checksum::feed(const uint8_t* bytes, size_t length) {
  const size_t held = total_ % kStripe;
  total_ += length;
  if (held > 0) {
    const size_t taken = std::min(kStripe - held, length);
    std::memcpy(rest_.data() + held, bytes, taken);
    if (held + taken < kStripe) return;
    take_stripes(&lanes_, rest_.data(), 1);
    bytes += taken;
    length -= taken;
  }
  take_stripes(&lanes_, bytes, length / kStripe);
  const size_t left = length % kStripe;
  if (left > 0) std::memcpy(rest_.data(), bytes + length - left, left);
}

uint64_t Checksum::value() const {
  Lanes lanes = lanes_;
  if (const size_t left = total_ % kStripe; left > 0) {
    std::array<uint8_t, kStripe> last{};  // zeros after the end: the length is hashed too
    std::memcpy(last.data(), rest_.data(), left);
    take_stripes(&lanes, last.data(), 1);
  }
  const uint64_t low = lanes[0] | uint64_t{lanes[1]} << 32;
  const uint64_t high = lanes[2] | uint64_t{lanes[3]} << 32;
  return mixed(low ^ mixed(high ^ mixed(total_)));
}

}  // namespace tetri
