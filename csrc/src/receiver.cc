#include "tetri/receiver.h"

#include "tetri/proof.h"
#include "tetri/service.h"

namespace tetri {

namespace {

void check_offers(const Offers& offers) {
  if (offers.size() > kMaxOffers) {
    throw std::invalid_argument("a receiver makes at most " + std::to_string(kMaxOffers) +
                                " offers, not " + std::to_string(offers.size()));
  }
  for (const auto& [kind, bytes] : offers) {
    if (kind.empty() || kind.size() > kMaxKindBytes || kind != printable(kind) ||
        needs_host_memory(kind)) {
      throw std::invalid_argument("'" + printable(kind) +
                                  "' is no kind of link to make an offer of");
    }
    if (bytes.size() > kMaxOfferBytes) {
      throw std::invalid_argument("an offer has at most " + std::to_string(kMaxOfferBytes) +
                                  " bytes, not " + std::to_string(bytes.size()));
    }
  }
}

const ReceiverOptions& checked(const ReceiverOptions& options) {
  if (options.port < 0 || options.port > 65535) {
    throw std::invalid_argument("port must be between 0 and 65535");
  }
  check_key(options.key);
  if (!options.has_host_memory && options.arena_bytes == 0) {
    throw std::invalid_argument("arena_bytes is the size of the caller's memory, not 0");
  }
  if (options.max_connections == 0) throw std::invalid_argument("max_connections must be positive");
  if (options.fill_timeout <= Duration::zero() || options.hold_timeout <= Duration::zero()) {
    throw std::invalid_argument("fill_timeout_s and hold_timeout_s must be positive");
  }
  return options;
}

}  // namespace

Receiver::Receiver(const ReceiverOptions& options)
    : state_(checked(options)),
      service_(std::make_unique<Service>(state_)),
      endpoint_(service_->endpoint()) {}

Receiver::~Receiver() { close(); }

void Receiver::offer(const std::string& kind, const std::string& bytes) {
  const std::lock_guard lock(state_.mutex);
  Offers offers = state_.offers;
  offers[kind] = bytes;
  check_offers(offers);
  state_.offers = std::move(offers);
}

std::optional<Slot> Receiver::find(const std::string& transfer) {
  const std::lock_guard lock(state_.mutex);
  return state_.table.find(transfer);
}

bool Receiver::wait(Duration timeout) {
  std::unique_lock lock(state_.mutex);
  const auto has_news = [&] {
    return state_.table.counters().settled != seen_settled_ || !state_.messages.empty();
  };
  state_.changed.wait_for(lock, timeout, [&] { return has_news() || state_.closing; });
  const bool news = has_news();
  seen_settled_ = state_.table.counters().settled;
  return news;
}

std::optional<Slot> Receiver::take(const std::string& transfer) {
  const std::lock_guard lock(state_.mutex);
  return state_.closing ? std::nullopt : state_.table.take(transfer);
}

void Receiver::release(const std::string& transfer) {
  const std::lock_guard lock(state_.mutex);
  if (state_.closing) return;
  state_.table.release(transfer);
  if (state_.table.next_deadline() == TimePoint{}) signal_event(state_.wake.get());  // it is held
}

void Receiver::cancel(const std::string& transfer) {
  const std::lock_guard lock(state_.mutex);
  if (state_.closing) return;
  state_.table.cancel(transfer, Clock::now());
  signal_event(state_.wake.get());
}

void Receiver::abandon(const std::string& prefix, const std::vector<std::string>& kept,
                       const std::string& reason) {
  const std::lock_guard lock(state_.mutex);
  if (state_.closing) return;
  state_.table.abandon(prefix, {kept.begin(), kept.end()}, reason, Clock::now());
  signal_event(state_.wake.get());
}

std::optional<std::string> Receiver::receive() {
  if (state_.num_messages == 0) return std::nullopt;  // the mutex is busy while KV arrives
  const std::lock_guard lock(state_.mutex);
  if (state_.messages.empty()) return std::nullopt;
  std::string message = std::move(state_.messages.front());
  state_.messages.pop_front();
  --state_.num_messages;
  return message;
}

ReceiverStats Receiver::stats() {
  const std::lock_guard lock(state_.mutex);
  const SlotTable& table = state_.table;
  ReceiverStats stats{table.counters(), state_.counters};
  stats.arena_total_bytes = table.total_bytes();
  if (state_.closing) {
    stats.connections = 0;
    return stats;
  }
  stats.arena_used_bytes = table.used_bytes();
  stats.quarantined_bytes = table.quarantined_bytes();
  stats.slots = table.num_slots();
  stats.filling = table.num_slots(SlotState::kFilling);
  stats.unclaimed = table.num_slots(SlotState::kArrived);
  stats.quarantined = table.num_quarantined();
  return stats;
}

void Receiver::close() {
  const std::lock_guard once(closing_);
  {
    const std::lock_guard lock(state_.mutex);
    if (!state_.closing) {
      state_.closing = true;
      for (uint32_t index = 0; index < kMaxSlots; ++index) {
        state_.segment.control()[index].live.store(0);  // writers stop
      }
    }
    state_.changed.notify_all();
  }
  service_->stop();
  const std::lock_guard lock(state_.mutex);
  state_.segment.close();
  state_.wake.reset();
}

}  // namespace tetri
