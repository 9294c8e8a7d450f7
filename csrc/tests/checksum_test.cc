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

TEST(checksum_is_xxh64) {
  CHECK(sum_of("") == 0xEF46DB3751D8E999);
  CHECK(sum_of("a") == 0xD24EC4F1A98C6E5B);
  CHECK(sum_of("abc") == 0x44BC2CF5AD770999);
  CHECK(sum_of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1);
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
