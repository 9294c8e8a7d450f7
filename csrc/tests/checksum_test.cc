#include "tetri/checksum.h"

#include <random>
#include <string>
#include <vector>

#include "check.h"

using namespace tetri;

namespace {

uint64_t sum_of(const std::string& text) {
  Checksum sum;
  sum.feed(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  return sum.value();
}

}  // namespace

TEST(checksum_is_crc32c_in_lanes) {
  // RFC 3720, B.4: 32 bytes of zeros, of ones, and 0 to 31; here as one lane each.
  const auto crc_of = [](const std::string& text) {
    Checksum::Lanes lanes{~0u, 0, 0, 0};
    for (size_t at = 0; at < text.size(); at += 8) {
      std::string stripe = text.substr(at, 8) + std::string(24, 0);
      take_stripes_anywhere(&lanes, reinterpret_cast<const uint8_t*>(stripe.data()), 1);
    }
    return ~lanes[0];
  };
  std::string counted;
  for (char byte = 0; byte < 32; ++byte) counted += byte;
  CHECK(crc_of(std::string(32, 0)) == 0x8A9136AA);
  CHECK(crc_of(std::string(32, '\xff')) == 0x62A8AB43);
  CHECK(crc_of(counted) == 0x46DD794E);
}

TEST(checksum_is_the_same_with_and_without_an_instruction) {
  std::mt19937_64 random(2);
  std::string text(32 * 100, ' ');
  for (char& letter : text) letter = static_cast<char>(random());
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  Checksum::Lanes lanes{~0u, ~1u, ~2u, ~3u};
  take_stripes_anywhere(&lanes, bytes, 100);
  Checksum slow;
  for (size_t at = 0; at < text.size(); at += 32) slow.feed(bytes + at, 32);
  CHECK(slow.value() == sum_of(text));
  // What `value` makes of the lanes, by hand.
  const auto mixed = [](uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
  };
  const uint64_t low = lanes[0] | uint64_t{lanes[1]} << 32;
  const uint64_t high = lanes[2] | uint64_t{lanes[3]} << 32;
  CHECK(sum_of(text) == mixed(low ^ mixed(high ^ mixed(text.size()))));
}

TEST(checksum_depends_on_order_and_number) {
  std::string text(64, 'x');
  text[3] = 'y';
  std::string turned = text.substr(32) + text.substr(0, 32);
  CHECK(sum_of(text) != sum_of(turned));
  CHECK(sum_of(std::string(31, 0)) != sum_of(std::string(32, 0)));
  CHECK(sum_of("") != sum_of(std::string(1, 0)));
}

TEST(checksum_does_not_depend_on_pieces) {
  std::mt19937_64 random(1);
  std::string text(1000, ' ');
  for (char& letter : text) letter = static_cast<char>(random());
  for (size_t length = 0; length <= text.size(); length += 1 + random() % 30) {
    Checksum sum;
    const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
    for (size_t at = 0; at < length;) {
      const size_t piece = std::min<size_t>(length - at, random() % 70);
      sum.feed(bytes + at, piece);
      at += piece;
    }
    CHECK(sum.value() == sum_of(text.substr(0, length)));
  }
}

TEST(checksum_sees_every_bit) {
  std::string text(133, 'x');
  const uint64_t whole = sum_of(text);
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
    CHECK(sum_of(text) != whole);
    text[bit / 8] = 'x';
  }
}
