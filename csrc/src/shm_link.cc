// Blocks go straight into the receiver's segment: one memcpy for each page, no system call.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>

#include "tetri/link.h"

namespace tetri {

namespace {

constexpr uint64_t kBytesPerPump = 4 << 20;  // then the control channel gets a look

class ShmLink : public Link {
 public:
  explicit ShmLink(std::shared_ptr<const Segment> segment) : segment_(std::move(segment)) {}

  void write(const Grant& grant, WriteOpPtr op) override {
    jobs_.push_back({grant, std::move(op), nullptr, 0});
  }

  void read(const Grant& grant, ReadOpPtr op, uint64_t) override {
    jobs_.push_back({grant, nullptr, std::move(op), 0});
  }

  void cancel(const Transfer& transfer) override {
    const auto ours = [&](const Job& job) {
      const TransferPtr& owner = job.write ? job.write->transfer : job.read->transfer;
      if (owner.get() != &transfer) return false;
      finish(job, Status::kCancelled);
      return true;
    };
    jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), ours), jobs_.end());
  }

  bool pump() override {
    uint64_t budget = kBytesPerPump;
    while (budget > 0 && !jobs_.empty()) {
      Job& job = jobs_.front();
      const uint64_t before = job.next_block;
      const bool through = job.write ? copy_out(job, budget) : copy_back(job);
      const uint64_t block_bytes =
          (job.write ? job.write->layout : job.read->layout)->payload_bytes();
      const uint64_t copied = (job.next_block - before) * block_bytes;
      budget -= std::min(budget, std::max<uint64_t>(copied, 1));
      if (through) jobs_.pop_front();
    }
    return !jobs_.empty();
  }

 private:
  struct Job {
    Grant grant;
    WriteOpPtr write;
    ReadOpPtr read;
    uint64_t next_block;
  };

  void finish(const Job& job, Status status) {
    if (job.write) completed_.push_back(job.write);
    if (job.read) job.read->settle(status);
  }

  // True when the job is through, or has nothing left to do because its slot or transfer is over.
  bool copy_out(Job& job, uint64_t budget) {
    const WriteOp& op = *job.write;
    const bool fits = is_inside(*segment_, job.grant, op.begin(), op.span());
    if (!fits) op.transfer->fail(Status::kInvalid, "the receiver granted a slot outside its arena");
    if (!fits || !op.transfer->begin_copy()) {
      finish(job, Status::kOk);
      return true;
    }
    ControlWord& word = segment_->control()[job.grant.control];
    const uint64_t block_bytes = op.layout->block_bytes();
    uint8_t* target = segment_->data() + job.grant.offset + op.begin();
    uint64_t copied = 0;
    bool ended = false;
    while (job.next_block < op.ids.size() && copied < budget) {
      ended = op.transfer->stopped() || !word.is_of(job.grant.generation);
      if (ended) break;
      op.layout->gather_block(static_cast<uint64_t>(op.ids[job.next_block]),
                              target + job.next_block * block_bytes);
      word.progress.fetch_add(1, std::memory_order_release);
      copied += op.layout->payload_bytes();
      ++job.next_block;
    }
    op.transfer->end_copy(copied);
    if (!ended && job.next_block < op.ids.size()) return false;
    finish(job, Status::kOk);
    return true;
  }

  bool copy_back(Job& job) {
    ReadOp& op = *job.read;
    Status result = Status::kStale;
    const Grant& grant = job.grant;
    const auto is_live = [&] { return segment_->control()[grant.control].is_of(grant.generation); };
    if (is_inside(*segment_, grant, op.begin(), op.bytes()) && is_live()) {
      const std::lock_guard lock(op.mutex);
      if (!op.abandoned) {
        op.layout->scatter_range(op.ids, 0, segment_->data() + grant.offset + op.begin(),
                                 op.bytes());
      }
      if (is_live()) result = Status::kOk;
    }
    job.next_block = op.ids.size();
    finish(job, result);
    return true;
  }

  const std::shared_ptr<const Segment> segment_;
  std::deque<Job> jobs_;
};

}  // namespace

bool is_inside(const Segment& segment, const Grant& grant, uint64_t begin, uint64_t bytes) {
  return grant.control < kMaxSlots && grant.offset >= kHeaderBytes &&
         grant.offset <= segment.size() && begin <= segment.size() - grant.offset &&
         bytes <= segment.size() - grant.offset - begin;
}

std::unique_ptr<Link> make_shm_link(std::shared_ptr<const Segment> segment) {
  return std::make_unique<ShmLink>(std::move(segment));
}

}  // namespace tetri
