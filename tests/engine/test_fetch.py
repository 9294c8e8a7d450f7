"""An instance that computes a prompt fetches the KV of its prefix from one that holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine.harness import BLOCK, FULL, IDENTITY, LAYERS, PAGE, WINDOW, Engine, run_until
from tests.engine.pair import CHUNK, prompt
from tests.eventually import eventually
from vllm_tetri.engine.step import WorkerReport
from vllm_tetri.handover import (
    DecodeParams,
    Fetch,
    Prefilled,
    PrefillParams,
    from_params,
    to_params,
)
from vllm_tetri.messages import CancelTransfer, TransferLost
from vllm_tetri.policy.residency import Chain
from vllm_tetri.policy.step_cost import context_sum
from vllm_tetri.transport.native import Sender, TransferState
from vllm_tetri.types import RequestId, Role, TransferId

OPTIONS: dict[str, Any] = {"arena_bytes": 1 << 20, "transfer_timeout_s": 5.0, "chunk_size": CHUNK}
FIRST = prompt(10 * BLOCK + 7)
NEXT = [*FIRST, 7, 7, 7, *prompt(60, seed=11)]
PREFIX = 10 * BLOCK
NAME = TransferId("router/f")
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"specs": (FULL, WINDOW)},
    "two ranks": {"num_ranks": 2},
    "by request": {"push": "request"},
    "by layer": {"push": "layer"},
    "background": {"specs": (FULL, FULL), "num_blocks": 128},
    "shortest first": {"prefill_policy": "srtf", "specs": (FULL, FULL), "num_blocks": 128},
}


class Trio:
    """A holder of a prefix, an instance that fetches it, and one that decodes."""

    def __init__(self, folder: Path, role: Role = Role.PREFILL, **options: Any) -> None:
        holder = options.pop("holder", {})
        options = OPTIONS | options
        own = {"instance": "holder", **options, **holder}
        self.holder = Engine(folder, role, **own)
        self.fetcher = Engine(folder, Role.PREFILL, instance="fetcher", **options)
        self.decode = Engine(folder, Role.DECODE, instance="decode", **options)
        self.all = [self.holder, self.fetcher, self.decode]
        self.fetcher.sees(*self.all)
        first = self.holder.add("first", FIRST)
        names = [int.from_bytes(each[-8:], "big") for each in first.block_hashes]
        self.chain = Chain(names, BLOCK)
        self.holder.run_until(lambda: "first" in self.holder.finished)

    def fetch(self, **changes: Any) -> Fetch:
        marks = self.chain.marks()
        target, endpoint = self.fetcher.info.id, self.fetcher.info.kv_endpoint
        usual = {"marks": marks, "wait_s": 5.0}
        name = changes.pop("transfer", NAME)
        return Fetch(name, target, endpoint, **usual | changes)

    def ask(self, fetch: Fetch, tokens: list[int] = NEXT) -> Any:
        """The holder gets its request."""
        return self.holder.add("asked", tokens, params=to_params(fetch), max_tokens=2)

    def compute(self, fetch: Fetch, tokens: list[int] = NEXT, *, is_split: bool = False) -> Any:
        """The fetching instance gets its request."""
        params = PrefillParams(TransferId("t"), RequestId("r"), fetch=fetch)
        return self.fetcher.add("a", tokens, params=to_params(params if is_split else fetch))

    def run(self, condition: Any) -> None:
        """Step all engines until it is true."""
        run_until(condition, *self.all)

    def end(self) -> None:
        self.run(lambda: "a" in self.fetcher.finished or not self.fetcher.scheduler.requests)
        self.run(lambda: all(each.is_at_rest for each in self.all))

    @property
    def load(self) -> Any:
        return self.fetcher.endpoint.read_load()


@contextmanager
def made(folder: Path, *args: Any, **options: Any) -> Iterator[Trio]:
    trio = Trio(folder, *args, **options)
    yield trio
    for each in trio.all:
        each.close()


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Trio]:
    with made(tmp_path) as trio:
        yield trio


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_only_what_follows_the_prefix_is_computed(tmp_path: Path, kind: str, role: Role) -> None:
    with made(tmp_path, role, **KINDS[kind]) as trio:
        fetch = trio.fetch()
        request = trio.compute(fetch)
        trio.fetcher.step()
        assert not trio.fetcher.computed["a"]
        asked = trio.ask(fetch)
        assert (asked.num_prompt_tokens, asked.num_tokens) == (PREFIX, PREFIX)
        trio.run(lambda: "a" in trio.fetcher.outputs)
        assert trio.fetcher.holds(request, len(NEXT))
        trio.end()
        assert trio.holder.computed["asked"] == BLOCK
        assert trio.fetcher.computed["a"] == len(NEXT) - PREFIX + 3
        assert (trio.load.fetched_tokens, trio.load.fetches_failed) == (PREFIX, 0)
        assert trio.fetcher.outputs["a"] == [7] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_with_a_fetched_prefix_is_handed_over_as_a_whole(
    tmp_path: Path, kind: str
) -> None:
    with made(tmp_path, **KINDS[kind]) as trio:
        fetch = trio.fetch()
        trio.compute(fetch, is_split=True)
        trio.ask(fetch)
        trio.run(lambda: "a" in trio.fetcher.finished)
        prefilled = from_params(trio.fetcher.finished["a"])
        assert isinstance(prefilled, Prefilled)
        assert (prefilled.decode, prefilled.cached_tokens) == ("decode", PREFIX)
        assert trio.fetcher.computed["a"] == len(NEXT) - PREFIX
        params = DecodeParams(TransferId("t"), prefilled.digest)
        request = trio.decode.add("a", NEXT, params=to_params(params))
        trio.run(lambda: "a" in trio.decode.outputs)
        assert trio.decode.holds(request, len(NEXT))
        trio.run(lambda: "a" in trio.decode.finished)
        trio.end()


def test_what_a_request_has_grown_by_is_fetched_without_marks(trio: Trio) -> None:
    """As copies of outputs do: their router knows the token ids that both get."""
    running = trio.holder.add("running", FIRST, max_tokens=80)
    held_tokens = 0
    for name, num_outputs in (("a", 20), ("b", 60)):
        trio.holder.run_until(lambda most=num_outputs: running.num_output_tokens > most)
        tokens = list(running.all_token_ids)
        num_tokens = len(tokens) - 1
        fetch = trio.fetch(
            marks=[], num_tokens=num_tokens, held_tokens=held_tokens, transfer=TransferId(name)
        )
        request = trio.fetcher.add(name, tokens, params=to_params(fetch))
        trio.holder.add(f"of {name}", tokens, params=to_params(fetch), max_tokens=2)
        trio.run(lambda name=name: name in trio.fetcher.outputs)
        assert trio.fetcher.holds(request, len(tokens))
        held_tokens = num_tokens
        assert trio.load.fetched_tokens == num_tokens // BLOCK * BLOCK
    trio.end()


def test_what_the_target_holds_as_a_whole_is_not_waited_for(trio: Trio) -> None:
    """What it is believed to hold may be more than both prompts share."""
    trio.fetcher.add("own", FIRST)
    trio.fetcher.run_until(lambda: "own" in trio.fetcher.finished)
    trio.compute(trio.fetch(held_tokens=PREFIX + 3))
    trio.fetcher.run_until(lambda: "a" in trio.fetcher.outputs, max_steps=20)


def test_what_the_target_holds_is_not_sent(trio: Trio) -> None:
    trio.fetcher.add("own", FIRST[: 3 * BLOCK])
    trio.fetcher.run_until(lambda: "own" in trio.fetcher.finished)
    fetch = trio.fetch(held_tokens=3 * BLOCK)
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(NEXT))
    trio.end()
    num_blocks = (PREFIX - 3 * BLOCK) // BLOCK
    assert trio.holder.endpoint.sends.sent_bytes == num_blocks * BLOCK * PAGE * LAYERS
    assert trio.load.fetched_tokens == PREFIX - 3 * BLOCK


def test_prompts_that_begin_alike_share_what_they_have(trio: Trio) -> None:
    """The longest mark that fits both is found by both."""
    tokens = [*FIRST[: 6 * BLOCK + 3], *prompt(50, seed=77)]
    fetch = trio.fetch()
    request = trio.compute(fetch, tokens)
    assert trio.ask(fetch, tokens).num_prompt_tokens == 6 * BLOCK
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(tokens))
    trio.end()
    assert (trio.load.fetched_tokens, trio.holder.computed["asked"]) == (6 * BLOCK, BLOCK)


def test_a_whole_prompt_that_is_held_leaves_one_token(trio: Trio) -> None:
    tokens, fetch = FIRST[:PREFIX], trio.fetch()
    request = trio.compute(fetch, tokens)
    trio.ask(fetch, tokens)
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, PREFIX)
    trio.end()
    assert trio.fetcher.computed["a"] == 1 + 3


def test_choices_of_a_request_share_a_fetch(trio: Trio) -> None:
    fetch = trio.fetch()
    both = [trio.compute(fetch), trio.fetcher.add("b", NEXT, params=to_params(fetch))]
    trio.ask(fetch)
    trio.run(lambda: {"a", "b"} <= trio.fetcher.outputs.keys())
    assert all(trio.fetcher.holds(each, len(NEXT)) for each in both)
    trio.run(lambda: {"a", "b"} <= trio.fetcher.finished.keys())
    trio.end()
    assert trio.load.fetches_failed == 0


def test_a_fetch_waits_behind_no_prompt_of_the_holder(tmp_path: Path) -> None:
    with made(tmp_path, prefill_policy="fcfs") as trio:
        for number in range(4):
            trio.holder.add(f"{number}", prompt(3 * CHUNK, seed=30 + number))
        trio.holder.step()
        fetch = trio.fetch()
        trio.compute(fetch)
        trio.ask(fetch)
        trio.run(lambda: "a" in trio.fetcher.outputs)
        assert "1" not in trio.holder.outputs
        trio.run(lambda: len(trio.holder.finished) == 6)
        trio.end()


def test_a_prompt_that_fetches_holds_up_no_other(trio: Trio) -> None:
    trio.compute(trio.fetch())
    trio.fetcher.add("b", prompt(3 * CHUNK, seed=40))
    trio.fetcher.run_until(lambda: "b" in trio.fetcher.finished)
    assert not trio.fetcher.computed["a"]
    assert "a" not in trio.fetcher.scheduler.waiting.lane
    assert trio.load.queued_prefill_tokens == len(NEXT) - PREFIX
    assert trio.load.queued_context == context_sum(len(NEXT) - PREFIX, len(NEXT))
    trio.fetcher.abort("a")
    trio.end()


# -- what can go wrong ---------------------------------------------------------------


def computes_all(trio: Trio, request: Any, *, failed: int = 1) -> None:
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(NEXT))
    assert trio.fetcher.outputs["a"][0] == 7
    trio.end()
    assert trio.fetcher.computed["a"] == len(NEXT) + 3
    assert (trio.load.fetched_tokens, trio.load.fetches_failed) == (0, failed)
    assert trio.load.kv_loads_failed == 0


def test_a_fetched_prefix_that_cannot_be_loaded_is_computed(trio: Trio) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    trio.fetcher.mover.scatter = broken  # type: ignore[method-assign]
    fetch = trio.fetch()
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(NEXT))
    assert request.num_preemptions == 1  # else V2's runner goes on behind what was not loaded
    trio.end()
    assert trio.fetcher.outputs["a"] == [7] * 4
    assert trio.fetcher.counted["a"].num_cached_tokens == 0
    assert (trio.load.fetched_tokens, trio.load.fetches_failed) == (0, 1)
    assert trio.load.kv_loads_failed == 0


def test_while_a_prefix_is_loaded_other_prompts_are_computed(tmp_path: Path) -> None:
    with made(tmp_path, **KINDS["shortest first"]) as trio:
        gate, scatter = threading.Event(), trio.fetcher.mover.scatter

        def held(*args: Any) -> None:
            assert gate.wait(30.0)
            scatter(*args)

        trio.fetcher.mover.scatter = held  # type: ignore[method-assign]
        fetch = trio.fetch()
        request = trio.compute(fetch)
        trio.ask(fetch)
        trio.run(lambda: trio.fetcher.scheduler.kv_holding_waiting)
        trio.fetcher.add("b", prompt(3 * CHUNK, seed=40))
        trio.fetcher.run_until(lambda: "b" in trio.fetcher.outputs, max_steps=20)
        assert trio.fetcher.computed["b"] >= 3 * CHUNK > trio.fetcher.computed["a"]
        gate.set()
        trio.run(lambda: "a" in trio.fetcher.outputs)
        assert trio.fetcher.holds(request, len(NEXT))
        trio.run(lambda: {"a", "b"} <= trio.fetcher.finished.keys())
        trio.end()


def evict(trio: Trio) -> None:
    assert trio.holder.scheduler.reset_prefix_cache()


def clear(trio: Trio) -> None:
    """All but the first block is gone."""
    cache = trio.holder.scheduler.kv_cache_manager
    probe = trio.holder.add("probe", FIRST)
    blocks = cache.get_computed_blocks(probe)[0].blocks[0]
    trio.holder.abort("probe")
    cache.evict_blocks({each.block_id for each in blocks[1:]})


@pytest.mark.parametrize("lose", [evict, clear])
def test_a_holder_that_has_lost_the_prefix_computes_nothing(trio: Trio, lose: Any) -> None:
    lose(trio)
    fetch, done = trio.fetch(), dict(trio.holder.computed)
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "asked" in trio.holder.finished)
    assert trio.holder.finished["asked"] is None  # by which the router knows
    assert trio.holder.computed == done
    trio.fetcher.endpoint.take(TransferLost(NAME))
    computes_all(trio, request)


@pytest.mark.parametrize("held_tokens", [4 * BLOCK, PREFIX, 1 << 40])
def test_a_target_that_holds_less_than_believed_computes(trio: Trio, held_tokens: int) -> None:
    trio.fetcher.add("own", FIRST[: 3 * BLOCK])
    trio.fetcher.run_until(lambda: "own" in trio.fetcher.finished)
    fetch = trio.fetch(held_tokens=held_tokens)
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(NEXT))
    trio.end()
    assert trio.fetcher.computed["a"] == len(NEXT) - 3 * BLOCK + 3
    assert (trio.load.fetched_tokens, trio.load.fetches_failed) == (0, 1)


def wrong(fetch: Fetch) -> Fetch:
    marks = [(tokens, name ^ 1) for tokens, name in fetch.marks]
    return replace(fetch, marks=marks)


def test_a_mark_that_neither_finds_ends_it_at_once(trio: Trio) -> None:
    fetch = wrong(trio.fetch())
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "asked" in trio.holder.finished)
    computes_all(trio, request)
    assert not trio.holder.computed["asked"]


@pytest.mark.parametrize("tokens", [PREFIX - BLOCK, PREFIX // 2])
def test_a_slot_of_another_prefix_is_not_loaded(trio: Trio, tokens: int) -> None:
    fetch = trio.fetch()
    other = Chain(trio.chain.names[: tokens // BLOCK], BLOCK)
    request = trio.compute(fetch)
    trio.ask(replace(fetch, marks=other.marks()))
    computes_all(trio, request)


def test_nothing_is_waited_for_longer_than_told(tmp_path: Path) -> None:
    with made(tmp_path, transfer_timeout_s=1000.0) as trio:
        request = trio.compute(trio.fetch(wait_s=0.05))
        computes_all(trio, request)
        trio.ask(trio.fetch())  # and what comes later is not kept
        trio.run(lambda: "asked" in trio.holder.finished)
        trio.end()
        assert trio.load.held == 0


def test_a_holder_that_dies_in_the_middle_is_given_up(trio: Trio) -> None:
    request, sender = trio.compute(trio.fetch()), Sender(identity=IDENTITY)
    block_bytes = BLOCK * PAGE * LAYERS
    transfer = sender.open(trio.fetcher.info.kv_endpoint, NAME, PREFIX // BLOCK, block_bytes)
    eventually(lambda: transfer.state is TransferState.SENDING)
    sender.close()
    computes_all(trio, request)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_transfer_that_fails_at_the_holder_is_given_up(trio: Trio, is_done: bool) -> None:
    fetch = trio.fetch()
    request = trio.compute(fetch)
    trio.ask(fetch)
    failed = WorkerReport(failed={"asked": (1, "PEER_LOST", "cut")})
    output, results = trio.holder.begin()
    if is_done:
        trio.holder.update(output, results)
    trio.holder.endpoint.sends.report(failed)
    if not is_done:
        trio.holder.update(output, results)
    trio.run(lambda: "asked" in trio.holder.finished)
    if not is_done:
        assert from_params(trio.holder.finished["asked"]).decode == ""
        trio.fetcher.endpoint.take(TransferLost(NAME))
    trio.run(lambda: "a" in trio.fetcher.outputs)
    assert trio.fetcher.holds(request, len(NEXT))
    trio.end()


@pytest.mark.parametrize("who", ["target", "holder", "both"])
@pytest.mark.parametrize("state", ["waiting", "taken", "loading", "computing"])
def test_an_abort_leaves_nothing(tmp_path: Path, who: str, state: str) -> None:
    with made(tmp_path, **KINDS["background"]) as trio:
        fetch, scheduler = trio.fetch(), trio.fetcher.scheduler
        trio.compute(fetch)
        trio.ask(fetch)
        if state != "waiting":
            receiver = trio.fetcher.endpoint.receiver
            trio.holder.run_until(lambda: receiver.stats().unclaimed)
            trio.fetcher.endpoint.receives.pin_arrived(scheduler.requests)
        if state == "loading":
            trio.fetcher.run_until(lambda: scheduler.kv_holding_waiting)
        elif state == "computing":
            trio.fetcher.run_until(lambda: trio.fetcher.computed["a"])
        if who != "holder":
            trio.fetcher.abort("a")
        if who != "target":
            trio.holder.abort("asked")
        if who != "holder" or state == "waiting":  # as the router does
            for each in (trio.fetcher, trio.holder):
                each.endpoint.take(CancelTransfer(NAME))
            trio.fetcher.endpoint.take(TransferLost(NAME))
        trio.end()


def test_an_instance_that_exchanges_no_kv_gives_none(trio: Trio) -> None:
    trio.holder.endpoint.leave_exchange()
    fetch = trio.fetch()
    request = trio.compute(fetch)
    trio.ask(fetch)
    trio.run(lambda: "asked" in trio.holder.finished)
    assert not trio.holder.computed["asked"]
    trio.fetcher.endpoint.take(TransferLost(NAME))
    computes_all(trio, request)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_mix_is_right_and_ends_at_rest(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    with made(tmp_path, num_blocks=48) as trio:
        for number in range(40):
            tokens = [*FIRST[: rng.randint(1, len(FIRST))], *prompt(rng.randint(1, 90), number + 9)]
            name = TransferId(f"router/{number}")
            fetch = replace(trio.fetch(wait_s=0.2), transfer=name)
            fetch = replace(fetch, held_tokens=rng.choice((0, 0, BLOCK, 4 * BLOCK)))
            fetch = wrong(fetch) if rng.random() < 0.1 else fetch
            params, action = to_params(fetch), rng.random()
            request = trio.fetcher.add(f"{number}", tokens, params=params)
            if action < 0.8:
                trio.holder.add(f"asked-{number}", tokens, params=params, max_tokens=2)
            if rng.random() < 0.3:
                trio.holder.add(f"other-{number}", prompt(rng.randint(1, 600), number + 50))
            if rng.random() < 0.3:
                trio.fetcher.scheduler.reset_prefix_cache()
            for _ in range(rng.randint(0, 6)):
                rng.choice(trio.all).step()
            if rng.random() < 0.2:
                trio.fetcher.abort(f"{number}")
                for each in trio.all:
                    each.endpoint.take(CancelTransfer(name))
                continue
            trio.run(lambda number=number: f"{number}" in trio.fetcher.outputs)
            assert trio.fetcher.holds(request, len(tokens))
        trio.run(lambda: not any(each.scheduler.requests for each in trio.all))
        trio.end()
        assert min(trio.load.fetched_tokens, trio.load.fetches_failed) > 0
