#include "tetri/slot_table.h"

#include <atomic>

namespace tetri {

namespace {

constexpr size_t kMaxNotes = 4096;
constexpr size_t kMaxUnwanted = 65536;
constexpr size_t kMaxNameBytes = 1024;
constexpr Duration kHeldPoll = std::chrono::milliseconds(1);

// Never the same twice in a process, and never what another process used a moment ago.
uint64_t next_generation() {
  static std::atomic<uint64_t> next{(random_u64() >> 2) | 1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

std::string seconds_text(Duration duration) {
  std::string text = std::to_string(std::chrono::duration<double>(duration).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

Opened answer(const Open& wanted, Status status, std::string error) {
  return {wanted.request, static_cast<uint32_t>(status), 0, 0, 0, std::move(error)};
}

}  // namespace

SlotTable::SlotTable(uint64_t arena_bytes, uint64_t origin, ControlWord* control,
                     Duration fill_timeout, Duration hold_timeout)
    : allocator_(arena_bytes),
      origin_(origin),
      control_(control),
      fill_timeout_(fill_timeout),
      hold_timeout_(hold_timeout) {
  for (uint32_t index = kMaxSlots; index-- > 0;) free_controls_.push_back(index);
}

Opened SlotTable::open(const Open& wanted, const WriterId& writer, TimePoint now) {
  if (auto refused = refusal(wanted, writer, now)) return *refused;
  const auto named = names_.find(wanted.transfer);
  Record* record = nullptr;
  if (named != names_.end()) {
    record = &slots_.at(named->second);
  } else {
    record = create(wanted.transfer, wanted.num_blocks, wanted.block_bytes, writer.num_ranks);
    if (record != nullptr) {
      record->deadline = now + fill_timeout_;
      schedule(record->deadline);
    }
  }
  if (record == nullptr) {
    ++counters_.refused_full;
    return answer(wanted, Status::kFull,
                  "the receive arena has no room for " +
                      std::to_string(wanted.num_blocks * wanted.block_bytes * writer.num_ranks) +
                      " bytes now: " + std::to_string(used_bytes()) + " of " +
                      std::to_string(total_bytes()) + " bytes are in use");
  }
  Writer& mine = record->writers[writer.rank];
  mine.state = WriterState::kWriting;
  mine.id = writer;
  Opened opened = answer(wanted, Status::kOk, "");
  opened.generation = record->slot.generation;
  opened.offset = record->slot.offset + writer.rank * record->slot.rank_bytes;
  opened.control = record->control;
  return opened;
}

std::optional<Opened> SlotTable::refusal(const Open& wanted, const WriterId& writer,
                                         TimePoint now) {
  const auto refuse = [&](const std::string& why) {
    return answer(wanted, Status::kRefused, "transfer " + wanted.transfer + ": " + why);
  };
  if (wanted.transfer.empty() || wanted.transfer.size() > kMaxNameBytes) {
    return answer(wanted, Status::kRefused, "a transfer's name has 1 to 1024 bytes");
  }
  if (!can_ever_fit(wanted.num_blocks, wanted.block_bytes, writer.num_ranks)) {
    return refuse(std::to_string(wanted.num_blocks) + " blocks of " +
                  std::to_string(wanted.block_bytes) + " bytes from " +
                  std::to_string(writer.num_ranks) + " ranks can never fit an arena of " +
                  std::to_string(total_bytes()) + " bytes; raise arena_bytes there");
  }
  const auto unwanted = unwanted_.find(wanted.transfer);
  if (unwanted != unwanted_.end() && unwanted->second > now) {
    return answer(wanted, Status::kCancelled,
                  "transfer " + wanted.transfer + ": the receiver cancelled it before");
  }
  if (writer.num_ranks > 1) {
    // What another rank's failure ended cannot be completed; what its sender took back can.
    const auto failed = notes_.find(wanted.transfer);
    if (failed != notes_.end() && failed->second.until > now && !failed->second.was_taken_back) {
      return refuse("it failed before: " + failed->second.slot.error);
    }
  }
  const auto named = names_.find(wanted.transfer);
  if (named == names_.end()) return std::nullopt;
  const Record& record = slots_.at(named->second);
  const Slot& slot = record.slot;
  if (slot.state != SlotState::kFilling || slot.num_ranks != writer.num_ranks ||
      record.writers[writer.rank].state != WriterState::kAbsent) {
    return refuse("rank " + std::to_string(writer.rank) + " of it is open already");
  }
  if (slot.num_blocks != wanted.num_blocks ||
      slot.rank_bytes != wanted.num_blocks * wanted.block_bytes) {
    return refuse("another rank opened it with another size");
  }
  return std::nullopt;
}

bool SlotTable::can_ever_fit(uint64_t num_blocks, uint64_t block_bytes, uint32_t num_ranks) const {
  uint64_t bytes = 0;
  return num_blocks > 0 && block_bytes > 0 && num_ranks > 0 &&
         !__builtin_mul_overflow(num_blocks, block_bytes, &bytes) &&
         !__builtin_mul_overflow(bytes, num_ranks, &bytes) && bytes <= total_bytes();
}

SlotTable::Record* SlotTable::create(const std::string& name, uint64_t num_blocks,
                                     uint64_t block_bytes, uint32_t num_ranks) {
  if (free_controls_.empty()) return nullptr;
  const uint64_t rank_bytes = num_blocks * block_bytes;
  const auto place = allocator_.allocate(rank_bytes * num_ranks);
  if (!place) return nullptr;
  Record record;
  record.slot.transfer = name;
  record.slot.offset = origin_ + *place;
  record.slot.num_blocks = num_blocks;
  record.slot.rank_bytes = rank_bytes;
  record.slot.num_ranks = num_ranks;
  record.slot.generation = next_generation();
  record.bytes = allocator_.size_of(*place);
  record.control = free_controls_.back();
  free_controls_.pop_back();
  record.writers.resize(num_ranks);
  ControlWord& word = control_[record.control];
  word.progress.store(0, std::memory_order_relaxed);
  word.live.store(record.slot.generation, std::memory_order_release);
  notes_.erase(name);
  unwanted_.erase(name);
  names_[name] = record.slot.generation;
  return &slots_.emplace(record.slot.generation, std::move(record)).first->second;
}

SlotTable::Record* SlotTable::filling(uint64_t generation) {
  const auto found = slots_.find(generation);
  if (found == slots_.end() || found->second.quarantined ||
      found->second.slot.state != SlotState::kFilling) {
    return nullptr;
  }
  return &found->second;
}

SlotTable::Writer* SlotTable::writer_of(Record& record, const WriterId& id) {
  if (id.rank >= record.writers.size()) return nullptr;
  Writer& writer = record.writers[id.rank];
  const bool same = writer.state != WriterState::kAbsent && writer.id.connection == id.connection;
  return same ? &writer : nullptr;
}

std::optional<uint64_t> SlotTable::writable(uint64_t generation, const WriterId& id,
                                            uint64_t offset, uint64_t length) {
  Record* record = filling(generation);
  const Writer* writer = record == nullptr ? nullptr : writer_of(*record, id);
  if (writer == nullptr || writer->state != WriterState::kWriting) return std::nullopt;
  const uint64_t rank_bytes = record->slot.rank_bytes;
  if (offset > rank_bytes || length > rank_bytes - offset) {
    throw FrameError("bytes outside of the slot");
  }
  return record->slot.offset + id.rank * rank_bytes + offset;
}

void SlotTable::received(uint64_t generation, const WriterId& id, uint64_t bytes, TimePoint now) {
  Record* record = filling(generation);
  Writer* writer = record == nullptr ? nullptr : writer_of(*record, id);
  if (writer == nullptr || writer->state != WriterState::kWriting) return;
  writer->received += bytes;
  record->deadline = now + fill_timeout_;
  finish_if_complete(*record, *writer, now);
}

void SlotTable::end_filling(uint64_t generation, const WriterId& id, Status status,
                            const std::string& error, TimePoint now) {
  Record* record = filling(generation);
  if (record != nullptr && writer_of(*record, id) != nullptr) end(generation, status, error, now);
}

void SlotTable::discarded(uint64_t generation, const WriterId& id) {
  notices_.push_back({id.connection, generation, false, Status::kStale,
                      "the slot belongs to another transfer by now"});
}

void SlotTable::done(const Done& done, const WriterId& id, TimePoint now) {
  Record* record = filling(done.generation);
  Writer* writer = record == nullptr ? nullptr : writer_of(*record, id);
  if (writer == nullptr || writer->state != WriterState::kWriting) return;
  if (id.shared) writer->received = done.total_bytes;
  writer->total = done.total_bytes;
  record->deadline = now + fill_timeout_;
  finish_if_complete(*record, *writer, now);
}

void SlotTable::finish_if_complete(Record& record, Writer& writer, TimePoint now) {
  if (!writer.total || *writer.total > writer.received) return;
  if (*writer.total < writer.received) throw FrameError("more bytes than the sender counted");
  writer.state = WriterState::kFinished;
  for (const Writer& other : record.writers) {
    if (other.state != WriterState::kFinished) return;
  }
  // All ranks at once: none is done while another one may have to send again.
  for (const Writer& each : record.writers) {
    notices_.push_back({each.id.connection, record.slot.generation, true, Status::kOk, ""});
  }
  record.slot.state = SlotState::kArrived;
  record.deadline = now + hold_timeout_;
  schedule(record.deadline);
  ++counters_.arrived;
  ++counters_.settled;
}

void SlotTable::cancelled_by_sender(const Cancel& cancel, const WriterId& id, TimePoint now) {
  stopped(cancel.generation, id);
  Record* record = filling(cancel.generation);
  if (record == nullptr || writer_of(*record, id) == nullptr) return;
  const std::string name = record->slot.transfer;
  // Other ranks hear that the slot is of no use any more, not that their request was cancelled.
  end(cancel.generation, Status::kStale, "the sender cancelled it: " + printable(cancel.reason),
      now);
  const auto noted = notes_.find(name);
  if (noted != notes_.end()) noted->second.was_taken_back = true;
}

void SlotTable::stopped(uint64_t generation, const WriterId& id) {
  const auto found = slots_.find(generation);
  if (found == slots_.end()) return;
  Writer* writer = writer_of(found->second, id);
  if (writer == nullptr || writer->state != WriterState::kWriting) return;
  writer->state = WriterState::kStopped;
  free_if_stopped(generation);
}

void SlotTable::connection_lost(const WriterId& id, const std::string& reason, TimePoint now) {
  connection_dropped(id, reason, now);
  std::vector<uint64_t> touched;
  for (auto& [generation, record] : slots_) {
    for (Writer& writer : record.writers) {
      if (writer.state != WriterState::kWriting || writer.id.connection != id.connection) continue;
      writer.state = WriterState::kStopped;
      if (writer.id.remote) record.unsafe_until = now + kRemoteWriteTime;
      touched.push_back(generation);
    }
  }
  for (const uint64_t generation : touched) free_if_stopped(generation);
}

void SlotTable::connection_dropped(const WriterId& id, const std::string& reason, TimePoint now) {
  std::vector<uint64_t> ending;
  for (const auto& [generation, record] : slots_) {
    if (record.quarantined || record.slot.state != SlotState::kFilling) continue;
    for (const Writer& writer : record.writers) {
      if (writer.state != WriterState::kWriting || writer.id.connection != id.connection) continue;
      ending.push_back(generation);
      break;
    }
  }
  for (const uint64_t generation : ending) {
    end(generation, Status::kPeerLost, "the sender went away: " + reason, now);
  }
}

std::optional<Slot> SlotTable::find(const std::string& transfer) const {
  const auto named = names_.find(transfer);
  if (named != names_.end()) return slots_.at(named->second).slot;
  const auto failed = notes_.find(transfer);
  if (failed != notes_.end()) return failed->second.slot;
  return std::nullopt;
}

std::optional<Slot> SlotTable::take(const std::string& transfer) {
  const auto named = names_.find(transfer);
  if (named == names_.end()) return std::nullopt;
  Record& record = slots_.at(named->second);
  if (record.slot.state != SlotState::kArrived) return std::nullopt;
  record.slot.state = SlotState::kTaken;
  return record.slot;
}

void SlotTable::release(const std::string& transfer) {
  notes_.erase(transfer);
  const auto named = names_.find(transfer);
  if (named == names_.end()) return;
  const uint64_t generation = named->second;
  if (slots_.at(generation).slot.state == SlotState::kTaken) end(generation, Status::kOk, "", {});
}

void SlotTable::cancel(const std::string& transfer, TimePoint now) {
  notes_.erase(transfer);
  const TimePoint until = now + fill_timeout_;
  unwanted_[transfer] = until;
  unwanted_order_.emplace_back(transfer, until);
  schedule(until);
  while (unwanted_order_.size() > kMaxUnwanted) {
    unwanted_.erase(unwanted_order_.front().first);
    unwanted_order_.pop_front();
  }
  const auto named = names_.find(transfer);
  if (named == names_.end()) return;
  const uint64_t generation = named->second;
  if (slots_.at(generation).slot.state == SlotState::kTaken) return;
  end(generation, Status::kCancelled, "", now);
}

void SlotTable::abandon(const std::string& prefix, const std::unordered_set<std::string>& kept,
                        const std::string& reason, TimePoint now) {
  std::vector<uint64_t> ending;
  for (const auto& [generation, record] : slots_) {
    const std::string& name = record.slot.transfer;
    if (record.quarantined || record.slot.state == SlotState::kTaken) continue;
    if (name.compare(0, prefix.size(), prefix) == 0 && kept.count(name) == 0) {
      ending.push_back(generation);
    }
  }
  for (const uint64_t generation : ending) end(generation, Status::kCancelled, reason, now);
}

size_t SlotTable::num_slots(SlotState state) const {
  size_t count = 0;
  for (const auto& [generation, record] : slots_) {
    count += !record.quarantined && record.slot.state == state ? 1 : 0;
  }
  return count;
}

size_t SlotTable::num_quarantined() const {
  size_t count = 0;
  for (const auto& [generation, record] : slots_) count += record.quarantined ? 1 : 0;
  return count;
}

TimePoint SlotTable::expire(TimePoint now) {
  if (now < next_deadline_) return next_deadline_;
  next_deadline_ = expire_notes(now);
  std::vector<uint64_t> overdue;
  std::vector<uint64_t> quarantined;
  for (auto& [generation, record] : slots_) {
    if (record.unsafe_until <= now) record.unsafe_until = TimePoint{};
    if (record.quarantined) quarantined.push_back(generation);
    if (record.quarantined || record.slot.state == SlotState::kTaken) continue;
    if (record.deadline <= now && !extended_by_writer(record, now)) {
      overdue.push_back(generation);
    } else {
      schedule(record.deadline);
    }
  }
  for (const uint64_t generation : overdue) {
    ++counters_.expired;
    const bool filling = slots_.at(generation).slot.state == SlotState::kFilling;
    end(generation, Status::kTimeout,
        filling ? "no progress for " + seconds_text(fill_timeout_)
                : "arrived but not taken for " + seconds_text(hold_timeout_),
        now);
  }
  for (const uint64_t generation : quarantined) free_if_stopped(generation);
  if (next_deadline_ == TimePoint{}) next_deadline_ = now + kHeldPoll;
  return next_deadline_;
}

bool SlotTable::extended_by_writer(Record& record, TimePoint now) const {
  const uint64_t progress = control_[record.control].progress.load(std::memory_order_relaxed);
  if (record.slot.state != SlotState::kFilling || progress == record.seen_progress) return false;
  record.seen_progress = progress;
  record.deadline = now + fill_timeout_;
  return true;
}

TimePoint SlotTable::expire_notes(TimePoint now) {
  TimePoint next = TimePoint::max();
  while (!note_order_.empty() && note_order_.front().second <= now) {
    const auto found = notes_.find(note_order_.front().first);
    if (found != notes_.end() && found->second.until <= now) notes_.erase(found);
    note_order_.pop_front();
  }
  while (!unwanted_order_.empty() && unwanted_order_.front().second <= now) {
    const auto found = unwanted_.find(unwanted_order_.front().first);
    if (found != unwanted_.end() && found->second <= now) unwanted_.erase(found);
    unwanted_order_.pop_front();
  }
  if (!note_order_.empty()) next = std::min(next, note_order_.front().second);
  if (!unwanted_order_.empty()) next = std::min(next, unwanted_order_.front().second);
  return next;
}

std::vector<Notice> SlotTable::take_notices() {
  std::vector<Notice> taken;
  taken.swap(notices_);
  return taken;
}

void SlotTable::end(uint64_t generation, Status status, const std::string& error, TimePoint now) {
  Record& record = slots_.at(generation);
  control_[record.control].live.store(0, std::memory_order_seq_cst);
  names_.erase(record.slot.transfer);
  if (!error.empty()) note(record.slot, error, now);
  record.quarantined = true;
  quarantined_bytes_ += record.bytes;
  const bool unconfirmed = record.slot.state == SlotState::kFilling;
  for (Writer& writer : record.writers) {
    const bool waits = unconfirmed && writer.state == WriterState::kFinished;
    if (writer.state != WriterState::kWriting && !waits) continue;
    notices_.push_back({writer.id.connection, generation, false, status,
                        error.empty() ? "the receiver cancelled it" : error});
    if (!writer.id.shared) writer.state = WriterState::kStopped;
  }
  free_if_stopped(generation);
}

void SlotTable::free_if_stopped(uint64_t generation) {
  const auto found = slots_.find(generation);
  if (found == slots_.end() || !found->second.quarantined) return;
  const Record& record = found->second;
  for (const Writer& writer : record.writers) {
    if (writer.state == WriterState::kWriting) return;
  }
  if (record.unsafe_until != TimePoint{}) return schedule(record.unsafe_until);
  if (control_[record.control].holders.load(std::memory_order_seq_cst) != 0) {
    return schedule(TimePoint{});  // `expire` looks again
  }
  quarantined_bytes_ -= record.bytes;
  free_controls_.push_back(record.control);
  allocator_.free(record.slot.offset - origin_);
  slots_.erase(found);
}

void SlotTable::note(const Slot& slot, const std::string& error, TimePoint now) {
  const TimePoint until = now + hold_timeout_;
  Slot failed = slot;
  failed.state = SlotState::kFailed;
  failed.error = error;
  notes_[slot.transfer] = {std::move(failed), until, false};
  note_order_.emplace_back(slot.transfer, until);
  while (note_order_.size() > kMaxNotes) {
    const auto& [name, noted_until] = note_order_.front();
    const auto found = notes_.find(name);  // there may be a newer one of that name, as this one
    const bool is_newer = found == notes_.end() || found->second.until > noted_until;
    if (!is_newer && name != slot.transfer) notes_.erase(found);
    note_order_.pop_front();
  }
  schedule(until);
  ++counters_.settled;
}

void SlotTable::schedule(TimePoint deadline) {
  next_deadline_ = std::min(next_deadline_, deadline);
}

}  // namespace tetri
