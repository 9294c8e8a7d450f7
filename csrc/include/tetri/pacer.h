// Delays the completion of writes, so that a link looks like one of another speed.
#pragma once

#include <deque>
#include <optional>
#include <utility>

#include "tetri/status.h"
#include "tetri/transfer.h"

namespace tetri {

// A link that serves one write after another.
struct Emulated {
  double bytes_per_s = 0;
  Duration latency{};  // of each write
};

// Of one receiver. Without an emulated link it passes everything on at once.
class Pacer {
 public:
  explicit Pacer(std::optional<Emulated> emulated) : emulated_(std::move(emulated)) {}

  // The write has moved its bytes.
  void add(WriteOpPtr op) {
    TimePoint due = TimePoint::min();
    if (emulated_) {
      const auto served = from_seconds(static_cast<double>(op->bytes()) / emulated_->bytes_per_s);
      free_at_ = std::max(free_at_, op->started) + served;
      due = free_at_ + emulated_->latency;
    }
    moved_.emplace_back(due, std::move(op));
  }
  // The oldest write that an emulated link has delivered, if there is one.
  WriteOpPtr next(TimePoint now) {
    if (moved_.empty() || moved_.front().first > now) return nullptr;
    WriteOpPtr op = std::move(moved_.front().second);
    moved_.pop_front();
    return op;
  }
  void clear() { moved_.clear(); }
  TimePoint due() const { return moved_.empty() ? TimePoint::max() : moved_.front().first; }

 private:
  const std::optional<Emulated> emulated_;
  TimePoint free_at_ = TimePoint::min();
  std::deque<std::pair<TimePoint, WriteOpPtr>> moved_;
};

}  // namespace tetri
