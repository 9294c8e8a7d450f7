"""When requests enter the decode batch of vLLM's own scheduler, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine.harness import BLOCK, Engine
from tests.engine.pair import Pair, prompt
from vllm_tetri.engine.compat import RequestStatus
from vllm_tetri.engine.queue import PrefillQueue
from vllm_tetri.handover import DecodeParams, digest_of, to_params
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.policy.admission import ADMISSIONS, ENTRY_ORDERS, DecodeGate
from vllm_tetri.policy.lengths import End, Lengths, OutputLengths
from vllm_tetri.types import Prediction, Role, TransferId

NUM_BLOCKS = 33

RESERVE = ["reserve-static", "reserve-dynamic"]


def predicted(output_tokens: int) -> Prediction:
    return Prediction((output_tokens,))


class Cluster(Pair):
    """A prefill instance and a small decode instance."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.prefill = Engine(folder, Role.PREFILL, num_blocks=200, chunk_size=64)
        wanted = {"arena_bytes": 4 << 20, "reserve_end": "upper", "num_blocks": NUM_BLOCKS}
        self.decode = Engine(folder, Role.DECODE, **(wanted | options))
        self.prefill.sees(self.prefill, self.decode)

    def arrives(
        self, name: str, tokens: list[int], max_tokens: int, guess: Prediction | None
    ) -> Any:
        """Its KV is in the arena, its request in the queue."""
        self.send(name, tokens)
        self.prefilled(name)
        self.prefill.run_until(lambda: self.prefill.is_at_rest)
        kv_params = DecodeParams(TransferId(f"t-{name}"), digest_of(tokens), predicted=guess)
        return self.decode.add(name, tokens, max_tokens=max_tokens, params=to_params(kv_params))

    def run(self, *names: str) -> None:
        self.decode.run_until(lambda: all(name in self.decode.finished for name in names))
        self.settle()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def workload(seed: int, count: int) -> dict[str, tuple[list[int], int]]:
    rng = Random(seed)
    return {
        f"r{i}": (prompt(rng.randint(2, 120), seed=i + 1), rng.randint(2, 200))
        for i in range(count)
    }


def serve(cluster: Cluster, seed: int, guess: Any) -> Any:
    """Requests come one by one while others are decoded; the load at the end."""
    rng, jobs = Random(seed), workload(seed, 24)
    for name, (tokens, max_tokens) in jobs.items():
        cluster.arrives(name, tokens, max_tokens, guess(rng, max_tokens))
        for _ in range(rng.randint(0, 12)):
            cluster.decode.step()
    cluster.run(*jobs)
    for name, (_, max_tokens) in jobs.items():
        assert len(cluster.decode.outputs[name]) == max_tokens
    return cluster.decode.load()


@pytest.mark.parametrize("policy", RESERVE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_right_predictions_never_end_in_a_preemption(
    tmp_path: Path, policy: str, seed: int
) -> None:
    cluster = Cluster(tmp_path, decode_policy=policy)
    end = serve(cluster, seed, lambda _, max_tokens: predicted(max_tokens))
    assert end.preemptions == 0
    assert end.decodes_done == 24
    cluster.close()


def test_vllms_own_admission_preempts_on_the_same_requests(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, decode_policy="greedy")
    end = serve(cluster, 1, lambda _, max_tokens: predicted(max_tokens))
    assert end.preemptions > 0
    assert end.reserved_blocks == 0
    cluster.close()


@pytest.mark.parametrize("policy", RESERVE)
@pytest.mark.parametrize("guess", ["short", "long", "random", "none"])
def test_wrong_predictions_end_in_tokens(tmp_path: Path, policy: str, guess: str) -> None:
    guesses = {
        "short": lambda rng, response: predicted(0),
        "long": lambda rng, response: predicted(1008),
        "random": lambda rng, response: predicted(rng.randrange(1024)),
        "none": lambda rng, response: None,
    }
    cluster = Cluster(tmp_path, decode_policy=policy)
    end = serve(cluster, 5, guesses[guess])
    assert end.decodes_done == 24
    cluster.close()


def test_a_held_request_waits_for_room_in_order(cluster: Cluster) -> None:
    """The second may grow as far as the first leaves room; the third may not overtake."""
    cluster.arrives("first", prompt(100), 300, predicted(300))
    cluster.decode.run_until(lambda: "first" in cluster.decode.outputs)
    cluster.arrives("second", prompt(50, 5), 200, predicted(200))
    cluster.arrives("third", prompt(10, 7), 3, predicted(3))
    for _ in range(50):
        cluster.decode.step()
    assert set(cluster.decode.outputs) == {"first"}
    held = cluster.decode.load()
    assert (held.running, held.waiting, held.held) == (1, 2, 2)
    cluster.run("first", "second", "third")
    assert list(cluster.decode.outputs) == ["first", "second", "third"]
    assert cluster.decode.load().preemptions == 0
    assert cluster.decode.endpoint.receives.loads_done == 3


def test_what_is_being_loaded_has_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, goes_on = Cluster(tmp_path, load_budget_bytes=1), Event()
    cluster.arrives("first", prompt(5), 60, predicted(60))
    cluster.decode.run_until(lambda: "first" in cluster.decode.outputs)
    scatter = cluster.decode.mover.scatter

    def wait_and_scatter(*given: Any) -> None:
        goes_on.wait(10.0)
        scatter(*given)

    monkeypatch.setattr(cluster.decode.mover, "scatter", wait_and_scatter)
    second = cluster.arrives("second", prompt(100, 5), 300, predicted(300))
    cluster.decode.run_until(lambda: second.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    third = cluster.arrives("third", prompt(10, 7), 300, predicted(300))
    for _ in range(20):
        cluster.decode.step()
    assert third.status is RequestStatus.WAITING
    goes_on.set()
    cluster.run("first", "second", "third")
    assert cluster.decode.load().preemptions == 0
    cluster.close()


def test_the_shortest_expected_output_is_next_where_it_is_asked_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, decode_order="shortest")
    cluster.arrives("first", prompt(100), 300, predicted(300))
    cluster.decode.run_until(lambda: "first" in cluster.decode.outputs)
    cluster.arrives("long", prompt(50, 5), 200, predicted(200))
    cluster.arrives("short", prompt(50, 7), 150, predicted(150))
    cluster.arrives("as short", prompt(50, 9), 150, predicted(150))
    cluster.run("first", "long", "short", "as short")
    assert list(cluster.decode.outputs) == ["first", "short", "as short", "long"]
    cluster.close()


def test_a_request_that_is_put_back_keeps_the_line_in_order() -> None:
    gate = DecodeGate(
        ADMISSIONS["greedy"], End.EXPECTED,
        lengths=OutputLengths(Lengths(), lambda name: None, window=1000),
        block_size=16, total_blocks=100, entry_weight=ENTRY_ORDERS["shortest"],
    )  # fmt: skip
    lane, here = SimpleNamespace(started={}), SimpleNamespace(goes_first=lambda request: True)
    queue = PrefillQueue(cast(Any, lane), gate, cast(Any, here))
    long, short, shorter = (
        cast(Any, SimpleNamespace(
            request_id=name, max_tokens=tokens, num_prompt_tokens=1, status=RequestStatus.WAITING
        ))
        for name, tokens in (("long", 90), ("short", 60), ("shorter", 30))
    )  # fmt: skip
    queue.add_request(long)
    assert queue.first.popleft() is long
    queue.add_request(short)
    queue.prepend_request(long)  # its load failed
    queue.add_request(shorter)
    assert list(queue.first) == [long, shorter, short]


@pytest.mark.parametrize("order", ENTRY_ORDERS)
def test_whatever_is_next_all_are_served(tmp_path: Path, order: str) -> None:
    cluster = Cluster(tmp_path, decode_order=order)
    end = serve(cluster, 5, lambda rng, response: predicted(rng.randrange(320)))
    assert end.decodes_done == 24
    cluster.decode.step()
    assert not cluster.decode.scheduler.gate.places
    cluster.close()


def test_an_empty_engine_lets_in_what_can_never_fit(cluster: Cluster) -> None:
    cluster.arrives("a", prompt(100), 900, predicted(900))
    cluster.decode.run_until(lambda: len(cluster.decode.outputs.get("a", ())) > 3)
    cluster.decode.abort("a")
    cluster.settle()


def test_max_tokens_counts_where_more_is_predicted(cluster: Cluster) -> None:
    cluster.arrives("first", prompt(100), 100, predicted(1000))
    cluster.arrives("second", prompt(100, 5), 100, predicted(1000))
    cluster.decode.step()
    cluster.decode.step()
    assert set(cluster.decode.outputs) == {"first", "second"}
    cluster.run("first", "second")


def test_held_kv_stays_for_as_long_as_its_request_waits(tmp_path: Path) -> None:
    hold_s = 0.05
    cluster = Cluster(tmp_path, hold_timeout_s=hold_s)
    cluster.arrives("first", prompt(100), 380, predicted(380))
    cluster.decode.run_until(lambda: "first" in cluster.decode.outputs)
    held = ["second", "third", "fourth"]
    for name in held:
        cluster.arrives(name, prompt(100, 5), 100, predicted(100))
        cluster.decode.step()
    until = time.monotonic() + 3 * hold_s
    while time.monotonic() < until and "first" not in cluster.decode.finished:
        cluster.decode.step()
    cluster.run("first", *held)
    assert cluster.decode.endpoint.receives.loads_done == 4
    assert cluster.decode.load().kv_loads_failed == 0
    cluster.close()


def test_a_request_that_waits_for_kv_delays_no_other_one(cluster: Cluster) -> None:
    kv_params = DecodeParams(TransferId("t-late"), digest_of(prompt(40)))
    cluster.decode.add("late", prompt(40), params=to_params(kv_params))
    cluster.arrives("a", prompt(50, 5), 4, predicted(4))
    cluster.decode.run_until(lambda: "a" in cluster.decode.finished)
    cluster.decode.abort("late")
    cluster.settle()


@pytest.mark.parametrize("order", ENTRY_ORDERS)
def test_a_preempted_request_comes_back_before_those_who_never_ran(
    tmp_path: Path, order: str
) -> None:
    cluster = Cluster(tmp_path, decode_order=order, decode_policy="greedy")
    for name, seed in (("a", 3), ("b", 5)):
        cluster.arrives(name, prompt(100, seed), 250, predicted(0))
    cluster.decode.run_until(lambda: cluster.decode.load().preemptions > 0)
    (victim,) = list(cluster.decode.scheduler.waiting)
    cluster.arrives("c", prompt(20, 7), 5, predicted(5))
    ended = len(cluster.decode.outputs[victim.request_id])
    cluster.decode.run_until(lambda: "c" in cluster.decode.outputs)
    assert len(cluster.decode.outputs[victim.request_id]) > ended
    cluster.run("a", "b", "c")
    cluster.close()


def test_an_abort_before_the_gate_frees_the_arena(cluster: Cluster) -> None:
    cluster.arrives("first", prompt(100), 380, predicted(380))
    cluster.decode.run_until(lambda: "first" in cluster.decode.outputs)
    for name in ("second", "third"):
        cluster.arrives(name, prompt(100, 5), 300, predicted(300))
    cluster.decode.step()
    cluster.decode.abort("third")
    cluster.decode.abort("second")
    cluster.decode.abort("first")
    cluster.settle()


# -- prompts that begin here ---------------------------------------------------------


@pytest.mark.parametrize("policy", RESERVE)
@pytest.mark.parametrize("prefill", ["fcfs", "sjf", "srtf"])
def test_prompts_on_both_pass_the_gate(tmp_path: Path, policy: str, prefill: str) -> None:
    engine = Engine(
        tmp_path, Role.BOTH, num_blocks=NUM_BLOCKS, decode_policy=policy, reserve_end="upper",
        prefill_policy=prefill, predictor="oracle",
    )  # fmt: skip
    jobs = workload(7, 24)
    for name, (tokens, max_tokens) in jobs.items():
        engine.add(name, tokens, max_tokens=max_tokens)
        engine.step()
    engine.run_until(lambda: all(name in engine.finished for name in jobs))
    assert all(len(engine.outputs[name]) == jobs[name][1] for name in jobs)
    assert engine.load().preemptions == 0
    engine.run_until(lambda: engine.is_at_rest)
    engine.close()


# -- what is reported -----------------------------------------------------------------


def test_decodes_are_heavy_by_what_is_expected_of_them(cluster: Cluster) -> None:
    cluster.arrives("long", prompt(20), 400, predicted(300))
    cluster.arrives("short", prompt(20, 5), 400, predicted(30))
    cluster.arrives("capped", prompt(20, 7), 40, predicted(300))
    seen = cluster.decode.load()
    assert (seen.waiting, seen.heavy, seen.light) == (3, 1, 2)
    expected_tokens = seen.remaining_tokens
    assert 40 + 200 < expected_tokens < 40 + 2 * 400  # one is cut
    assert seen.queued_prefill_tokens == 0
    cluster.decode.run_until(lambda: "capped" in cluster.decode.outputs)
    seen = cluster.decode.load()
    assert (seen.running, seen.heavy, seen.light) == (3, 1, 2)
    assert seen.remaining_tokens < expected_tokens
    cluster.decode.abort("long")
    cluster.run("short", "capped")
    seen = cluster.decode.load()
    assert (seen.heavy, seen.light, seen.remaining_tokens) == (0, 0, 0)


def test_prompts_for_other_instances_are_no_decodes(cluster: Cluster) -> None:
    cluster.send("a", prompt(300))
    cluster.prefill.step()
    assert (cluster.prefill.load().heavy, cluster.prefill.load().light) == (0, 0)
    cluster.prefilled("a")
    cluster.decode.endpoint.take(CancelTransfer(TransferId("t-a")))


def test_reserved_blocks_are_reported_while_something_runs(cluster: Cluster) -> None:
    assert cluster.decode.load().reserved_blocks == 0
    request = cluster.arrives("a", prompt(100), 200, predicted(200))
    cluster.decode.step()
    cluster.decode.step()
    needed = -(-(100 + 200) // BLOCK) - -(-request.num_tokens // BLOCK)
    assert abs(cluster.decode.load().reserved_blocks - needed) <= 1
    cluster.run("a")
    assert cluster.decode.load().reserved_blocks == 0
