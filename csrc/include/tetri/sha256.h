// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), so that the core needs no library for them.
//
// For short texts: the whole message is in memory.
#pragma once

#include <string>
#include <string_view>

namespace tetri {

constexpr size_t kDigestBytes = 32;

// 32 bytes.
std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);

// Takes the same time wherever the two differ.
bool equal_in_constant_time(std::string_view one, std::string_view other);

}  // namespace tetri
