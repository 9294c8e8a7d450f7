"""Hidden states that a worker reads: of the right rows, once, and without waiting."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_tetri.engine import connector as connectors
from vllm_tetri.engine import states
from vllm_tetri.engine.plugin import register
from vllm_tetri.engine.states import StateReader, give_out_layer, middle_layer, watch_runners

HIDDEN = torch.arange(12.0).reshape(6, 2)


def test_the_last_state_of_every_wanted_request_is_read_once() -> None:
    reader = StateReader()
    reader.begin_step({"b", "c", "gone"})
    reader.read(HIDDEN.to(torch.bfloat16), ["a", "b", "c"], [1, 4, 6])
    reader.read(torch.zeros(3, 2), ["a", "b", "c"], [1, 2, 3])  # of a step without orders
    found = reader.take()
    assert {name: state.tolist() for name, state in found.items()} == {"b": [6, 7], "c": [10, 11]}
    assert all(each.base is None for each in found.values())  # none keeps the others' memory
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
        reader.read(HIDDEN, [name], [1])
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


def middle(*words: str | Path) -> dict[str, list[float]]:
    """What `tests.engine.middle` prints: numbers by name."""
    command, root = [sys.executable, "-m", "tests.engine.middle", *words], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"^(state|middle|last) (.+)$", done.stdout, re.MULTILINE)
    return {name: [float(each) for each in values.split()] for name, values in lines}


def test_states_are_read_of_the_layer_in_the_middle(tiny_llama: Path) -> None:
    found = middle(tiny_llama)
    assert found["middle"] == [0] < found["last"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_model_gives_out_the_same_states(tiny_llama: Path, tmp_path: Path) -> None:
    expected = middle(tiny_llama)["state"]
    assert middle(tiny_llama, tmp_path)["state"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert [*tmp_path.rglob("torch_compile_cache")]  # it was


def config_with(**changes: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pipeline", 1),
            prefill_context_parallel_size=changes.get("context", 1),
            use_ubatching=changes.get("ubatching", False),
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=changes.get("shares", False)),
        speculative_config=changes.get("speculative"),
        additional_config=changes.get("additional", {}),
        model_config=SimpleNamespace(
            runner_type=changes.get("runner", "generate"),
            hf_text_config=SimpleNamespace(num_hidden_layers=changes.get("layers", 30)),
        ),
    )


@pytest.mark.parametrize(
    "changes",
    [{"speculative": "eagle3"}, {"pipeline": 2}, {"context": 2}, {"ubatching": True},
     {"shares": True}, {"runner": "pooling"}, {"layers": 1}, {"additional": SimpleNamespace()}],
    ids=str,
)  # fmt: skip
def test_the_last_states_are_read_where_others_have_uses(changes: dict[str, Any]) -> None:
    assert middle_layer(config_with()) == 18
    assert middle_layer(config_with(**changes)) is None


class Part(torch.nn.Module):
    """A part of a model, with a configuration of its own, as those of multimodal models."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_config = config_with(additional={"theirs": 1})
        self.aux_hidden_state_layers = ()


class Model(torch.nn.Module):
    """One that says that it gives out layers, and `does`, does not, or fails to begin."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does, self.part = does, Part()

    def set_aux_hidden_state_layers(self, layers: Any) -> None:
        self.part.aux_hidden_state_layers = layers
        if self.does == "fails":
            raise AssertionError("no layers")

    def forward(self) -> Any:
        gives = self.does == "gives" and self.part.aux_hidden_state_layers
        return (HIDDEN, [HIDDEN + 100]) if gives else HIDDEN


@pytest.mark.parametrize("does", ["gives", "ignores", "fails", "cannot"])
def test_a_runner_reads_of_a_layer_if_its_model_gives_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, does: str
) -> None:
    monkeypatch.setattr(states, "can_give_out_layers", lambda model: model.does != "cannot")
    config, model = config_with(additional={"theirs": 1}), Model(does)
    first, second = one_of_each(monkeypatch, model)
    for runner in (first, second):
        runner.get_model = lambda: model
        give_out_layer(runner, config)
    is_on = does in ("gives", "ignores")
    # A runner expects a pair then, and the compiled graph has another name in vLLM's cache.
    assert hasattr(first, "use_aux_hidden_state_outputs") == isinstance(model(), tuple) == is_on
    for each in (config, model.part.vllm_config):
        found = each.additional_config
        assert found == ({"theirs": 1, "tetri_layer": 18} if is_on else {"theirs": 1})
    assert ("gives out no states" in caplog.text) == (does == "fails")

    for runner, step in ((first, "_model_forward"), (second, "sample_tokens")):
        reader = StateReader()
        watch_runners(reader)
        reader.begin_step({"a"})
        getattr(runner, step)()
        wanted = HIDDEN[4] + 100 * (does == "gives")
        assert reader.take()["a"].tolist() == wanted.tolist()


def one_of_each(monkeypatch: pytest.MonkeyPatch, model: Model) -> tuple[Any, Any]:
    """Return a V1 and a V2 runner in the middle of a step whose first request ends in row 4."""

    def pair() -> Any:
        found = model()
        return found if isinstance(found, tuple) else (found, None)

    first = type("First", (), {"_model_forward": lambda self: model()})
    second = type("Second", (), {"sample_tokens": lambda self: None})
    monkeypatch.setattr(states, "loaded_runners", lambda: (first, second))
    one, two = first(), second()
    one.input_batch = SimpleNamespace(req_ids=["a"])
    one.query_start_loc = SimpleNamespace(np=[0, 5, 5])
    two_batch = SimpleNamespace(req_ids=["a"], query_start_loc_np=[0, 5])

    class State:
        input_batch = two_batch
        hidden_states = property(lambda self: pair()[0])
        aux_hidden_states = property(lambda self: pair()[1])

    two.execute_model_state = State()
    return one, two


@pytest.mark.parametrize("connector", ["TetriConnector", "NixlConnector", None])
def test_workers_prepare_the_models_of_instances_and_no_others(
    monkeypatch: pytest.MonkeyPatch, connector: str | None
) -> None:
    transfer = connector and SimpleNamespace(kv_connector=connector)
    given = SimpleNamespace(kv_transfer_config=transfer)

    class Wrapper:
        vllm_config = given
        worker = SimpleNamespace(model_runner="runner", load_model=lambda **words: words)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    prepared: list[Any] = []
    monkeypatch.setattr(connectors, "prepare_model", lambda *words: prepared.append(words))
    monkeypatch.setitem(
        sys.modules, "vllm.v1.worker.worker_base", SimpleNamespace(WorkerWrapperBase=Wrapper)
    )
    for _ in range(2):  # vLLM registers plugins in every process, and maybe twice
        register()
    wrapper: Any = Wrapper()
    assert wrapper.load_model(dummy=False) == {"dummy": False}
    assert prepared == ([("runner", given)] if connector == "TetriConnector" else [])
