"""KV that leaves layer by layer while the last chunk of its prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.engine.harness import BLOCK, Engine
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.transport.native import TransferState
from vllm_tetri.types import TransferId


@pytest.fixture(params=["shm", "tcp"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    options = {"link": request.param, "arena_bytes": 1 << 20, "transfer_timeout_s": 5.0}
    pair = Pair(tmp_path, push="layer", **options)
    yield pair
    pair.close()


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 65, 200, 511])
def test_kv_is_right(pair: Pair, num_tokens: int) -> None:
    tokens = prompt(num_tokens)
    response = pair.sent("a", tokens)
    assert response.decode == pair.decode.info.id
    pair.decoding("a", tokens)
    assert pair.decode.endpoint.receives.loads_done == (1 if num_tokens > 1 else 0)
    pair.end("a")
    sent = pair.prefill.endpoint.sends.sent_bytes
    assert sent == -(-num_tokens // BLOCK) * pair.prefill.mover.layout.block_bytes  # nothing twice


def test_prefix_hits_of_one_chunk_and_of_several(pair: Pair) -> None:
    shared = prompt(5 * BLOCK)
    for name, tail in (("a", 7), ("b", 40), ("c", 1), ("d", 3 * CHUNK)):
        tokens = shared + prompt(tail, seed=11 + tail)
        pair.sent(name, tokens)
        pair.decoding(name, tokens)
        pair.end(name)
    assert pair.decode.endpoint.receives.loads_failed == 0


def test_a_hit_that_the_same_step_computes_leaves_with_its_layers(pair: Pair) -> None:
    """vLLM counts blocks as cached once they are scheduled."""
    first = prompt(2 * BLOCK + 3)
    second = [*first[: 2 * BLOCK], 1, 2]
    for name, tokens in (("a", first), ("b", second)):  # the shorter one goes first
        pair.send(name, tokens)
    meta = pair.prefill.step().kv_connector_metadata
    assert (meta.writes, [each.request_id for each in meta.tails]) == ([], ["a", "b"])
    for name, tokens in (("a", first), ("b", second)):
        assert pair.prefilled(name).cached_tokens == (2 * BLOCK if name == "a" else 0)
        pair.decoding(name, tokens)
    pair.end("a")
    pair.end("b")


def test_a_preempted_prompt_that_is_aborted_waits_for_no_transfer(pair: Pair) -> None:
    pair.send("a", prompt(5 * CHUNK))
    for _ in range(2):
        pair.prefill.step()
    assert "a" in pair.prefill.kv_worker.sending
    pair.prefill.finish_steps()
    pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    pair.prefill.step()  # begins anew, and has nothing to send yet
    pair.prefill.abort("a")
    assert "a" not in pair.prefill.endpoint.sends
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))
    pair.settle()


@pytest.mark.parametrize("num_tokens", [CHUNK, 3 * CHUNK])
def test_layers_leave_before_the_next_one_is_computed(
    pair: Pair, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = pair.prefill, list[int]()
    write = engine.write

    def wait_and_write(request: Any, start: int, end: int, layer: int) -> None:
        if layer and end == num_tokens:
            transfer = engine.kv_worker.sending["a"].transfer
            size = engine.mover.layout.block_bytes
            whole = start // BLOCK * size
            part = -(-(end - start) // BLOCK) * size // 2
            eventually(lambda: transfer.bytes_sent == whole + part)
            seen.append(transfer.bytes_sent)
            assert transfer.state is TransferState.SENDING
        write(request, start, end, layer)

    monkeypatch.setattr(engine, "write", wait_and_write)
    tokens = prompt(num_tokens)
    pair.sent("a", tokens)
    assert len(seen) == 1
    pair.decoding("a", tokens)
    pair.end("a")


def test_layers_that_have_no_hooks_leave_at_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = pair.prefill.workers
    save = worker.save_kv_layer
    monkeypatch.setattr(
        worker, "save_kv_layer", lambda name, *rest: None if name == "layer0" else save(name, *rest)
    )
    for num_tokens in (CHUNK, 3 * CHUNK + 5):
        tokens = prompt(num_tokens)
        pair.sent(f"{num_tokens}", tokens)
        pair.decoding(f"{num_tokens}", tokens)
        pair.end(f"{num_tokens}")
    assert pair.decode.endpoint.receives.loads_done == 2


def test_a_transfer_that_fails_before_drafts_are_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1 asks for the results of a step before a draft model has computed its layers."""
    engine, (worker,) = pair.prefill, pair.prefill.workers
    engine.drafts = True
    results = worker.get_transfer_results

    def fail_and_get(finished: set[str]) -> Any:
        if (sending := engine.kv_worker.sending.get("a")) is not None:
            over = TransferState.FAILED, TransferState.CANCELLED
            eventually(lambda: sending.transfer.state in over and sending.transfer.quiesced)
        return results(finished)

    monkeypatch.setattr(worker, "get_transfer_results", fail_and_get)
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))
    pair.send("a", prompt(CHUNK))
    engine.run_until(lambda: "a" in engine.finished)
    pair.settle()


def test_parts_that_another_number_of_ranks_reads(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_ranks=(2, 1), num_heads=2, push="layer", arena_bytes=1 << 20)
    for name, num_tokens in (("a", 50), ("b", 3 * CHUNK + 5)):
        tokens = prompt(num_tokens)
        pair.sent(name, tokens)
        pair.decoding(name, tokens)
        pair.end(name)
    assert pair.decode.endpoint.receives.loads_done == 2
    pair.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_full_arenas_preemption_and_aborts_cost_time_only(tmp_path: Path, seed: int) -> None:
    rng, names = Random(seed), dict[str, list[int]]()
    pair = Pair(tmp_path, push="layer", num_blocks=24, arena_bytes=1 << 17)
    for number in range(12):
        # The first prompt has more than two chunks: it runs, whatever else, when it is preempted.
        tokens = prompt(rng.randint(1, 200) if number else 3 * CHUNK, seed=number + 1)
        names[f"r{number}"] = tokens
        pair.send(f"r{number}", tokens)
        pair.prefill.step()
        if rng.random() < 0.2 or not number:
            pair.prefill.finish_steps()
            with suppress(RuntimeError):  # transfers hold blocks; all prompts lost theirs
                pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        if rng.random() < 0.2 and number:
            name = rng.choice(list(names))
            pair.prefill.abort(name)
            pair.decode.endpoint.take(CancelTransfer(TransferId(f"t-{name}")))
            del names[name]
    for name, tokens in names.items():
        pair.receive(name, tokens, pair.prefilled(name).transfer)
        while name not in pair.decode.finished:
            pair.prefill.step()
            pair.decode.step()
    assert pair.prefill.endpoint.read_load().preemptions > 0
    pair.settle()
    pair.close()


def test_auto_sends_by_layer_what_takes_long(shm_pair: Pair) -> None:
    sends = shm_pair.prefill.endpoint.sends
    assert not sends.handovers.pays_by_layer(10)
    assert sends.handovers.pays_by_layer(100_000)


def orders(engine: Engine) -> list[bool]:
    tails = engine.step().kv_connector_metadata.tails
    return [each.by_layer for each in tails]


@pytest.mark.parametrize(("push", "by_layer"), [("auto", True), ("chunk", False)])
def test_the_option_says_how_tails_leave(tmp_path: Path, push: str, by_layer: bool) -> None:
    pair = Pair(tmp_path, push=push, arena_bytes=1 << 20)
    pair.prefill.endpoint.sends.handovers.token_s = 1.0
    pair.send("a", prompt(2 * CHUNK))
    assert [orders(pair.prefill), orders(pair.prefill)] == [[], [by_layer]]
    pair.prefilled("a")
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))
    pair.settle()
    pair.close()
