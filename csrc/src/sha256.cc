#include "tetri/sha256.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace tetri {

namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The first 32 bits of the fractional parts of the square roots of the first eight.
constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t rotate(uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void compress(std::array<uint32_t, 8>* state, const uint8_t* block) {
  std::array<uint32_t, 64> words;
  for (size_t t = 0; t < 16; ++t) words[t] = big_endian(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t x = words[t - 15];
    const uint32_t y = words[t - 2];
    const uint32_t small0 = rotate(x, 7) ^ rotate(x, 18) ^ (x >> 3);
    const uint32_t small1 = rotate(y, 17) ^ rotate(y, 19) ^ (y >> 10);
    words[t] = small1 + words[t - 7] + small0 + words[t - 16];
  }
  auto [a, b, c, d, e, f, g, h] = *state;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t big1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const uint32_t big0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
    const uint32_t first = h + big1 + ((e & f) ^ (~e & g)) + kRounds[t] + words[t];
    const uint32_t second = big0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (size_t index = 0; index < 8; ++index) (*state)[index] += added[index];
}

}  // namespace

std::string sha256(std::string_view message) {
  std::array<uint32_t, 8> state = kStart;
  const auto* bytes = reinterpret_cast<const uint8_t*>(message.data());
  size_t left = message.size();
  for (; left >= kBlockBytes; left -= kBlockBytes, bytes += kBlockBytes) compress(&state, bytes);
  // What is left, a one, zeros, and the length in bits: in one block or two.
  std::array<uint8_t, 2 * kBlockBytes> tail{};
  if (left > 0) std::memcpy(tail.data(), bytes, left);
  tail[left] = 0x80;
  const size_t length = left + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  const uint64_t bits = uint64_t{message.size()} * 8;
  for (size_t index = 0; index < 8; ++index) {
    tail[length - 1 - index] = static_cast<uint8_t>(bits >> (8 * index));
  }
  for (size_t done = 0; done < length; done += kBlockBytes) compress(&state, tail.data() + done);
  std::string digest(kDigestBytes, '\0');
  for (size_t index = 0; index < kDigestBytes; ++index) {
    digest[index] = static_cast<char>(state[index / 4] >> (24 - 8 * (index % 4)));
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string block(key.size() > kBlockBytes ? sha256(key) : std::string(key));
  block.resize(kBlockBytes, '\0');
  std::string inner = block;
  std::string outer = block;
  for (size_t index = 0; index < kBlockBytes; ++index) {
    inner[index] = static_cast<char>(inner[index] ^ 0x36);
    outer[index] = static_cast<char>(outer[index] ^ 0x5c);
  }
  inner.append(message);
  return sha256(outer + sha256(inner));
}

bool equal_in_constant_time(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;  // lengths are no secret
  volatile uint8_t difference = 0;
  for (size_t index = 0; index < one.size(); ++index) {
    difference = static_cast<uint8_t>(difference | (one[index] ^ other[index]));
  }
  return difference == 0;
}

}  // namespace tetri
