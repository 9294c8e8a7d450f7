// The Python face of what policies compute in C++, one-to-one with
// vllm_tetri/policy/_occupancy.pyi. Values in, values out: no call waits, so all keep the GIL.
#include <pybind11/pybind11.h>

#include <vector>

#include "tetri/occupancy.h"

namespace py = pybind11;
using namespace py::literals;
using tetri::Held;
using tetri::Occupancy;

namespace {

int64_t number(PyObject* value) {
  int64_t found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// A list of pairs; pybind11's own casters take longer for this than the answer does.
std::vector<Held> to_batch(const py::list& pairs) {
  std::vector<Held> batch;
  batch.reserve(pairs.size());
  for (py::handle pair : pairs) {
    if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2)
      throw py::type_error("a batch is a list of (tokens, rest) pairs");
    batch.push_back(
        {number(PyTuple_GET_ITEM(pair.ptr(), 0)), number(PyTuple_GET_ITEM(pair.ptr(), 1))});
  }
  return batch;
}

}  // namespace

PYBIND11_MODULE(_occupancy, m) {
  py::class_<Occupancy>(m, "Occupancy")
      .def(py::init([](int64_t block_size, const py::list& batch) {
             return Occupancy(block_size, to_batch(batch));
           }),
           "block_size"_a, "batch"_a)
      .def("__len__", &Occupancy::size)
      .def(
          "add", [](Occupancy& self, int64_t tokens, int64_t rest) { self.add({tokens, rest}); },
          "tokens"_a, "rest"_a)
      .def_property_readonly("held_blocks", &Occupancy::held_blocks)
      .def_property_readonly("growth_blocks", &Occupancy::growth_blocks)
      .def_property_readonly("most_growth_blocks", &Occupancy::most_growth_blocks)
      .def(
          "fits",
          [](const Occupancy& self, int64_t tokens, int64_t rest, int64_t limit_blocks) {
            return self.fits({tokens, rest}, limit_blocks);
          },
          "tokens"_a, "rest"_a, "limit_blocks"_a);
}
