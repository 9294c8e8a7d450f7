// The Python face of the router's core, one-to-one with vllm_tetri/router/_core.pyi. Nothing in it
// waits, so it keeps the GIL.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "tetri/pump.h"

namespace py = pybind11;
using namespace py::literals;

PYBIND11_MODULE(_core, module) {
  module.doc() = "Events on their way from instances to clients.";
  using tetri::Flow;
  using tetri::FlowRules;
  using tetri::FlowState;
  using tetri::Pump;
  py::native_enum<FlowState>(module, "FlowState", "enum.Enum")
      .value("OPEN", FlowState::kOpen)
      .value("FULL", FlowState::kFull)
      .value("KEPT", FlowState::kKept)
      .value("ENDED", FlowState::kEnded)
      .finalize();
  py::class_<Flow, tetri::FlowPtr>(module, "Flow")
      .def_property_readonly("state", &Flow::state)
      .def_property_readonly("num_events", &Flow::num_events)
      .def_property_readonly("last_s", &Flow::last_s)
      .def("take_kept", [](Flow& it) { return py::bytes(it.take_kept()); })
      .def("take_unsent", [](Flow& it) { return py::bytes(it.take_unsent()); })
      .def("end", [](Flow& it) { return py::bytes(it.end()); });
  py::class_<Pump>(module, "Pump")
      .def(py::init([](const std::vector<py::bytes>& words) {
             return std::make_unique<Pump>(std::vector<std::string>(words.begin(), words.end()));
           }),
           "words"_a)
      .def("fileno", &Pump::fd)
      .def(
          "begin",
          [](Pump& it, int from, int to, bool keeps, bool hides_ids, bool drops_empty,
             const py::bytes& theirs, const py::bytes& ours) {
            return it.begin(from, to, FlowRules{keeps, hides_ids, drops_empty, theirs, ours});
          },
          "source"_a, "target"_a, py::kw_only(), "keeps"_a, "hides_ids"_a, "drops_empty"_a,
          "theirs"_a, "ours"_a)
      .def(
          "turn",
          [](Pump& it, size_t most) {
            size_t num_read = 0;
            auto told = it.turn(most, &num_read);
            return std::make_pair(num_read, std::move(told));
          },
          "most"_a);
  module.def(
      "hide_ids",
      [](const py::bytes& events, bool with_prompt, bool drops_empty) {
        return py::bytes(tetri::hide_ids(events, with_prompt, drops_empty));
      },
      "events"_a, py::kw_only(), "with_prompt"_a, "drops_empty"_a);
}
