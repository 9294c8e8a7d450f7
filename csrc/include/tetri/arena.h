// A worker's mapping of its own instance's receive arena, in any process of its user.
#pragma once

#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tetri/layout.h"
#include "tetri/segment.h"

namespace tetri {

// Thread-safe. Copies run side by side; `close` waits for them.
class Arena {
 public:
  explicit Arena(const std::string& segment) : segment_(Segment::attach(segment)) {}

  // Blocks. Copies slot blocks [first_block, first_block + ids.size()) to `ids` of the layout.
  // Throws std::invalid_argument when anything is out of range or the arena is closed.
  void load(uint64_t slot_offset, uint64_t first_block, const Layout& layout,
            const std::vector<int32_t>& ids);
  // Where offsets of slots count from, and how many bytes are mapped there; 0 when closed.
  uint64_t address();
  uint64_t num_bytes();
  // Of the control word of a slot: see there. Both throw std::invalid_argument if there is none.
  bool hold(uint32_t control, uint64_t generation) { return word(control).hold(generation); }
  void let_go(uint32_t control) { word(control).let_go(); }
  void close();

 private:
  ControlWord& word(uint32_t control);  // not for use while the arena is closed

  std::shared_mutex mutex_;
  std::optional<Segment> segment_;
};

}  // namespace tetri
