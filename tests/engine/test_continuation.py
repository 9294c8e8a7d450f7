"""Given tokens become output: in the scheduler, in the V1 runner's state, in what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.harness import BLOCK, Engine, told_by
from tests.engine.pair import CHUNK, Pair
from vllm_tetri.engine.compat import EngineCoreOutput, LogprobsLists, RequestStatus
from vllm_tetri.engine.continuation import (
    Continuations,
    decode_logprobs,
    encode_logprobs,
    pass_on_logprobs,
    unseen_logprobs,
)
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import DecodeParams, PriorOutput, digest_of, to_params
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.types import TransferId


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, num_blocks=80, arena_bytes=1 << 20, transfer_timeout_s=5.0)
    yield pair
    pair.close()


def continue_at(
    engine: Engine, name: str, tokens: list[int], kv_params: DecodeParams, **options: Any
) -> Any:
    return engine.add(name, tokens, params=to_params(kv_params), **options)


def hand_over(
    pair: Pair, tokens: list[int], prior_output: PriorOutput | None = None
) -> DecodeParams:
    """Prefill a prompt and push all of its KV; returns how to go on."""
    prefilled = pair.sent("a", tokens)
    return DecodeParams(prefilled.transfer, digest_of(tokens), prior_output)


def run(engine: Engine, name: str) -> list[int]:
    engine.run_until(lambda: name in engine.finished)
    return engine.outputs[name]


# -- prefill side ------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [CHUNK, CHUNK + 1])
def test_the_prefill_output_names_its_token_and_the_prompt(pair: Pair, num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    told = told_by(pair.prefill)
    pair.send("a", tokens)
    prefilled = pair.prefilled("a")
    assert prefilled.prior_output == PriorOutput([7])  # what the harness samples
    ending = told[-1].ending  # None if there was a single chunk
    assert (ending or prefilled).prompt_token_ids == tokens
    assert (ending or prefilled).digest == prefilled.digest
    assert not prefilled.is_final


@pytest.mark.parametrize(
    "ends", [{"max_tokens": 1}, {"stop": [7]}, {"window": True}], ids=lambda ends: next(iter(ends))
)
def test_a_first_token_that_ends_the_output_leaves_no_kv(pair: Pair, ends: dict[str, Any]) -> None:
    window = pair.prefill.config.model_config.max_model_len
    tokens = list(range(window - 1 if "window" in ends else 3 * CHUNK))
    pair.send("a", tokens)
    sampling = pair.prefill.scheduler.requests["a"].sampling_params
    sampling.max_tokens = ends.get("max_tokens", 4)
    sampling.stop_token_ids = ends.get("stop", [])
    prefilled = pair.prefilled("a")
    assert prefilled.is_final
    assert (prefilled.decode, prefilled.prior_output) == ("", PriorOutput([7]))
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.endpoint.take(
        CancelTransfer(TransferId("t-a"))
    )  # the router's, which expects no decode request
    pair.settle()


def test_logprobs_of_the_token_travel_with_it() -> None:
    logprobs = LogprobsLists(
        np.array([[7, 3]], dtype=np.int32),
        np.array([[-0.25, -np.inf]], dtype=np.float32),
        np.array([1], dtype=np.int32),
    )
    output = EngineCoreOutput("a", [7], logprobs)
    output.kv_transfer_params = {"tetri": {"prior_output": {"token_ids": [7], "logprobs": ""}}}
    pass_on_logprobs([output])
    back = decode_logprobs(output.kv_transfer_params["tetri"]["prior_output"]["logprobs"], [7], 10)
    for mine, theirs in zip(back[:3], logprobs[:3], strict=True):
        assert np.array_equal(mine, theirs)


def test_log_probabilities_of_a_whole_vocabulary_travel() -> None:
    """`logprobs=-1` of a large model: 32 bits count them."""
    size = 70_000
    text = text_of([[7, *range(size)]], np.zeros((1, size + 1), np.float32), [1])
    back = decode_logprobs(text, [7], size)
    assert back.logprob_token_ids.shape == (1, size + 1)


def text_of(ids: Any, values: Any, ranks: Any) -> str:
    return encode_logprobs(LogprobsLists(*map(np.asarray, (ids, values, ranks))))


@pytest.mark.parametrize(
    "text",
    [
        "!",
        "AAAA",
        text_of([[7, 1]], [[0, 0]], [0])[:-8],
        text_of([[6, 1]], [[0, 0]], [0]),  # another token's
        text_of([[7, -1]], [[0, 0]], [0]),
        text_of([[7, 10]], [[0, 0]], [0]),
        text_of([[7, 1]], [[0, np.nan]], [0]),
        text_of([[7, 1]], [[0, 0]], [-1]),
        text_of(np.zeros((1, 0)), np.zeros((1, 0)), [0]),
    ],
)
def test_wrong_logprobs_are_noticed(text: str) -> None:
    with pytest.raises(ProtocolError, match="log prob"):
        decode_logprobs(text, [7], 10)


# -- decode side --------------------------------------------------------------------


@pytest.mark.usefixtures("continues")
@pytest.mark.parametrize("num_tokens", [2 * CHUNK + 5, 4 * BLOCK])  # the latter fills its blocks
def test_a_prior_token_is_shown_first_and_only_the_next_is_computed(
    pair: Pair, num_tokens: int
) -> None:
    tokens = list(range(num_tokens))
    kv_params = hand_over(pair, tokens, PriorOutput([42]))
    request = continue_at(pair.decode, "b", tokens, kv_params, max_tokens=3)
    taken: list[int] = []
    while "b" not in pair.decode.finished:
        taken += pair.decode.step().num_scheduled_tokens.values()
        if request.status is RequestStatus.RUNNING:
            assert pair.decode.holds(request, len(tokens))
    assert pair.decode.outputs["b"] == [42, 7, 7]
    assert taken == [1, 1]  # no prompt token again
    pair.settle()


@pytest.mark.usefixtures("continues")
def test_lost_kv_costs_a_recomputation_and_no_token(pair: Pair) -> None:
    tokens = list(range(90))
    pair.decode.endpoint.receives._timeout_s = 0.0
    kv_params = DecodeParams(TransferId("never sent"), digest_of(tokens), PriorOutput([42]))
    continue_at(pair.decode, "b", tokens, kv_params, max_tokens=3)
    assert run(pair.decode, "b") == [42, 7, 7]
    pair.settle()


def test_choices_share_one_transfer(pair: Pair) -> None:
    tokens = list(range(3 * CHUNK))
    kv_params = hand_over(pair, tokens)
    requests = [
        continue_at(pair.decode, f"b{i}", tokens, kv_params, max_tokens=3) for i in range(4)
    ]
    pair.decode.run_until(lambda: len(pair.decode.finished) == 4)
    assert all(pair.decode.outputs[request.request_id] == [7] * 3 for request in requests)
    assert pair.decode.endpoint.receives.loads_failed == 0
    pair.settle()


def test_a_choice_that_comes_late_computes_what_the_cache_lacks(pair: Pair) -> None:
    tokens = list(range(3 * CHUNK))
    kv_params = hand_over(pair, tokens)
    continue_at(pair.decode, "b0", tokens, kv_params)
    run(pair.decode, "b0")
    continue_at(pair.decode, "b1", tokens, kv_params)
    assert max(pair.decode.step().num_scheduled_tokens.values()) <= BLOCK
    assert run(pair.decode, "b1")
    assert pair.decode.endpoint.receives.loads_failed == 0
    pair.settle()


def test_choices_that_leave_free_the_transfer(pair: Pair) -> None:
    tokens = list(range(3 * CHUNK))
    kv_params = hand_over(pair, tokens)
    for i in range(3):
        continue_at(pair.decode, f"b{i}", tokens, kv_params)
    for i in range(3):
        pair.decode.abort(f"b{i}")
    pair.settle()


@pytest.mark.usefixtures("continues")
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_a_grammar_accepts_a_token_that_comes_late_once(pair: Pair, compiled: str) -> None:
    tokens, accepted = list(range(3 * CHUNK)), list[int]()

    def accept(request: Any, token_ids: list[int]) -> bool:
        accepted.extend(token_ids)
        return True

    pair.decode.scheduler.structured_output_manager.accept_tokens = accept
    request = pair.receive("a", tokens, is_early=True)
    asked = SimpleNamespace(grammar="is there" if compiled == "before" else None)
    request.structured_output_request = asked
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    pair.decode.step()
    pair.sent("a", tokens)
    if compiled == "after":
        pair.decode.run_until(lambda: request.num_output_tokens)
        assert accepted == []
        asked.grammar = "is there"
    pair.end("a")
    assert pair.decode.outputs["a"] == accepted == [7] * 4
    assert pair.decode.endpoint.read_load().continued == 1


# -- what cannot be continued exactly --------------------------------------------------


def injections(
    *, is_v2_runner: bool = False, is_async: bool = False, device: str = "cpu", num_drafts: int = 0
) -> Continuations:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
    )
    scheduler: Any = SimpleNamespace(
        vllm_config=config, use_v2_model_runner=is_v2_runner, num_spec_tokens=num_drafts,
        max_model_len=64, structured_output_manager=None,
    )  # fmt: skip
    return Continuations(scheduler)


@pytest.mark.parametrize(
    ("sampling", "engine", "prior_output", "reason"),
    [
        ({"prompt_logprobs": 0}, {}, [42], "prompt_logprobs"),
        ({"logprobs": 2}, {}, [42], "logprobs_missing"),
        ({}, {"is_async": True}, [42], "async_on_v1"),
        ({"seed": 1}, {"device": "cuda"}, [42], "seed_on_v1_or_drafts"),
        ({"seed": 1}, {"num_drafts": 1, "is_v2_runner": True}, [42], "seed_on_v1_or_drafts"),
        ({"max_tokens": 1}, {}, [42], "nothing_left"),
        ({"max_tokens": 99}, {}, [42] * 61, "nothing_left"),  # with the prompt it fills the window
        ({}, {}, [100], "unknown_tokens"),
    ],
)
def test_what_is_not_exact_is_computed_again_and_counted(
    pair: Pair,
    sampling: dict[str, Any],
    engine: dict[str, bool],
    prior_output: list[int],
    reason: str,
) -> None:
    request = pair.decode.add("b", [1, 2, 3])
    request.sampling_params = SamplingParams(**{"max_tokens": 9, **sampling})
    request.max_tokens = request.sampling_params.max_tokens
    asked = injections(**engine)
    asked.begin(request, PriorOutput(prior_output))
    assert request.num_output_tokens == 0
    assert asked.refused == {reason: 1}
    assert not asked.entries


@pytest.mark.usefixtures("continues")
def test_many_prior_tokens_that_the_cache_knows_do_not_end_the_engine(pair: Pair) -> None:
    tokens, prior_output = list(range(30)), PriorOutput(list(range(40)))
    for name in ("a", "b"):
        kv_params = DecodeParams(TransferId(""), digest_of(tokens), prior_output, cached_tokens=12)
        continue_at(pair.decode, name, tokens, kv_params, max_tokens=42)
        assert run(pair.decode, name) == [*range(40), 7, 7]
        counted = pair.decode.counted[name]  # for its client; vLLM's metrics have it already
        assert (counted.num_prompt_tokens, counted.num_cached_tokens) == (0, 12)
    pair.settle()


def test_stand_ins_for_log_probabilities_are_taken() -> None:
    found = unseen_logprobs([3, 99, 0])
    assert found.logprob_token_ids.tolist() == [[3], [99], [0]]
    assert found.sampled_token_ranks.tolist() == [1, 1, 1]


def test_the_v2_runner_takes_everything_by_itself(pair: Pair) -> None:
    request = pair.decode.add("b", [1, 2, 3])
    request.sampling_params = SamplingParams(max_tokens=9, seed=1)
    asked = injections(is_v2_runner=True, is_async=True, device="cuda")
    asked.begin(request, PriorOutput([42]))
    assert list(request.output_token_ids) == [42]
