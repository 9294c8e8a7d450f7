#include "tetri/sender.h"

#include <vector>

#include "tetri/proof.h"

namespace tetri {

namespace {

constexpr size_t kMaxExcluded = 4096;
constexpr uint64_t kMaxTransferBytes = uint64_t{1} << 46;

SenderOptions checked(SenderOptions options) {
  if (options.num_ranks == 0 || options.num_ranks > kMaxRanks ||
      options.rank >= options.num_ranks) {
    throw std::invalid_argument("rank must be below num_ranks, and num_ranks at most " +
                                std::to_string(kMaxRanks));
  }
  check_key(options.key);
  if (options.links.empty()) throw std::invalid_argument("links names at least one kind of link");
  for (const std::string& kind : options.links) {
    if (kind.empty() || kind.size() > kMaxKindBytes || kind != printable(kind)) {
      throw std::invalid_argument("'" + printable(kind) + "' is no kind of link");
    }
  }
  if (options.streams == 0 || options.streams > 16) {
    throw std::invalid_argument("streams must be between 1 and 16");
  }
  if (options.open_timeout <= Duration::zero() || options.io_timeout <= Duration::zero()) {
    throw std::invalid_argument("open_timeout_s and io_timeout_s must be positive");
  }
  if (options.emulated && !(options.emulated->bytes_per_s > 0)) {
    throw std::invalid_argument("an emulated link needs more than 0 bytes/s");
  }
  if (options.max_queued_blocks == 0) {
    throw std::invalid_argument("max_queued_blocks must be positive");
  }
  return options;
}

}  // namespace

Sender::Sender(SenderOptions options)
    : shared_(std::make_shared<SenderShared>(checked(std::move(options)))) {}

Sender::~Sender() { close(); }

TransferPtr Sender::open(const std::string& endpoint, const std::string& transfer,
                         uint64_t num_blocks, uint64_t block_bytes) {
  uint64_t bytes = 0;
  if (num_blocks == 0 || block_bytes == 0 ||
      __builtin_mul_overflow(num_blocks, block_bytes, &bytes) || bytes > kMaxTransferBytes) {
    throw std::invalid_argument("transfer " + transfer + ": " + std::to_string(num_blocks) +
                                " blocks of " + std::to_string(block_bytes) +
                                " bytes is no size for a slot");
  }
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Peer> receiver = peer(endpoint);
  auto opened = std::make_shared<Transfer>(shared_, receiver, transfer, num_blocks, block_bytes);
  if (!receiver || !receiver->post({Command::Kind::kOpen, opened, nullptr, nullptr})) {
    opened->fail(Status::kClosed, "the sender was closed");
  }
  return opened;
}

Status Sender::send(const std::string& endpoint, std::string message, Duration timeout) {
  if (message.size() > kMaxMessageBytes) {
    throw std::invalid_argument("a message has at most " + std::to_string(kMaxMessageBytes) +
                                " bytes, not " + std::to_string(message.size()));
  }
  auto op = std::make_shared<MessageOp>();
  op->payload = std::move(message);
  {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Peer> receiver = peer(endpoint);
    if (!receiver || !receiver->post({Command::Kind::kMessage, nullptr, nullptr, op})) {
      return Status::kClosed;
    }
  }
  return op->wait(timeout);
}

// None when the sender is closed. A peer that retires between here and `post` has been idle for a
// minute and loses the race at most once: the next call gets a new one.
std::shared_ptr<Peer> Sender::peer(const std::string& endpoint) {
  for (auto entry = peers_.begin(); entry != peers_.end();) {
    if (!entry->second->retired()) {
      ++entry;
      continue;
    }
    entry->second->stop();
    entry = peers_.erase(entry);
  }
  const Endpoint parsed = parse_endpoint(endpoint);
  if (closed_) return nullptr;
  const auto found = peers_.find(endpoint);
  if (found != peers_.end()) return found->second;
  const auto made = std::make_shared<Peer>(shared_, endpoint, parsed);  // there may be no thread
  return peers_.emplace(endpoint, made).first->second;
}

OrderPtr Sender::take_order(Duration timeout) { return shared_->orders.take(timeout); }

void Sender::exclude(const std::string& endpoint, const std::string& kind) {
  const std::lock_guard lock(mutex_);
  {
    const std::lock_guard sharing(shared_->mutex);
    if (shared_->excluded.size() >= kMaxExcluded) shared_->excluded.clear();
    shared_->excluded.emplace(endpoint, kind);
  }
  const auto found = peers_.find(endpoint);
  if (found == peers_.end()) return;
  found->second->post({Command::Kind::kExclude, nullptr, nullptr, nullptr});
}

bool Sender::wait(Duration timeout) {
  std::unique_lock lock(shared_->mutex);
  const auto has_news = [&] { return shared_->settled != seen_settled_; };
  shared_->changed.wait_for(lock, timeout, [&] { return has_news() || shared_->closed; });
  const bool news = has_news();
  seen_settled_ = shared_->settled;
  return news;
}

void Sender::close() {
  decltype(peers_) ending;  // without the lock: who takes orders may wait for it
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    ending.swap(peers_);
    const std::lock_guard counting(shared_->mutex);
    shared_->closed = true;
    shared_->changed.notify_all();
  }
  shared_->orders.close();
  for (auto& entry : ending) entry.second->end();  // all at once: each may wait for its orders
  for (auto& entry : ending) entry.second->stop();
}

}  // namespace tetri
