// A reader's mapping of a receiver's arena, in any process of its user.
#pragma once

#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tetri/layout.h"
#include "tetri/segment.h"

namespace tetri {

// Thread-safe. Loads run side by side; `close` waits for them.
class Arena {
 public:
  explicit Arena(const std::string& segment)
      : segment_(Segment::attach(segment, Segment::Access::kRead)) {}

  // Blocks. Copies slot blocks [first_block, first_block + ids.size()) to `ids` of the layout.
  // Throws std::invalid_argument when anything is out of range or the arena is closed.
  void load(uint64_t slot_offset, uint64_t first_block, const Layout& layout,
            const std::vector<int32_t>& ids, int threads);
  void close();

 private:
  std::shared_mutex mutex_;
  std::optional<Segment> segment_;
};

}  // namespace tetri
