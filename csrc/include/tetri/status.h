// Outcomes, errors and time: the words that every other header uses.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tetri {

enum class Status : uint32_t {
  kOk = 0,
  kPending = 1,
  kFull = 2,
  kRefused = 3,
  kTimeout = 4,
  kPeerLost = 5,
  kCancelled = 6,
  kStale = 7,
  kInvalid = 8,
  kClosed = 9,
};
constexpr uint32_t kNumStatuses = 10;

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

// Seconds as Python gives them; negative and not-a-number mean "now", huge means "about a year".
inline Duration from_seconds(double seconds) {
  const double bounded = seconds > 0 ? std::min(seconds, 3.0e7) : 0.0;
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(bounded));
}

// Ends a session with a peer; `status` is what its transfers get.
class LinkError : public std::runtime_error {
 public:
  LinkError(Status status, const std::string& what) : std::runtime_error(what), status(status) {}
  const Status status;
};

}  // namespace tetri
