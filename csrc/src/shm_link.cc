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
    jobs_.push_back({grant, std::move(op), 0});
  }

  void cancel(const Transfer& transfer) override {
    const auto ours = [&](const Job& job) {
      if (job.write->transfer.get() != &transfer) return false;
      completed_.push_back(job.write);
      return true;
    };
    jobs_.erase(std::remove_if(jobs_.begin(), jobs_.end(), ours), jobs_.end());
  }

  bool pump() override {
    uint64_t budget = kBytesPerPump;
    while (budget > 0 && !jobs_.empty()) {
      Job& job = jobs_.front();
      const uint64_t before = job.next_block;
      const bool through = copy_out(job, budget);
      const uint64_t copied = (job.next_block - before) * job.write->layout->payload_bytes();
      budget -= std::min(budget, std::max<uint64_t>(copied, 1));
      if (through) jobs_.pop_front();
    }
    return !jobs_.empty();
  }

 private:
  struct Job {
    Grant grant;
    WriteOpPtr write;
    uint64_t next_block;
  };

  // True when the job is through, or has nothing left to do because its slot or transfer is over.
  bool copy_out(Job& job, uint64_t budget) {
    const WriteOp& op = *job.write;
    const bool fits = is_inside(*segment_, job.grant, op.begin(), op.span());
    if (!fits) op.transfer->fail(Status::kInvalid, "the receiver granted a slot outside its arena");
    if (!fits || !op.transfer->begin_copy()) {
      completed_.push_back(job.write);
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
    completed_.push_back(job.write);
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
