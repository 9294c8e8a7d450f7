#include "tetri/segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>

#include "tetri/status.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace tetri {

namespace {

constexpr char kDirectory[] = "/dev/shm/";
constexpr char kPrefix[] = "tetri-";
constexpr size_t kNameDigits = 32;
constexpr uint64_t kMagic = 0x32304d4849525454;  // "TTRIHM02"
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
constexpr auto kCollapseTime = std::chrono::seconds(2);
constexpr uint64_t kTouchedAtOnce = 256 << 20;  // the rest follows in the background
constexpr int kMostInterruptions = 20;
constexpr uint64_t kTouchedTogether = 16 << 20;

struct Header {
  uint64_t magic;
  uint64_t arena_bytes;
  Nonce nonce;
  uint64_t owner_pid;
};

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

std::string hex64(uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (int index = 15; index >= 0; --index, value >>= 4) text[index] = kDigits[value & 15];
  return text;
}

bool is_segment_name(const std::string& name) {
  const size_t prefix = sizeof(kPrefix) - 1;
  return name.size() == prefix + kNameDigits && name.compare(0, prefix, kPrefix) == 0 &&
         name.find_first_not_of("0123456789abcdef", prefix) == std::string::npos;
}

// Files of segments that this process has not closed yet. They go when it ends in good order; those
// of killed processes are for `abandoned_segments`. A forked child must leave its parent's alone.
class OwnedFiles {
 public:
  ~OwnedFiles() {
    if (pid_ != ::getpid()) return;
    for (const std::string& path : paths_) ::unlink(path.c_str());
  }
  void add(const std::string& path) {
    const std::lock_guard lock(mutex_);
    paths_.insert(path);
  }
  void remove(const std::string& path) {
    if (pid_ != ::getpid()) return;
    const std::lock_guard lock(mutex_);
    if (paths_.erase(path) > 0) ::unlink(path.c_str());
  }

 private:
  const pid_t pid_ = ::getpid();
  std::mutex mutex_;
  std::set<std::string> paths_;
};

OwnedFiles& owned_files() {
  static OwnedFiles files;
  return files;
}

// A new, locked, empty file. A sweeper may get at the file between its creation and our lock; then
// it is gone or locked, and another name is tried.
Fd create_file(std::string* path) {
  for (int attempt = 0; attempt < 8; ++attempt) {
    *path = std::string(kDirectory) + kPrefix + hex64(random_u64()) + hex64(random_u64());
    Fd fd(::open(path->c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd) {
      if (errno == EEXIST) continue;
      fail("cannot create the receive arena " + *path, errno);
    }
    struct stat info{};
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && ::fstat(fd.get(), &info) == 0 &&
        info.st_nlink > 0) {
      owned_files().add(*path);
      return fd;
    }
    ::unlink(path->c_str());
  }
  throw std::runtime_error("cannot create a receive arena in /dev/shm: no name stayed ours");
}

// Faults now rather than under a transfer. Adding zero leaves other writers' bytes alone.
void touch(uint8_t* data, uint64_t size) {
  if (::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
  for (uint64_t offset = 0; offset < size; offset += kPage) {
    __atomic_fetch_add(data + offset, 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

// A thread that touches pages until all are there, or it is destroyed.
struct Segment::Toucher {
  Toucher(uint8_t* data, uint64_t size) : thread([this, data, size] { run(data, size); }) {}
  ~Toucher() {
    stop = true;
    thread.join();
  }
  void run(uint8_t* data, uint64_t size) const {
    [[maybe_unused]] const int niceness = ::nice(19);  // this thread's alone
    for (uint64_t at = 0; at < size && !stop; at += kTouchedTogether) {
      touch(data + at, std::min(kTouchedTogether, size - at));
    }
  }

  std::atomic<bool> stop{false};
  std::thread thread;
};

// The owner stores `live` before it looks at `holders`: one of both sees the other.
bool ControlWord::hold(uint64_t generation) {
  holders.fetch_add(1, std::memory_order_seq_cst);
  if (generation != 0 && is_of(generation)) return true;
  let_go();
  return false;
}

uint64_t random_u64() {
  uint64_t value = 0;
  while (::getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value))) {
    if (errno != EINTR) fail("getrandom", errno);
  }
  return value;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

Segment::Segment(std::string path, Fd fd, uint64_t size, bool owner)
    : path_(std::move(path)), fd_(std::move(fd)), size_(size), owner_(owner) {}

Segment::Segment(Segment&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      owner_(std::exchange(other.owner_, false)),
      toucher_(std::move(other.toucher_)) {}

Segment::~Segment() { close(); }

Segment Segment::create(uint64_t arena_bytes, bool is_shared) {
  if (arena_bytes > (uint64_t{1} << 46)) {
    throw std::invalid_argument("arena_bytes must be at most 2^46, not " +
                                std::to_string(arena_bytes));
  }
  const uint64_t size = kHeaderBytes + (arena_bytes + kPage - 1) / kPage * kPage;
  std::string path;
  Fd fd = is_shared ? create_file(&path) : Fd(::memfd_create("tetri", MFD_CLOEXEC));
  if (!fd) fail("cannot create a segment of its own", errno);
  Segment segment(path, std::move(fd), size, true);
  if (::ftruncate(segment.fd_.get(), static_cast<off_t>(size)) != 0) {
    fail("cannot size the receive arena", errno);
  }
  segment.map();
  segment.use_huge_pages();
  // Any signal undoes it, as when the process is stopped and goes on.
  int error = EINTR;
  for (int left = kMostInterruptions; left > 0 && error == EINTR; --left) {
    error = ::posix_fallocate(segment.fd_.get(), 0, static_cast<off_t>(size));
  }
  if (error != 0) {
    fail("no room in /dev/shm for a receive arena of " + std::to_string(arena_bytes) +
             " bytes; lower arena_bytes or enlarge /dev/shm",
         error);
  }
  segment.begin_touching(kTouchedAtOnce);
  auto* header = new (segment.data_) Header{};
  header->magic = kMagic;
  header->arena_bytes = size - kHeaderBytes;
  header->owner_pid = static_cast<uint64_t>(::getpid());
  const uint64_t halves[2] = {random_u64(), random_u64()};
  std::memcpy(header->nonce.data(), halves, sizeof(halves));
  for (uint32_t index = 0; index < kMaxSlots; ++index)
    new (segment.control() + index) ControlWord{};
  return segment;
}

Segment Segment::attach(const std::string& path) {
  const size_t directory = sizeof(kDirectory) - 1;
  if (path.compare(0, directory, kDirectory) != 0 || !is_segment_name(path.substr(directory))) {
    throw std::runtime_error("not the path of a receive arena: " + path);
  }
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) fail("cannot open the receive arena " + path, errno);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) fail("cannot inspect the receive arena " + path, errno);
  const auto size = static_cast<uint64_t>(info.st_size);
  if (!S_ISREG(info.st_mode) || size < kHeaderBytes || size % kPage != 0) {
    throw std::runtime_error("not a receive arena: " + path);
  }
  // A process that shortens the file ends this one by SIGBUS; only processes of this user can.
  if (info.st_uid != ::geteuid() || (info.st_mode & 0077) != 0) {
    throw std::runtime_error("the receive arena " + path + " is not this user's alone");
  }
  Segment segment(path, std::move(fd), size, false);
  segment.map();
  segment.begin_touching(0);
  const auto* header = reinterpret_cast<const Header*>(segment.data_);
  if (header->magic != kMagic || header->arena_bytes != segment.arena_bytes()) {
    throw std::runtime_error("not a receive arena of this version: " + path);
  }
  return segment;
}

// Maps at a multiple of a huge page, without which the kernel maps small ones.
void Segment::map() {
  void* room = ::mmap(nullptr, size_ + kHugePage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail("cannot map the receive arena " + path_, errno);
  const uint64_t skip = kHugePage - 1 - (reinterpret_cast<uintptr_t>(room) - 1) % kHugePage;
  auto* aligned = static_cast<uint8_t*>(room) + skip;
  if (skip > 0) ::munmap(room, skip);
  if (skip < kHugePage) ::munmap(aligned + size_, kHugePage - skip);
  data_ = aligned;  // from here on `close` unmaps it
  if (::mmap(data_, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(), 0) ==
      MAP_FAILED) {
    fail("cannot map the receive arena " + path_, errno);
  }
}

// Best effort: copies into small pages lose up to a fifth to TLB misses. The kernel wants one page
// to be there already, and takes some milliseconds for each of them; hence the limit.
void Segment::use_huge_pages() const {
  const TimePoint deadline = Clock::now() + kCollapseTime;
  for (uint64_t offset = 0; offset + kHugePage <= size_; offset += kHugePage) {
    if (::madvise(data_ + offset, kPage, MADV_POPULATE_WRITE) != 0 ||
        ::madvise(data_ + offset, kHugePage, MADV_COLLAPSE) != 0 || Clock::now() >= deadline) {
      return;
    }
  }
}

// Touching may take seconds a gigabyte, for which neither a start nor a dial shall wait.
void Segment::begin_touching(uint64_t at_once) {
  touch(data_, std::min(size_, at_once));
  if (size_ > at_once) toucher_ = std::make_unique<Toucher>(data_ + at_once, size_ - at_once);
}

Nonce Segment::nonce() const { return reinterpret_cast<const Header*>(data_)->nonce; }

void Segment::close() noexcept {
  toucher_.reset();
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
  if (owner_) owned_files().remove(path_);
  owner_ = false;
  fd_.reset();
}

}  // namespace tetri
