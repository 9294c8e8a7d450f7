#include "tetri/pump.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace tetri {

namespace {

constexpr size_t kReadBytes = 1 << 16;
constexpr size_t kMostChunkBytes = 1 << 18;
constexpr size_t kMostKeptBytes = 1 << 16;
constexpr std::string_view kEventEnd = "\n\n";
constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kData = "data: ";
// None of these can occur inside a JSON string, where quotes are escaped.
constexpr std::string_view kIds = "\"token_ids\":[";
constexpr std::string_view kPromptIds = "\"prompt_token_ids\":[";
constexpr std::string_view kEmpty =
    "\"delta\":{},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null";

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Like `find`, which looks at every first letter of the word.
size_t position(std::string_view text, std::string_view word, size_t from = 0) {
  if (from >= text.size()) return text.npos;
  const void* found = ::memmem(text.data() + from, text.size() - from, word.data(), word.size());
  return found == nullptr ? text.npos
                          : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

size_t count(std::string_view text, std::string_view word) {
  size_t found = 0;
  for (size_t at = position(text, word); at != text.npos;
       at = position(text, word, at + word.size())) {
    ++found;
  }
  return found;
}

// Replaces lists of numbers after `key`, at most `most` of them, by null.
std::string without_lists(std::string_view text, std::string_view key, size_t most) {
  std::string made;
  made.reserve(text.size());
  size_t begin = 0;
  for (size_t at = position(text, key); at != text.npos && most > 0; at = position(text, key, at)) {
    at += key.size();
    const size_t end = text.find_first_not_of("0123456789,", at);
    if (end == text.npos || text[end] != ']') continue;
    made.append(text, begin, at - 1 - begin).append("null");
    begin = end + 1;
    --most;
  }
  return made.append(text, begin, text.npos);
}

// Copies whole events but those that are empty.
std::string without_empty(std::string_view events) {
  std::string made;
  while (!events.empty()) {
    const size_t end = position(events, kEventEnd);
    const size_t size = end == events.npos ? events.size() : end + kEventEnd.size();
    const std::string_view one = events.substr(0, size);
    const bool is_empty = end != events.npos && one.substr(0, kData.size()) == kData &&
                          one.substr(0, end).find('\n') == one.npos &&
                          position(one, kEmpty) != one.npos;
    if (!is_empty) made += one;
    events.remove_prefix(size);
  }
  return made;
}

void replace_all(std::string* text, const std::string& before, const std::string& after) {
  for (size_t at = position(*text, before); at != text->npos; at = position(*text, before, at)) {
    text->replace(at, before.size(), after);
    at += after.size();
  }
}

Fd duplicate(int fd) {
  Fd made(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!made) throw std::runtime_error("a socket cannot be duplicated");
  return made;
}

double monotonic_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

std::string hide_ids(std::string_view events, bool with_prompt, bool drops_empty) {
  std::string made = without_lists(events, kIds, events.size());
  if (with_prompt) made = without_lists(made, kPromptIds, 1);
  return drops_empty && position(made, kEmpty) != made.npos ? without_empty(made) : made;
}

Flow::Flow(Pump& pump, int from, int to, FlowRules rules)
    : pump_(&pump), from_(duplicate(from)), to_(duplicate(to)), rules_(std::move(rules)) {}

std::string Flow::take_kept() {
  if (state_ == FlowState::kKept) state_ = FlowState::kOpen;
  return std::exchange(kept_, {});
}

std::string Flow::end() {
  if (pump_ != nullptr) pump_->forget(*this);
  pump_ = nullptr;
  from_.reset();
  to_.reset();
  if (state_ != FlowState::kFull) state_ = FlowState::kEnded;
  return std::exchange(rest_, {});
}

void Flow::pass() {
  std::string& buffer = pump_->scratch_;
  const ssize_t size = ::recv(from_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) {
    state_ = FlowState::kEnded;
    return;
  }
  last_s_ = monotonic_s();
  std::string_view data(buffer.data(), static_cast<size_t>(size));
  if (!rest_.empty()) data = rest_.append(data);
  events_.clear();
  const size_t taken = take_chunks(data);
  std::string rest(data.substr(taken));  // before `rest_`, which it may be a part of, changes
  rest_ = std::move(rest);
  if (!events_.empty()) deliver();
}

// Returns the size of the chunks at the beginning of the data whose events are now in `events_`.
size_t Flow::take_chunks(std::string_view data) {
  size_t taken = 0;
  while (true) {
    const std::string_view left = data.substr(taken);
    size_t size = 0;
    const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), size, 16);
    const size_t digits = static_cast<size_t>(end - left.data());
    if (left.size() < digits + kLineEnd.size() && digits <= 8) {
      return taken;  // the rest of its size is to come
    }
    const size_t begin = digits + kLineEnd.size();
    if (error != std::errc() || size == 0 || size > kMostChunkBytes ||
        left.substr(digits, kLineEnd.size()) != kLineEnd) {
      state_ = FlowState::kEnded;
      return taken;
    }
    if (left.size() < begin + size + kLineEnd.size()) return taken;
    const std::string_view chunk = left.substr(begin, size);
    if (left.substr(begin + size, kLineEnd.size()) != kLineEnd || !ends_with(chunk, kEventEnd) ||
        pump_->ends_before(chunk)) {
      state_ = FlowState::kEnded;
      return taken;
    }
    events_ += chunk;
    taken += begin + size + kLineEnd.size();
  }
}

void Flow::deliver() {
  if (!rules_.theirs.empty()) replace_all(&events_, rules_.theirs, rules_.ours);
  if (rules_.keeps) kept_ += events_;
  if (rules_.hides_ids) events_ = hide_ids(events_, false, rules_.drops_empty);
  if (kept_.size() > kMostKeptBytes && state_ == FlowState::kOpen) state_ = FlowState::kKept;
  if (events_.empty()) return;
  num_events_ += count(events_, kEventEnd);
  std::array<char, 24> head{};
  const int digits = std::snprintf(head.data(), head.size(), "%zx\r\n", events_.size());
  events_.insert(0, head.data(), static_cast<size_t>(digits)).append(kLineEnd);
  const ssize_t sent =
      ::send(to_.get(), events_.data(), events_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(events_.size())) return;
  unsent_ = events_.substr(static_cast<size_t>(std::max<ssize_t>(sent, 0)));
  if (state_ != FlowState::kEnded) state_ = FlowState::kFull;
}

Pump::Pump(std::vector<std::string> words)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), words_(std::move(words)), scratch_(kReadBytes, '\0') {
  if (!epoll_) throw std::runtime_error("no descriptor is left");
}

Pump::~Pump() {
  for (const auto& [fd, weak] : std::exchange(flows_, {})) {
    if (const FlowPtr flow = weak.lock()) flow->end();
  }
}

FlowPtr Pump::begin(int from, int to, FlowRules rules) {
  auto flow = std::make_shared<Flow>(*this, from, to, std::move(rules));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = flow->from();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, flow->from(), &event) != 0) {
    throw std::runtime_error("a socket cannot be watched");
  }
  flows_[flow->from()] = flow;
  return flow;
}

std::vector<FlowPtr> Pump::turn(size_t most, size_t* num_read) {
  std::vector<FlowPtr> told;
  std::array<epoll_event, 64> events{};
  size_t& done = *num_read;
  for (done = 0; done < most;) {
    const int ready = ::epoll_wait(epoll_.get(), events.data(),
                                   static_cast<int>(std::min(most - done, events.size())), 0);
    if (ready <= 0) break;
    done += static_cast<size_t>(ready);
    for (size_t index = 0; index < static_cast<size_t>(ready); ++index) {
      const auto found = flows_.find(events[index].data.fd);
      const FlowPtr flow = found == flows_.end() ? nullptr : found->second.lock();
      if (flow == nullptr) continue;
      flow->pass();
      if (flow->state() == FlowState::kOpen) continue;
      if (flow->state() != FlowState::kKept) forget(*flow);
      if (std::find(told.begin(), told.end(), flow) == told.end()) told.push_back(flow);
    }
  }
  return told;
}

void Pump::forget(Flow& flow) {
  if (flows_.erase(flow.from()) > 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, flow.from(), nullptr);
  }
  flow.pump_ = nullptr;  // which may end before it
}

bool Pump::ends_before(std::string_view chunk) const {
  return std::any_of(words_.begin(), words_.end(), [chunk](const std::string& word) {
    return position(chunk, word) != chunk.npos;
  });
}

}  // namespace tetri
