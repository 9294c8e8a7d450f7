"""Prompts with images: which prompts are the same, and who computes the images."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.engine.harness import Engine
from tests.engine.pair import Pair
from vllm_tetri.engine.identity import prompt_digest
from vllm_tetri.handover import DecodeParams, PriorOutput, digest_of, to_params
from vllm_tetri.types import TransferId

IMAGE_TOKENS = 40
TOKENS = [5] * 30 + [99] * IMAGE_TOKENS + [6] * 30 + [99] * IMAGE_TOKENS + [7] * 60


def image(name: str, offset: int, length: int = IMAGE_TOKENS) -> MultiModalFeatureSpec:
    data = MultiModalKwargsItem.dummy()
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset, length), name)


def images(first: str, second: str) -> list[MultiModalFeatureSpec]:
    return [image(first, 30), image(second, 100)]


@pytest.fixture
def pair(shm_pair: Pair) -> Iterator[Pair]:
    for engine in (shm_pair.prefill, shm_pair.decode):
        enable_encoder(engine)
    yield shm_pair
    shm_pair.settle()


def enable_encoder(engine: Engine) -> None:
    """As if the model had one."""
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    engine.scheduler.max_num_encoder_input_tokens = 1000


def test_the_digest_of_a_prompt_names_its_media_and_their_places() -> None:
    alike = [
        (),
        [("a", 30, 40), ("b", 100, 40)],
        [("b", 30, 40), ("a", 100, 40)],
        [("a", 30, 40), ("a", 100, 40)],
        [("a", 30, 40)],
        [("a", 31, 40), ("b", 100, 40)],
        [("a", 30, 39), ("b", 100, 40)],
    ]
    digests = [digest_of(TOKENS, media) for media in alike]
    assert len(set(digests)) == len(alike)
    assert digests[0] == digest_of(TOKENS)
    request: Any = SimpleNamespace(
        prompt_token_ids=TOKENS, mm_features=images("a", "b"), lora_request=None
    )
    assert prompt_digest(request) == digests[1]
    request = SimpleNamespace(prompt_token_ids=TOKENS, mm_features=[], lora_request=None)
    assert prompt_digest(request) == digests[0]


@pytest.mark.parametrize("is_early", [False, True])
def test_only_the_prefill_instance_encodes(pair: Pair, is_early: bool) -> None:
    media = images("a", "b")
    if is_early:
        pair.send("x", TOKENS, media=media)
        request = receive(pair, media, digest_of_sent(pair), None, is_early=True)
        pair.prefilled("x")
        pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    else:
        prefilled = pair.sent("x", TOKENS, media=media)
        request = receive(pair, media, prefilled.digest, prefilled.prior_output)
    pair.decode.run_until(lambda: request.num_output_tokens >= 2)
    assert pair.decode.holds(request, len(TOKENS))
    assert pair.decode.endpoint.receives.loads_done == 1
    assert (pair.prefill.encoded, pair.decode.encoded) == (["a", "b"], [])
    pair.end("x")
    assert pair.decode.encoded == []


def test_a_preempted_decode_encodes_its_media_again(pair: Pair) -> None:
    """Though it came with computed media, which vLLM leaves out for the runner."""
    media = images("a", "b")
    prefilled = pair.sent("x", TOKENS, media=media)
    request = receive(pair, media, prefilled.digest, prefilled.prior_output)
    pair.decode.run_until(lambda: request.num_output_tokens >= 2)
    scheduler = pair.decode.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    pair.decode.finish_steps()
    assert scheduler.reset_prefix_cache()
    pair.end("x")
    assert pair.decode.encoded == ["a", "b"]


@pytest.mark.parametrize("is_early", [False, True])
def test_another_image_of_the_same_size_is_another_prompt(pair: Pair, is_early: bool) -> None:
    """Neither its KV nor its first token is used."""
    prefilled = pair.sent("x", TOKENS, media=images("a", "b"))
    prior_output = None if is_early else PriorOutput([42])
    receive(pair, images("a", "c"), prefilled.digest, prior_output, is_early=is_early)
    pair.end("x")
    assert pair.decode.outputs["x"] == [7] * 4
    assert pair.decode.encoded == ["a", "c"]
    assert pair.decode.endpoint.receives.loads_done == 0
    assert pair.decode.endpoint.receives.loads_failed == 1


@pytest.mark.usefixtures("continues")
def test_prior_output_of_another_image_is_not_continued(pair: Pair) -> None:
    """A stream that broke goes on here, and its image has changed meanwhile."""
    digest, prior_output = digest_of(TOKENS, [("a", 30, IMAGE_TOKENS)]), PriorOutput([42, 43])
    params = DecodeParams(TransferId(""), digest, prior_output)
    for name in ("a", "b"):
        pair.decode.add(name, TOKENS, params=to_params(params), media=[image(name, 30)])
        pair.end(name)
    assert pair.decode.outputs == {"a": [42, 43, 7, 7], "b": [7] * 4}


def test_blocks_of_another_image_are_no_prefix(pair: Pair) -> None:
    """What the decode instance has of other prompts counts up to the first difference."""
    for name, other in (("x", "b"), ("y", "c")):
        media = images("a", other)
        prefilled = pair.sent(name, TOKENS, media=media)
        receive(pair, media, prefilled.digest, prefilled.prior_output, name)
        pair.end(name)
    assert pair.prefill.encoded == ["a", "b", "c"]
    assert pair.prefill.counted["y"].num_cached_tokens == 96  # whole blocks before the second
    assert pair.decode.endpoint.receives.loads_done == 2


def receive(
    pair: Pair,
    media: list[Any],
    digest: str,
    prior_output: PriorOutput | None,
    name: str = "x",
    **options: Any,
) -> Any:
    return pair.receive(
        name, TOKENS, digest=digest, prior_output=prior_output, media=media, **options
    )


def digest_of_sent(pair: Pair) -> str:
    return prompt_digest(pair.prefill.scheduler.requests["x"])
