// The shared memory segment that holds a receive arena.
//
//   [ header 4 KiB | one ControlWord per slot | arena ............ ]
//
// The owner holds an exclusive flock on the file while it lives; `transport.segments` removes those
// that it can lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tetri/fd.h"

namespace tetri {

// Shared between the receiver and all its writers on this host. A writer looks at `live` between
// blocks: when it is no longer the generation it was granted, it must stop.
struct ControlWord {
  std::atomic<uint64_t> live;
  std::atomic<uint64_t> progress;  // grows with every block that a writer has copied
  std::atomic<uint64_t> holders;   // writes of the receiver's own process into the slot

  bool is_of(uint64_t generation) const { return live.load() == generation; }
  // Keeps the slot's memory from being given to another one; false if it is not this generation's
  // any more. Pairs with `let_go`.
  bool hold(uint64_t generation);
  void let_go() { holders.fetch_sub(1, std::memory_order_seq_cst); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "control words live in shared memory");

using Nonce = std::array<uint8_t, 16>;

constexpr uint32_t kMaxSlots = 4096;
constexpr uint64_t kHeaderBytes = 4096 + kMaxSlots * sizeof(ControlWord);

// A mapping of one segment. Owns the mapping and the descriptor; the owner also the file.
class Segment {
 public:
  // A new segment whose memory is reserved. Throws std::runtime_error, also when /dev/shm is full.
  // One that is not shared is not in /dev/shm, has no path and cannot be attached.
  static Segment create(uint64_t arena_bytes, bool is_shared);
  // An existing segment. Throws std::runtime_error when it is missing, foreign or malformed.
  static Segment attach(const std::string& path);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  const std::string& path() const { return path_; }
  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  uint64_t arena_bytes() const { return size_ - kHeaderBytes; }
  ControlWord* control() const { return reinterpret_cast<ControlWord*>(data_ + 4096); }
  Nonce nonce() const;
  void close() noexcept;

 private:
  Segment(std::string path, Fd fd, uint64_t size, bool owner);
  void map();
  void use_huge_pages() const;
  void begin_touching(uint64_t at_once);

  struct Toucher;

  std::string path_;
  Fd fd_;
  uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
  bool owner_ = false;
  std::unique_ptr<Toucher> toucher_;
};

// Bytes from the kernel's generator.
uint64_t random_u64();
// Equal in every process of one running kernel, different elsewhere.
std::string boot_id();

}  // namespace tetri
