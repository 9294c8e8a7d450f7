"""Hidden states that a worker reads: of the right rows, once, and without waiting."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_tetri.engine import states
from vllm_tetri.engine.states import StateReader, watch_runners

HIDDEN = torch.arange(12.0).reshape(6, 2)


def test_the_last_state_of_every_wanted_request_is_read_once() -> None:
    reader = StateReader()
    reader.begin_step({"b", "c", "gone"})
    reader.read(HIDDEN.to(torch.bfloat16), ["a", "b", "c"], [1, 4, 6])
    reader.read(torch.zeros(3, 2), ["a", "b", "c"], [1, 2, 3])  # of a step without orders
    found = reader.take()
    assert {name: state.tolist() for name, state in found.items()} == {"b": [6, 7], "c": [10, 11]}
    assert reader.take() == {}


@pytest.mark.parametrize("hidden", [None, SimpleNamespace(tensors={})], ids=["none", "other rank"])
def test_what_is_no_state_is_left_out(hidden: Any) -> None:
    reader = StateReader()
    reader.begin_step({"a"})
    reader.read(hidden, ["a"], [1])
    assert reader.take() == {}


def test_states_that_cannot_be_read_end_the_reading_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = StateReader()
    for _ in range(2):
        reader.begin_step({"a"})
        reader.read(HIDDEN, ["a"], [99])
    assert caplog.text.count("cannot be read here") == 1
    reader.begin_step({"a"})
    reader.read(HIDDEN, ["a"], [1])
    assert reader.take() == {}


def test_copies_under_way_are_reported_when_they_are_complete() -> None:
    reader, event = StateReader(), SimpleNamespace(query=lambda: False)
    for name in ("a", "b"):
        reader.begin_step({name})
        reader.read((HIDDEN, []), [name], [1])  # with auxiliary states, as of EAGLE 3
    reader.copies[0] = (*reader.copies[0][:2], event)
    assert reader.take() == {}
    event.query = lambda: True
    assert list(reader.take()) == ["a", "b"]


def test_the_first_runner_shows_its_states_inside_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = inspect.getsource(GPUModelRunner.execute_model)
    inside = source.index("maybe_get_kv_connector_output(")
    assert inside < source.index("model_output = self._model_forward(", inside)
    runner = type("Runner", (), {"_model_forward": lambda self: HIDDEN})
    monkeypatch.setattr(states, "loaded_runners", lambda: (runner, None))
    for reader in (StateReader(), latest := StateReader()):  # the last one counts
        watch_runners(reader)
    one: Any = runner()
    one.input_batch = SimpleNamespace(req_ids=["a"])
    one.query_start_loc = SimpleNamespace(np=[0, 5, 5])
    latest.begin_step({"a"})
    assert vars(runner)["_model_forward"](one) is HIDDEN
    assert latest.take()["a"].tolist() == [8, 9]
    assert reader is latest
