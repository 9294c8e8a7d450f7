"""What goes to the instances and what comes back when everything works."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fakes import PROMPT_TOKENS, FakeInstance, cluster, eventually, metric, pair
from vllm_tetri.handover import DecodeParams, PrefillParams
from vllm_tetri.types import InstanceId, Role

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_a_request_goes_through_both_instances(path: str) -> None:
    async with cluster(*pair()) as made:
        status, answer, headers = await made.ask(path, messages=MESSAGES)

        assert (status, answer["by"], answer["kind"]) == (200, "d", "injected")
        assert (headers["x-tetri-prefill"], headers["x-tetri-decode"]) == ("p", "d")
        assert [each[0] for each in made["p"].calls + made["d"].calls] == [path, path]
        prefill, decode = made["p"].leg(), made["d"].leg()
        assert isinstance(prefill, PrefillParams)
        assert decode == DecodeParams(prefill.transfer, "d1", prefill=InstanceId("p"))
        assert prefill.request == headers["x-request-id"]
        assert made["p"].calls[0][2]["X-Request-Id"] == headers["x-request-id"]
        assert made["p"].cancelled == []
        assert await metric(made, "tetri_transfers_cancelled_total") == 0
        assert await made.table() == []


async def test_a_stream_is_relayed_byte_for_byte() -> None:
    async with cluster(*pair()) as made:
        status, answer, headers = await made.ask(stream=True, stream_options={"include_usage": 1})

        expected = b"".join(b'data: {"index": %d}\n\n' % index for index in range(3))
        assert (status, answer) == (200, expected + b"data: [DONE]\n\n")
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["x-tetri-decode"] == "d"
        await eventually(lambda: len(made.scheduler.table) == 0)
        assert made["p"].cancelled == []
        assert await metric(made, "tetri_transfers_cancelled_total") == 0


async def test_the_prefill_leg_is_the_same_request_without_a_stream() -> None:
    async with cluster(*pair()) as made:
        sent = {
            "model": "tiny",
            "messages": MESSAGES,
            "prompt": "hello",
            "max_tokens": 5,
            "temperature": 0.5,
            "seed": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "priority": -7,
        }
        await made.ask(CHAT, **sent)

        prefill, decode = made["p"].calls[0][1], made["d"].calls[0][1]
        del prefill["kv_transfer_params"], decode["kv_transfer_params"]
        assert decode == {**sent, "return_token_ids": True}
        del sent["stream_options"]
        assert prefill == {**sent, "stream": False}


@pytest.mark.parametrize(
    "body",
    [
        {"n": "two"},
        {"n": 0},
        {"n": True},
        {"best_of": 2},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 3},
        {"prompt_embeds": "abc"},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": None},
        {"prompt": {"wrong": 1}},
        {"prompt": []},
        {"stream": "yes", "prompt": 5},
        {"stream": True, "stream_options": "abc"},
        {"stream": True, "stream_options": {"include_usage": "maybe"}},
        {"kv_transfer_params": "x"},
    ],
)
async def test_what_cannot_be_split_goes_to_one_instance_unchanged(body: dict[str, object]) -> None:
    async with cluster(*pair()) as made:
        await made.ask(**body)

        assert made["p"].calls == []
        assert made["d"].calls[0][1] == {"model": "tiny", "prompt": "hello", **body}


@pytest.mark.parametrize(("num_tokens", "is_split"), [(100, True), (125, True), (126, False)])
async def test_a_prompt_that_no_arena_holds_is_not_split(num_tokens: int, is_split: bool) -> None:
    """A prompt that is but a little too long is split: the prefill instance knows its length."""
    small, large = FakeInstance("small", Role.DECODE), FakeInstance("d", Role.DECODE)
    small.abilities["arena_tokens"], large.abilities["arena_tokens"] = 5, 100
    async with cluster(*pair()[:1], small, large) as made:
        _, answer, headers = await made.ask(prompt=list(range(num_tokens)))

        assert bool(made["p"].calls) is is_split
        assert (answer["kind"] == "whole") is not is_split
        assert headers["x-tetri-decode"] in ("d", "small")


async def test_a_single_instance_serves_the_request_whole() -> None:
    async with cluster(FakeInstance("b", Role.BOTH)) as made:
        status, answer, headers = await made.ask()

        assert (status, answer["kind"], made["b"].leg()) == (200, "whole", None)
        assert (headers["x-tetri-prefill"], headers["x-tetri-decode"]) == ("b", "b")


async def test_a_declined_hand_over_is_computed_again_by_one_instance() -> None:
    async with cluster(FakeInstance("p", Role.PREFILL), FakeInstance("d", Role.DECODE)) as made:
        status, answer, headers = await made.ask()

        assert (status, answer["by"], answer["kind"]) == (200, "d", "whole")
        assert (headers["x-tetri-prefill"], headers["x-tetri-decode"]) == ("d", "d")


async def test_the_model_may_be_left_out_when_there_is_only_one() -> None:
    async with cluster(*pair()) as made:
        async with made.client.post(made.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200
        assert "model" not in made["p"].calls[0][1]


async def test_a_clients_request_id_is_kept_when_it_is_sane() -> None:
    async with cluster(*pair()) as made:
        for wanted, is_kept in (("mine-1", True), ("x" * 500, False)):
            sent = {"X-Request-Id": wanted, "Authorization": "Bearer key", "x-vllm-priority": "3"}
            _, _, headers = await made.ask(headers=sent)
            assert (headers["x-request-id"] == wanted) is is_kept
        assert made["d"].calls[0][2]["Authorization"] == "Bearer key"
        assert made["p"].calls[0][2]["X-Vllm-Priority"] == "3"


async def test_the_request_table_follows_a_request() -> None:
    async with cluster(*pair()) as made:
        made["d"].chunk_gate.clear()
        asking = asyncio.create_task(made.ask(headers={"X-Request-Id": "mine"}, stream=True))
        table = made.scheduler.table
        await eventually(lambda: any(entry.generated for entry in table))
        (entry,) = await made.table()
        assert entry.pop("age_s") >= 0
        assert entry == {
            "id": "mine",
            "phase": "decoding",
            "prefill": "p",
            "decode": "d",
            "prompt_tokens": PROMPT_TOKENS,
            "predicted": None,
            "generated": 1,
            "mirror": None,
            "reason": "least of 1: 0 tokens queued",
        }
        made["d"].chunk_gate.set()
        assert (await asking)[0] == 200
        assert await made.table() == []
