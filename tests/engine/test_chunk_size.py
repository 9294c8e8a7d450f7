"""`--tetri-chunk-size auto` on vLLM's own scheduler, with an imagined device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.harness import Engine
from vllm_tetri.engine import chunk_size
from vllm_tetri.engine.chunk_size import fitting_chunk, is_dummy
from vllm_tetri.types import Role


class Device(Engine):
    """An engine whose steps take 5 ms and 0.6 ms a token, `slower` times; no other time passes,
    none in a step without tokens."""

    now = 1000.0
    slower = 1.0

    def _forward(self, output: Any) -> None:
        self.steps.append(list(output.num_scheduled_tokens))
        if tokens := output.total_num_scheduled_tokens:
            self.now += self.slower * (0.005 + 0.0006 * tokens)

    def probe(self) -> None:
        self.run_until(lambda: not self.scheduler.has_requests())


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    clock = SimpleNamespace(monotonic=lambda: device.now)
    monkeypatch.setattr("vllm_tetri.engine.chunk_size.time", clock)
    device = Device(tmp_path, Role.PREFILL, num_blocks=600, chunk_size="auto")
    device.steps = []
    yield device
    device.close()


def test_auto_keeps_the_smallest_chunk_that_saturates_the_device(device: Device) -> None:
    assert device.scheduler.has_requests()  # so that vLLM steps at once
    device.probe()
    assert device.scheduler.max_num_scheduled_tokens == 128  # 94 % of the best
    assert device.is_at_rest


def test_requests_wait_until_the_probe_is_over_and_are_then_served(device: Device) -> None:
    device.step()
    device.add("real", list(range(100)), max_tokens=1)
    device.run_until(lambda: "real" in device.finished)
    first = next(index for index, names in enumerate(device.steps) if "real" in names)
    assert all(is_dummy(name) for names in device.steps[:first] for name in names)
    assert device.outputs == {"real": [7]}
    assert device.is_at_rest


def test_the_instance_joins_its_cluster_after_the_probe(device: Device) -> None:
    device.step()
    assert not device.endpoint.has_joined
    device.probe()
    assert device.endpoint.has_joined


def test_a_slow_device_is_not_given_ever_longer_prompts(device: Device) -> None:
    device.slower = 100.0
    device.probe()
    assert device.now - 1000.0 < chunk_size.DEADLINE_S + 100 * 0.1
    assert device.scheduler.max_num_scheduled_tokens == 32
    assert device.is_at_rest


def test_a_device_that_takes_a_minute_per_step_keeps_what_was_timed(device: Device) -> None:
    device.slower = 10_000.0
    device.probe()
    assert device.scheduler.max_num_scheduled_tokens == chunk_size.LEAST_TOKENS
    assert device.is_at_rest


def test_an_engine_can_be_closed_while_it_probes(device: Device) -> None:
    for _ in range(3):
        device.step()
    assert device.scheduler.has_requests()


@pytest.mark.parametrize(("window_tokens", "lowered"), [(2048, 1024), (100, 100), (9999, 1024)])
def test_a_chunk_that_no_step_can_hold_is_lowered(window_tokens: int, lowered: int) -> None:
    assert fitting_chunk(5000, batched_tokens=1024, window_tokens=window_tokens) == lowered
    assert fitting_chunk(64, batched_tokens=1024, window_tokens=window_tokens) == 64


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": 32}, {"chunk_size": "auto"}, {"tbt_slo_s": 1e-4}, {"prefill_policy": "srtf"}],
    ids=str,
)
def test_without_chunked_prefill_every_prompt_is_computed_in_one_step(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    args = {"enable_chunked_prefill": False}
    engine = Engine(tmp_path, Role.BOTH, num_blocks=256, args=args, **options)
    try:
        decode = engine.add("decode", list(range(1, 20)), max_tokens=100)
        engine.run_until(lambda: decode.num_output_tokens > 3)
        for name in ("first", "second"):
            engine.add(name, list(range(700, 1, -1)), max_tokens=1)
        sizes = dict[str, set[int]]()
        while not {"first", "second"} <= engine.finished.keys():
            assert not decode.is_finished(), "a prompt was never computed"
            for name, num_tokens in engine.step().num_scheduled_tokens.items():
                sizes.setdefault(name, set()).add(num_tokens)
        assert sizes["first"] == {699}
    finally:
        engine.close()
