"""Sizes of chunks on vLLM's own scheduler, with an imagined device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mode
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.harness import Engine, vllm_config
from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.chunk_size import fit_to_chunking
from vllm_tetri.handover import DecodeParams, to_params
from vllm_tetri.messages import TransferLost
from vllm_tetri.types import Role, TransferId


class Device(Engine):
    """An engine whose steps take 5 ms, 0.6 ms a prompt token and 0.1 ms a decode; no other time
    passes."""

    now = 1000.0

    def update(self, output: Any, kv_output: Any) -> None:
        # The time passes until the results are there: with asynchronous scheduling, the next step
        # is scheduled before.
        if tokens := output.total_num_scheduled_tokens:
            prompt_tokens = tokens if tokens > len(output.num_scheduled_tokens) else 0
            self.sizes.append(tokens)
            self.now += 0.005 + 0.0006 * prompt_tokens + 0.0001 * (tokens - prompt_tokens)
        super().update(output, kv_output)


@pytest.fixture
def device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Device]:
    clock = SimpleNamespace(monotonic=lambda: device.now)
    monkeypatch.setattr("vllm_tetri.engine.scheduler.time", clock)
    more = getattr(request, "param", {})
    device = Device(tmp_path, Role.BOTH, num_blocks=600, chunk_size="auto", **more)
    device.sizes = []
    yield device
    device.close()


def prompts(device: Device, *lengths: int) -> None:
    for length in lengths:
        device.add(f"prompt of {length}", [length, *range(length - 1)], max_tokens=1)
    device.run_until(lambda: all(f"prompt of {each}" in device.finished for each in lengths))


def test_chunks_alone_grow_to_where_nine_tenths_of_the_speed_are_reached(device: Device) -> None:
    for length in range(300, 700, 20):
        prompts(device, length)
    device.sizes.clear()
    prompts(device, 1000)
    # 9 x 5 ms of prompt tokens at 0.6 ms.
    assert mode(device.sizes) == pytest.approx(75, abs=16)


def test_prompts_of_one_length_do_not_hide_what_a_token_costs(device: Device) -> None:
    for number in range(40):
        device.add(f"p{number}", [number, *range(511)], max_tokens=1)
        device.run_until(lambda name=f"p{number}": name in device.finished)
    assert max(device.sizes[:1]) == 512
    # Even sizes that divide all prompts are varied.
    assert len(set(device.sizes[-40:])) > 1
    cost = device.scheduler.clock.fit.cost
    assert cost.base_s == pytest.approx(0.005, rel=0.3)
    assert cost.prompt_s == pytest.approx(0.0006, rel=0.1)


@pytest.mark.parametrize("device", [{"tbt_slo_s": 0.03}], indirect=True)
def test_a_prompt_that_lost_its_kv_gets_no_more_beside_decodes(device: Device) -> None:
    prompts(device, *range(300, 340, 7))
    decodes = [device.add(f"d{n}", list(range(9 + n)), max_tokens=900) for n in range(8)]
    device.run_until(lambda: all(each.num_output_tokens > 20 for each in decodes))
    load = device.load()
    assert load.next_chunk_tokens + 16 < load.chunk_tokens
    device.endpoint.take(TransferLost(TransferId("t")))
    device.sizes.clear()
    device.add("lost", list(range(600)), params=to_params(DecodeParams(TransferId("t"), "")))
    device.run_until(lambda: "lost" in device.outputs)
    assert 24 < max(device.sizes) <= load.next_chunk_tokens + 8 + 16


def test_beside_decodes_more_prompts_get_larger_chunks(device: Device) -> None:
    prompts(device, *range(300, 340, 7))
    decodes = [device.add(f"d{n}", list(range(9 + n)), max_tokens=900) for n in range(8)]
    device.run_until(lambda: all(each.num_output_tokens > 20 for each in decodes))
    largest = []
    for lengths in ((600,), range(500, 620, 10)):
        device.sizes.clear()
        prompts(device, *lengths)
        largest.append(max(device.sizes) - 8)
    assert 16 <= largest[0] < largest[1] <= 1024


def test_a_report_says_what_the_next_prompt_gets_of_a_step(device: Device) -> None:
    device.endpoint.agent.close()  # its thread would read the load, too
    prompts(device, *range(300, 340, 7))
    alone = device.endpoint.read_load().next_chunk_tokens
    decodes = [device.add(f"d{n}", list(range(9 + n)), max_tokens=900) for n in range(8)]
    device.run_until(lambda: all(each.num_output_tokens > 20 for each in decodes))
    beside = device.endpoint.read_load().next_chunk_tokens
    device.sizes.clear()
    prompts(device, 900)
    assert next(size for size in device.sizes if size > 8) - 8 == pytest.approx(beside, abs=16)
    assert 16 <= beside != alone


def test_a_prompt_in_its_last_step_is_no_decode(device: Device) -> None:
    device.endpoint.agent.close()
    prompts(device, *range(300, 340, 7))
    load = device.endpoint.read_load()
    assert load.next_chunk_tokens == load.chunk_tokens
    device.add("one token", list(range(20)), max_tokens=1)
    while "one token" not in device.finished:
        output, kv_output = device.begin()
        load = device.endpoint.read_load()
        assert load.next_chunk_tokens == load.chunk_tokens
        device.update(output, kv_output)


@pytest.mark.parametrize(("window_tokens", "lowered"), [(2048, 1024), (100, 100), (9999, 1024)])
def test_a_chunk_that_no_step_can_hold_is_lowered(
    tmp_path: Path, window_tokens: int, lowered: int
) -> None:
    stock = vllm_config(tmp_path, Role.BOTH)
    stock.scheduler_config.max_num_scheduled_tokens = 1024
    stock.model_config.max_model_len = window_tokens
    assert (
        fit_to_chunking(TetriConfig(role=Role.BOTH, chunk_size=5000), stock).chunk_size == lowered
    )
    assert fit_to_chunking(TetriConfig(role=Role.BOTH, chunk_size=64), stock).chunk_size == 64


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
