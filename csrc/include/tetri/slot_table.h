// Who owns which part of the arena, in which state, until when.
//
//              open                done by all ranks          take            release
//   (nothing) ------> FILLING -------------------> ARRIVED ---------> TAKEN ---------> (nothing)
//                        |  cancel, timeout, peer gone |  timeout
//                        v                             v
//                     FAILED (no memory, only a note) <-
//
// Memory of a slot that ends while a shared-memory writer may still be writing is quarantined: it
// stays allocated, under no name, until that writer reports that it stopped or its connection is
// gone (for as long as a write may take, if it is on another host), and until nothing holds its
// control word.
//
// Not thread-safe and without a clock: the caller locks and passes the time.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tetri/allocator.h"
#include "tetri/frame.h"
#include "tetri/segment.h"
#include "tetri/status.h"

namespace tetri {

enum class SlotState : uint32_t { kFilling = 0, kArrived = 1, kTaken = 2, kFailed = 3 };

struct Slot {
  std::string transfer;
  SlotState state = SlotState::kFilling;
  uint64_t offset = 0;  // from the start of the segment, or of the memory that the caller owns
  uint64_t num_blocks = 0;
  uint64_t rank_bytes = 0;
  uint32_t num_ranks = 1;
  uint64_t generation = 0;
  std::string error;
};

// Which connection a rank's bytes come from, and how.
struct WriterId {
  uint64_t connection = 0;
  uint32_t rank = 0;
  uint32_t num_ranks = 1;
  bool shared = false;  // writes into the arena itself, where this side cannot stop it
  bool remote = false;  // and from another host: its last write may outlive its connection
};

// A remote writer that was told to stop, or is lost, is not believed to write longer than this.
constexpr auto kRemoteWriteTime = std::chrono::seconds(15);

// What the service thread has to send to a sender.
struct Notice {
  uint64_t connection;
  uint64_t generation;
  bool confirm;  // otherwise: stop
  Status status;
  std::string reason;
};

struct TableCounters {
  uint64_t arrived = 0;
  uint64_t expired = 0;
  uint64_t refused_full = 0;
  uint64_t settled = 0;  // slots that became ARRIVED or FAILED
};

class SlotTable {
 public:
  // Offsets of slots begin at `origin`.
  SlotTable(uint64_t arena_bytes, uint64_t origin, ControlWord* control, Duration fill_timeout,
            Duration hold_timeout);

  // The sender's side.
  Opened open(const Open& wanted, const WriterId& writer, TimePoint now);
  // Where the bytes go, from the start of the segment; nothing when the slot is no longer filling
  // for this writer. Throws FrameError when the range is outside the writer's part.
  std::optional<uint64_t> writable(uint64_t generation, const WriterId& writer, uint64_t offset,
                                   uint64_t length);
  void received(uint64_t generation, const WriterId& writer, uint64_t bytes, TimePoint now);
  // What this writer has sent is of no use; ignored when the slot is not filling for it.
  void end_filling(uint64_t generation, const WriterId& writer, Status status,
                   const std::string& error, TimePoint now);
  // Bytes came that belong in no slot: the writer is told so, after why its slot ended.
  void discarded(uint64_t generation, const WriterId& writer);
  void done(const Done& done, const WriterId& writer, TimePoint now);
  void cancelled_by_sender(const Cancel& cancel, const WriterId& writer, TimePoint now);
  void stopped(uint64_t generation, const WriterId& writer);
  void connection_lost(const WriterId& writer, const std::string& reason, TimePoint now);
  // This side gave the connection up; a shared-memory writer may still be writing.
  void connection_dropped(const WriterId& writer, const std::string& reason, TimePoint now);

  // The engine's side.
  std::optional<Slot> find(const std::string& transfer) const;
  std::optional<Slot> take(const std::string& transfer);
  void release(const std::string& transfer);
  void cancel(const std::string& transfer, TimePoint now);
  // Ends every slot that is not TAKEN and whose name begins with `prefix`, but for those in
  // `kept`; `reason` is left as their notes.
  void abandon(const std::string& prefix, const std::unordered_set<std::string>& kept,
               const std::string& reason, TimePoint now);

  // Ends what is overdue; returns when to call again.
  TimePoint expire(TimePoint now);
  TimePoint next_deadline() const { return next_deadline_; }
  std::vector<Notice> take_notices();

  uint64_t used_bytes() const { return allocator_.used_bytes(); }
  uint64_t total_bytes() const { return allocator_.total_bytes(); }
  uint64_t quarantined_bytes() const { return quarantined_bytes_; }
  size_t num_slots() const { return slots_.size(); }
  // Slots in this state; quarantined ones are in none.
  size_t num_slots(SlotState state) const;
  size_t num_quarantined() const;
  const TableCounters& counters() const { return counters_; }

 private:
  enum class WriterState { kAbsent, kWriting, kFinished, kStopped };
  struct Writer {
    WriterState state = WriterState::kAbsent;
    WriterId id;
    uint64_t received = 0;
    std::optional<uint64_t> total;
  };
  struct Record {
    Slot slot;
    uint64_t bytes = 0;  // as allocated
    uint32_t control = 0;
    bool quarantined = false;
    TimePoint unsafe_until{};  // a remote writer that was lost may still be writing
    uint64_t seen_progress = 0;
    TimePoint deadline;
    std::vector<Writer> writers;
  };
  struct Note {
    Slot slot;
    TimePoint until;
    bool was_taken_back;  // by its sender, who may open it again
  };

  std::optional<Opened> refusal(const Open& wanted, const WriterId& writer, TimePoint now);
  bool can_ever_fit(uint64_t num_blocks, uint64_t block_bytes, uint32_t num_ranks) const;
  Record* create(const std::string& name, uint64_t num_blocks, uint64_t block_bytes,
                 uint32_t num_ranks);
  Record* filling(uint64_t generation);
  Writer* writer_of(Record& record, const WriterId& id);
  void finish_if_complete(Record& record, Writer& writer, TimePoint now);
  // Ends a slot; `error` empty: leave no note.
  void end(uint64_t generation, Status status, const std::string& error, TimePoint now);
  void free_if_stopped(uint64_t generation);
  void note(const Slot& slot, const std::string& error, TimePoint now);
  void schedule(TimePoint deadline);
  bool extended_by_writer(Record& record, TimePoint now) const;
  TimePoint expire_notes(TimePoint now);

  Allocator allocator_;
  const uint64_t origin_;
  ControlWord* control_;
  Duration fill_timeout_;
  Duration hold_timeout_;
  std::vector<uint32_t> free_controls_;
  std::unordered_map<uint64_t, Record> slots_;       // by generation; owns arena memory
  std::unordered_map<std::string, uint64_t> names_;  // transfer -> generation
  std::unordered_map<std::string, Note> notes_;      // FAILED transfers
  std::deque<std::pair<std::string, TimePoint>> note_order_;
  std::unordered_map<std::string, TimePoint> unwanted_;  // cancelled here: refuse until then
  std::deque<std::pair<std::string, TimePoint>> unwanted_order_;
  std::vector<Notice> notices_;
  uint64_t quarantined_bytes_ = 0;
  TimePoint next_deadline_ = TimePoint::max();
  TableCounters counters_;
};

}  // namespace tetri
