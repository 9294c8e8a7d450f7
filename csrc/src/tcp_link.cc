// Blocks go over several connections, gathered by the kernel straight from the pages.
//
// Slot bytes are cut on a fixed grid, and a piece of the grid always takes the same connection, so
// that writing a block twice leaves the second one in the slot.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "tetri/checksum.h"
#include "tetri/link.h"

namespace tetri {

namespace {

constexpr size_t kMaxPieces = 256;
constexpr size_t kJobsPerStream = 8;
constexpr uint64_t kBytesPerTurn = 2 << 20;

// Bytes [begin, end) of a write, counted from the start of its blocks.
struct Job {
  Grant grant;
  WriteOpPtr op;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Stream {
  Fd fd;
  std::deque<Job> jobs;
  std::array<uint8_t, kHeaderSize + kDataPrefixBytes> head{};
  std::array<uint8_t, kDataSumBytes> tail{};
  uint64_t sent = 0;  // of the first job's frame, header included
  Checksum sum;       // of what was sent of it
  bool gave_up = false;
  bool blocked = false;
};

const std::array<uint8_t, 65536> kFiller{};

class TcpLink : public Link {
 public:
  explicit TcpLink(std::vector<Fd> streams) {
    for (Fd& fd : streams) {
      streams_.emplace_back();
      streams_.back().fd = std::move(fd);
    }
  }

  void write(const Grant& grant, WriteOpPtr op) override {
    left_[op.get()] = op->bytes();
    if (op->layout->is_whole()) return queue_.push_back({grant, op, 0, op->bytes()});
    for (uint64_t block = 0; block < op->span(); block += op->layout->block_bytes()) {
      op->layout->ranges([&](uint64_t begin, uint64_t end) {
        queue_.push_back({grant, op, block + begin, block + end});
      });
    }
  }

  void cancel(const Transfer& transfer) override {
    const auto ours = [&](const Job& job) { return job.op->transfer.get() == &transfer; };
    for (const Job& job : queue_) {
      if (ours(job)) complete(job, job.end - job.begin);
    }
    queue_.erase(std::remove_if(queue_.begin(), queue_.end(), ours), queue_.end());
    for (Stream& stream : streams_) {
      // A frame under way is filled up with zeros; its checksum marks them as void.
      const auto first = stream.jobs.begin() + (stream.sent > 0 ? 1 : 0);
      for (auto job = first; job != stream.jobs.end(); ++job) {
        if (ours(*job)) complete(*job, job->end - job->begin);
      }
      stream.jobs.erase(std::remove_if(first, stream.jobs.end(), ours), stream.jobs.end());
    }
  }

  bool pump() override {
    bool more = false;
    deal();
    for (Stream& stream : streams_) {
      if (!stream.jobs.empty() && !stream.blocked) push(stream);
      more = more || (!stream.jobs.empty() && !stream.blocked);
    }
    return more || (!queue_.empty() && has_room());
  }

  void watch(std::vector<pollfd>* fds) const override {
    for (const Stream& stream : streams_) {
      const short events = stream.blocked ? POLLIN | POLLOUT : POLLIN;
      fds->push_back({stream.fd.get(), events, 0});
    }
  }

  void ready(const pollfd& fd) override {
    for (Stream& stream : streams_) {
      if (stream.fd.get() != fd.fd) continue;
      if ((fd.revents & POLLOUT) != 0) stream.blocked = false;
      if ((fd.revents & (POLLIN | POLLHUP | POLLERR)) != 0) end_of(stream);
    }
  }

 private:
  bool has_room() const {
    size_t jobs = 0;
    for (const Stream& stream : streams_) jobs += stream.jobs.size();
    return jobs < kJobsPerStream * streams_.size();
  }

  // Cuts queued writes on the grid and deals the pieces out.
  void deal() {
    while (!queue_.empty() && has_room()) {
      Job& job = queue_.front();
      const uint64_t start = job.op->begin() + job.begin;
      const uint64_t cell = start / kDataChunkBytes;
      const uint64_t end = std::min(job.end, job.begin + (cell + 1) * kDataChunkBytes - start);
      streams_[cell % streams_.size()].jobs.push_back({job.grant, job.op, job.begin, end});
      job.begin = end;
      if (job.begin == job.end) queue_.pop_front();
    }
  }

  void push(Stream& stream) {
    uint64_t moved = 0;
    while (!stream.jobs.empty() && moved < kBytesPerTurn) {
      Job& job = stream.jobs.front();
      const uint64_t frame = stream.head.size() + job.end - job.begin + stream.tail.size();
      if (stream.sent == 0) {
        if (job.op->transfer->stopped()) {
          complete(job, job.end - job.begin);
          stream.jobs.pop_front();
          continue;
        }
        start_frame(stream, job);
      }
      const size_t sent = send_piece(stream, job);
      stream.blocked = sent == 0;
      if (sent == 0) return;
      moved += sent;
      stream.sent += sent;
      if (stream.sent < frame) continue;
      complete(job, job.end - job.begin);
      stream.jobs.pop_front();
      stream.sent = 0;
    }
  }

  static void start_frame(Stream& stream, const Job& job) {
    const uint64_t body = job.end - job.begin;
    const auto length = static_cast<uint32_t>(kDataPrefixBytes + body + kDataSumBytes);
    const uint64_t offset = job.op->begin() + job.begin;
    uint8_t* prefix = stream.head.data() + kHeaderSize;
    write_header(stream.head.data(), Type::kData, length);
    std::memcpy(prefix, &job.grant.generation, 8);
    std::memcpy(prefix + 8, &offset, 8);
    stream.sum = Checksum();
    stream.sum.feed(prefix, kDataPrefixBytes);
    stream.gave_up = false;
  }

  // Sends what the socket takes of the frame under way.
  size_t send_piece(Stream& stream, const Job& job) {
    const uint64_t tail_at = stream.head.size() + job.end - job.begin;
    if (stream.sent >= tail_at) return send_tail(stream, stream.sent - tail_at);
    std::array<iovec, kMaxPieces> pieces;
    size_t count = 0;
    const uint64_t head = stream.head.size() - std::min(stream.sent, stream.head.size());
    if (head > 0) pieces[count++] = {stream.head.data() + stream.sent, head};
    const uint64_t body = stream.sent + head - stream.head.size();  // of the job, already sent
    const bool reads_source = job.op->transfer->begin_copy();
    if (reads_source) {
      job.op->layout->pieces(job.op->ids, job.begin + body, job.end,
                             [&](uint8_t* pointer, uint64_t length) {
                               pieces[count++] = {pointer, length};
                               return count < kMaxPieces;
                             });
    } else {
      const uint64_t left = job.end - job.begin - body;
      pieces[count++] = {const_cast<uint8_t*>(kFiller.data()),
                         std::min<uint64_t>(left, kFiller.size())};
      stream.gave_up = true;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(stream.fd.get(), &message, MSG_NOSIGNAL);
    const int error = errno;
    if (reads_source) {
      const uint64_t bytes = sent > 0 ? static_cast<uint64_t>(sent) : 0;
      const uint64_t read = bytes - std::min(bytes, head);
      // Now, not before: the kernel has just read them, so they are near, and still there.
      for (size_t index = head > 0 ? 1 : 0, left = read; left > 0; ++index) {
        const size_t length = std::min(left, pieces[index].iov_len);
        stream.sum.feed(static_cast<const uint8_t*>(pieces[index].iov_base), length);
        left -= length;
      }
      job.op->transfer->end_copy(read);
    }
    return moved_or_throw(sent, error);
  }

  static size_t send_tail(Stream& stream, uint64_t begin) {
    if (begin == 0) {
      const uint64_t sum = stream.gave_up ? kGaveUp : sum_of_frame(stream.sum);
      std::memcpy(stream.tail.data(), &sum, sizeof(sum));
    }
    return send_some(stream.fd.get(), stream.tail.data() + begin, stream.tail.size() - begin);
  }

  void complete(const Job& job, uint64_t bytes) {
    uint64_t& left = left_[job.op.get()];
    left -= bytes;
    if (left > 0) return;
    left_.erase(job.op.get());
    completed_.push_back(job.op);
  }

  static void end_of(Stream& stream) {
    uint8_t byte = 0;
    if (receive_some(stream.fd.get(), &byte, 1) > 0) {  // throws when the peer is gone
      throw LinkError(Status::kInvalid, "the receiver refused data");
    }
  }

  std::vector<Stream> streams_;
  std::deque<Job> queue_;
  std::unordered_map<const WriteOp*, uint64_t> left_;  // bytes not yet sent
};

}  // namespace

std::unique_ptr<Link> make_tcp_link(std::vector<Fd> streams) {
  return std::make_unique<TcpLink>(std::move(streams));
}

}  // namespace tetri
