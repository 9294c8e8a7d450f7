// The Python face of the core, one-to-one with vllm_tetri/transport/_core.pyi.
//
// Everything that waits or copies releases the GIL; threads of the core never take it.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "tetri/arena.h"
#include "tetri/receiver.h"
#include "tetri/sender.h"

namespace py = pybind11;
using namespace py::literals;
using tetri::Status;

namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Words = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

// The GIL, given back for as long as this lives. Taking it again ends a daemon thread when the
// interpreter shuts down, by unwinding it; py::gil_scoped_release would abort the process there.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  ~NoGil() noexcept(false) { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

using Unlocked = py::call_guard<NoGil>;

template <typename Array>
auto to_vector(const Array& array) {
  if (array.ndim() != 1) throw std::invalid_argument("expected an array with one dimension");
  return std::vector<typename Array::value_type>(array.data(), array.data() + array.size());
}

template <typename Number>
py::array_t<Number> words(const std::vector<Number>& values) {
  return py::array_t<Number>(static_cast<py::ssize_t>(values.size()), values.data());
}

struct PyLayout {
  PyLayout(const Words& bases, const Words& strides, const Words& pages, uint64_t num_blocks,
           py::object owner, const std::optional<Words>& starts, uint64_t wire_bytes,
           bool is_device)
      : core(std::make_shared<const tetri::Layout>(
            to_vector(bases), to_vector(strides), to_vector(pages), num_blocks,
            starts ? to_vector(*starts) : std::vector<uint64_t>(), wire_bytes, is_device)),
        owner(std::move(owner)) {}
  PyLayout(tetri::LayoutPtr core, py::object owner)
      : core(std::move(core)), owner(std::move(owner)) {}
  PyLayout part(size_t first_page, size_t num_pages) const {
    return {std::make_shared<const tetri::Layout>(core->part(first_page, num_pages)), owner};
  }
  void copy_rows(const Ids& ids, Bytes memory, const Ids& rows, bool to_blocks) const {
    const auto blocks = to_vector(ids);
    const auto places = to_vector(rows);
    uint8_t* bytes = memory.mutable_data();
    const auto size = static_cast<uint64_t>(memory.size());
    const NoGil unlocked;
    core->copy_rows(blocks, bytes, size, places, to_blocks);
  }
  tetri::LayoutPtr core;
  py::object owner;
};

// Layouts that transfers in flight read from, kept alive until those have quiesced. Used with the
// GIL held, so it needs no lock.
class Sources {
 public:
  void keep(const tetri::TransferPtr& transfer, py::object layout) {
    for (const auto& [kept, source] : kept_) {
      if (kept == transfer && source.is(layout)) return;
    }
    kept_.emplace_back(transfer, std::move(layout));
  }
  // The caller's own object, or one like it when the transfer is over.
  py::object find(const tetri::Transfer* transfer, const tetri::LayoutPtr& layout) const {
    for (const auto& [kept, source] : kept_) {
      if (kept.get() == transfer && source.cast<const PyLayout&>().core == layout) return source;
    }
    return py::cast(PyLayout(layout, py::none()));
  }
  void prune() {
    std::vector<std::pair<tetri::TransferPtr, py::object>> busy;
    for (auto& entry : kept_) {
      if (!entry.first->quiesced()) busy.push_back(std::move(entry));
    }
    kept_.swap(busy);
  }

 private:
  std::vector<std::pair<tetri::TransferPtr, py::object>> kept_;
};

struct PyTransfer {
  tetri::TransferPtr core;
  std::shared_ptr<Sources> sources;

  Status write(py::object layout, uint64_t first_block, const Ids& ids, uint64_t tag) {
    const tetri::LayoutPtr source = layout.cast<const PyLayout&>().core;
    std::vector<int32_t> copied = to_vector(ids);
    sources->keep(core, std::move(layout));
    const NoGil unlocked;
    return core->write(source, first_block, std::move(copied), tag);
  }
};

struct PyOrder {
  tetri::OrderPtr core;
  std::shared_ptr<Sources> sources;

  void staged(py::object layout) {
    const tetri::LayoutPtr source = layout.cast<const PyLayout&>().core;
    core->staged(source);
    sources->keep(core->op().transfer, std::move(layout));
  }
};

std::optional<tetri::Emulated> to_emulated(const std::optional<std::pair<double, double>>& link) {
  if (!link) return std::nullopt;
  return tetri::Emulated{link->first, tetri::from_seconds(link->second)};
}

struct PySender {
  tetri::Sender core;
  std::shared_ptr<Sources> sources = std::make_shared<Sources>();

  explicit PySender(tetri::SenderOptions options) : core(std::move(options)) {}
  ~PySender() { close(); }
  PyTransfer open(const std::string& endpoint, const std::string& transfer, uint64_t num_blocks,
                  uint64_t block_bytes) {
    sources->prune();
    const NoGil unlocked;
    return {core.open(endpoint, transfer, num_blocks, block_bytes), sources};
  }
  std::optional<PyOrder> take_order(double timeout_s) {
    tetri::OrderPtr order;
    {
      const NoGil unlocked;
      order = core.take_order(tetri::from_seconds(timeout_s));
    }
    if (!order) return std::nullopt;
    return PyOrder{std::move(order), sources};
  }
  void close() {
    {
      const NoGil unlocked;
      core.close();
    }
    sources->prune();
  }
};

void bind_enums(py::module_& module) {
  py::native_enum<Status>(module, "Status", "enum.Enum")
      .value("OK", Status::kOk)
      .value("PENDING", Status::kPending)
      .value("FULL", Status::kFull)
      .value("REFUSED", Status::kRefused)
      .value("TIMEOUT", Status::kTimeout)
      .value("PEER_LOST", Status::kPeerLost)
      .value("CANCELLED", Status::kCancelled)
      .value("STALE", Status::kStale)
      .value("INVALID", Status::kInvalid)
      .value("CLOSED", Status::kClosed)
      .finalize();
  py::native_enum<tetri::SlotState>(module, "SlotState", "enum.Enum")
      .value("FILLING", tetri::SlotState::kFilling)
      .value("ARRIVED", tetri::SlotState::kArrived)
      .value("TAKEN", tetri::SlotState::kTaken)
      .value("FAILED", tetri::SlotState::kFailed)
      .finalize();
  py::native_enum<tetri::TransferState>(module, "TransferState", "enum.Enum")
      .value("OPENING", tetri::TransferState::kOpening)
      .value("SENDING", tetri::TransferState::kSending)
      .value("DONE", tetri::TransferState::kDone)
      .value("FAILED", tetri::TransferState::kFailed)
      .value("CANCELLED", tetri::TransferState::kCancelled)
      .finalize();
}

void bind_layout(py::module_& module) {
  py::class_<PyLayout>(module, "Layout")
      .def(py::init<const Words&, const Words&, const Words&, uint64_t, py::object,
                    const std::optional<Words>&, uint64_t, bool>(),
           "bases"_a, "block_strides"_a, "page_bytes"_a, "num_blocks"_a, "owner"_a,
           "starts"_a = py::none(), "wire_bytes"_a = 0, "is_device"_a = false)
      .def("part", &PyLayout::part, "first_page"_a, "num_pages"_a)
      .def("copy_rows", &PyLayout::copy_rows, "block_ids"_a, "memory"_a.noconvert(), "rows"_a,
           "to_blocks"_a)
      .def_property_readonly("num_blocks", [](const PyLayout& it) { return it.core->num_blocks(); })
      .def_property_readonly("block_bytes",
                             [](const PyLayout& it) { return it.core->block_bytes(); })
      .def_property_readonly("is_device", [](const PyLayout& it) { return it.core->is_device(); })
      .def_property_readonly("bases", [](const PyLayout& it) { return words(it.core->bases()); })
      .def_property_readonly("block_strides",
                             [](const PyLayout& it) { return words(it.core->strides()); })
      .def_property_readonly("page_bytes",
                             [](const PyLayout& it) { return words(it.core->page_bytes()); })
      .def_property_readonly("starts", [](const PyLayout& it) { return words(it.core->starts()); });
  py::class_<tetri::Arena>(module, "Arena")
      .def(py::init<const std::string&>(), "segment"_a, Unlocked())
      .def(
          "load",
          [](tetri::Arena& arena, uint64_t offset, uint64_t first_block, const PyLayout& layout,
             const Ids& ids) {
            const auto blocks = to_vector(ids);
            const NoGil unlocked;
            arena.load(offset, first_block, *layout.core, blocks);
          },
          "slot_offset"_a, "first_block"_a, "layout"_a, "block_ids"_a)
      .def_property_readonly("address", &tetri::Arena::address)
      .def_property_readonly("num_bytes", &tetri::Arena::num_bytes)
      .def("hold", &tetri::Arena::hold, "control"_a, "generation"_a)
      .def("let_go", &tetri::Arena::let_go, "control"_a)
      .def("close", &tetri::Arena::close, Unlocked());
}

void bind_receiver(py::module_& module) {
  using tetri::Receiver;
  using tetri::ReceiverStats;
  using tetri::Slot;
  py::class_<Slot>(module, "Slot")
      .def_readonly("transfer", &Slot::transfer)
      .def_readonly("state", &Slot::state)
      .def_readonly("offset", &Slot::offset)
      .def_readonly("num_blocks", &Slot::num_blocks)
      .def_readonly("rank_bytes", &Slot::rank_bytes)
      .def_readonly("num_ranks", &Slot::num_ranks)
      .def_readonly("generation", &Slot::generation)
      .def_readonly("error", &Slot::error);
  py::class_<ReceiverStats>(module, "ReceiverStats")
      .def_readonly("arena_total_bytes", &ReceiverStats::arena_total_bytes)
      .def_readonly("arena_used_bytes", &ReceiverStats::arena_used_bytes)
      .def_readonly("quarantined_bytes", &ReceiverStats::quarantined_bytes)
      .def_readonly("slots", &ReceiverStats::slots)
      .def_readonly("filling", &ReceiverStats::filling)
      .def_readonly("unclaimed", &ReceiverStats::unclaimed)
      .def_readonly("quarantined", &ReceiverStats::quarantined)
      .def_readonly("connections", &ReceiverStats::connections)
      .def_readonly("arrived", &ReceiverStats::arrived)
      .def_readonly("expired", &ReceiverStats::expired)
      .def_readonly("refused_full", &ReceiverStats::refused_full)
      .def_readonly("refused_identity", &ReceiverStats::refused_identity)
      .def_readonly("refused_unauthenticated", &ReceiverStats::refused_unauthenticated)
      .def_readonly("bad_frames", &ReceiverStats::bad_frames)
      .def_readonly("bytes_received", &ReceiverStats::bytes_received);
  py::class_<Receiver>(module, "Receiver")
      .def(
          py::init([](uint64_t arena_bytes, const std::string& host, int port,
                      const tetri::Identity& identity, double fill_timeout_s, double hold_timeout_s,
                      uint32_t max_connections, const py::bytes& key, bool has_host_memory) {
            const std::string copied = key;
            const NoGil unlocked;
            return std::make_unique<Receiver>(tetri::ReceiverOptions{
                arena_bytes, host, port, identity, tetri::from_seconds(fill_timeout_s),
                tetri::from_seconds(hold_timeout_s), max_connections, copied, has_host_memory});
          }),
          py::kw_only(), "arena_bytes"_a, "host"_a = "127.0.0.1", "port"_a = 0, "identity"_a,
          "fill_timeout_s"_a = 30.0, "hold_timeout_s"_a = 60.0, "max_connections"_a = 4096,
          "key"_a = py::bytes(), "has_host_memory"_a = true)
      .def_property_readonly("endpoint", &Receiver::endpoint)
      .def_property_readonly("segment", &Receiver::segment)
      .def(
          "offer",
          [](Receiver& it, const std::string& kind, const py::bytes& blob) {
            it.offer(kind, blob);
          },
          "kind"_a, "blob"_a)
      .def("find", &Receiver::find, "transfer"_a, Unlocked())
      .def(
          "wait", [](Receiver& it, double s) { return it.wait(tetri::from_seconds(s)); },
          "timeout_s"_a, Unlocked())
      .def("take", &Receiver::take, "transfer"_a, Unlocked())
      .def("release", &Receiver::release, "transfer"_a, Unlocked())
      .def("cancel", &Receiver::cancel, "transfer"_a, Unlocked())
      .def("abandon", &Receiver::abandon, "prefix"_a, "kept"_a, "reason"_a, Unlocked())
      .def("receive",
           // With the GIL: an engine asks in every step, where giving it back would cost 30 us.
           [](Receiver& it) -> std::optional<py::bytes> { return it.receive(); })
      .def("stats", &Receiver::stats, Unlocked())
      .def("close", &Receiver::close, Unlocked());
}

void bind_sender(py::module_& module) {
  py::class_<PyTransfer>(module, "Transfer")
      .def_property_readonly("name", [](const PyTransfer& it) { return it.core->name(); })
      .def_property_readonly("state", [](const PyTransfer& it) { return it.core->state(); })
      .def_property_readonly("status", [](const PyTransfer& it) { return it.core->status(); })
      .def_property_readonly("error", [](const PyTransfer& it) { return it.core->error(); })
      .def_property_readonly("link", [](const PyTransfer& it) { return it.core->link(); })
      .def_property_readonly("bytes_sent",
                             [](const PyTransfer& it) { return it.core->bytes_sent(); })
      .def_property_readonly("quiesced", [](const PyTransfer& it) { return it.core->quiesced(); })
      .def("write", &PyTransfer::write, "layout"_a, "first_block"_a, "block_ids"_a, "tag"_a = 0)
      .def(
          "finish", [](PyTransfer& it) { it.core->finish(); }, Unlocked())
      .def("cancel", [](PyTransfer& it) { it.core->cancel(); }, Unlocked());
  py::class_<PyOrder>(module, "Order")
      .def_property_readonly("transfer",
                             [](const PyOrder& it) { return it.core->op().transfer->name(); })
      .def_property_readonly("endpoint", [](const PyOrder& it) { return it.core->endpoint(); })
      .def_property_readonly("kind", [](const PyOrder& it) { return it.core->kind(); })
      .def_property_readonly("offer", [](const PyOrder& it) { return py::bytes(it.core->offer()); })
      .def_property_readonly("offset", [](const PyOrder& it) { return it.core->offset(); })
      .def_property_readonly("layout",
                             [](const PyOrder& it) {
                               const tetri::WriteOp& op = it.core->op();
                               return it.sources->find(op.transfer.get(), op.layout);
                             })
      .def_property_readonly("block_ids",
                             [](const PyOrder& it) { return words(it.core->op().ids); })
      .def_property_readonly("generation", [](const PyOrder& it) { return it.core->generation(); })
      .def_property_readonly("control", [](const PyOrder& it) { return it.core->control(); })
      .def_property_readonly("tag", [](const PyOrder& it) { return it.core->op().tag; })
      .def_property_readonly("num_bytes", [](const PyOrder& it) { return it.core->op().bytes(); })
      .def("begin", [](PyOrder& it) { return it.core->begin(); })
      .def("live", [](const PyOrder& it) { return it.core->live(); })
      .def("placed", [](PyOrder& it) { it.core->placed(); })
      .def(
          "failed", [](PyOrder& it, const std::string& text) { it.core->failed(text); }, "text"_a)
      .def("staged", &PyOrder::staged, "layout"_a)
      .def("is_done", [](const PyOrder& it) { return it.core->is_done(); });
  py::class_<PySender>(module, "Sender")
      .def(py::init([](const tetri::Identity& identity, uint32_t rank, uint32_t num_ranks,
                       const std::vector<std::string>& links, uint32_t streams,
                       double open_timeout_s, double io_timeout_s, uint64_t max_queued_blocks,
                       const py::bytes& key,
                       const std::optional<std::pair<double, double>>& emulate) {
             return std::make_unique<PySender>(tetri::SenderOptions{
                 identity, rank, num_ranks, links, streams, tetri::from_seconds(open_timeout_s),
                 tetri::from_seconds(io_timeout_s), max_queued_blocks, to_emulated(emulate), key});
           }),
           py::kw_only(), "identity"_a, "rank"_a = 0, "num_ranks"_a = 1,
           "links"_a = std::vector<std::string>{"shm", "tcp"}, "streams"_a = 2,
           "open_timeout_s"_a = 5.0, "io_timeout_s"_a = 30.0,
           "max_queued_blocks"_a = uint64_t{1} << 20, "key"_a = py::bytes(),
           "emulate"_a = py::none())
      .def("open", &PySender::open, "endpoint"_a, "transfer"_a, "num_blocks"_a, "block_bytes"_a)
      .def(
          "send",
          [](PySender& it, const std::string& endpoint, const py::bytes& message,
             double timeout_s) {
            std::string copied = message;
            const NoGil unlocked;
            return it.core.send(endpoint, std::move(copied), tetri::from_seconds(timeout_s));
          },
          "endpoint"_a, "message"_a, "timeout_s"_a)
      .def(
          "wait", [](PySender& it, double s) { return it.core.wait(tetri::from_seconds(s)); },
          "timeout_s"_a, Unlocked())
      .def("take_order", &PySender::take_order, "timeout_s"_a)
      .def(
          "exclude",
          [](PySender& it, const std::string& endpoint, const std::string& kind) {
            it.core.exclude(endpoint, kind);
          },
          "endpoint"_a, "kind"_a, Unlocked())
      .def("close", &PySender::close);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "KV transport: receive arena, sender, links.";
  bind_enums(module);
  bind_layout(module);
  bind_receiver(module);
  bind_sender(module);
}
