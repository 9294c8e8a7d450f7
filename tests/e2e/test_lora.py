"""LoRA adapters: requests of one are split, and equal to those of stock vLLM; adapters come and go
while a cluster serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import ask, ask_all, split_once
from tests.e2e.cluster import MODEL, Cluster, Stock, get, side_by_side
from tests.e2e.compare import ask_raw
from tests.e2e.prompts import STREAM, completion
from tests.tiny_model import ADAPTER_RANK, make_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STATIC, LATER = "tuned", "later"
LENGTHS = (5, 64, 200, 700)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    one, other = (
        make_adapter(tiny_llama, folder / str(seed), ["o_proj"], scale=1.0, seed=seed)
        for seed in (1, 2)
    )
    return one, other


@pytest.fixture(scope="module")
def both(
    tiny_llama: Path, adapters: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stock, Cluster]]:
    folder = tmp_path_factory.mktemp("lora")
    serve = (
        "--enable-lora", "--max-lora-rank", str(ADAPTER_RANK), "--max-loras", "2",
        "--lora-modules", f"{STATIC}={adapters[0]}",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        stock = Stock(tiny_llama, folder, serve=serve)
        cluster = Cluster(tiny_llama, folder, serve=serve)
        with side_by_side(stock, cluster) as pair:
            yield pair
            cluster.audit()


async def equal(both: tuple[Stock, Cluster], *models: str) -> dict[str, list[str]]:
    """Ask for every model, all at once; return the texts by model."""
    stock, cluster = both
    asked = [
        completion(tokens, model=model, **(STREAM if tokens == 200 else {}))
        for model in models
        for tokens in LENGTHS
    ]
    texts: dict[str, list[str]] = {model: [] for model in models}
    await split_once(cluster)
    for body, reply in zip(asked, await ask_all(cluster.url, asked), strict=True):
        assert reply.status == 200
        theirs = await ask(stock.url, body)
        assert reply.same_as(theirs), (
            body["model"],
            len(body["prompt"]),
            reply.token_ids,
            theirs.token_ids,
        )
        assert reply.headers["x-tetri-prefill"] == "prefill-0"
        assert reply.decode == "decode-0"
        texts[body["model"]].append(reply.text)
    return texts


async def test_requests_of_an_adapter_are_handed_over(both: tuple[Stock, Cluster]) -> None:
    texts = await equal(both, MODEL, STATIC)
    assert all(one != other for one, other in zip(*texts.values(), strict=True))
    decode = both[1].instances()["decode-0"]
    assert decode["prompt_tokens_done"] < len(texts) * len(LENGTHS) * 16  # it computed no prompt
    assert decode["kv_loads_failed"] == 0


async def test_adapters_come_and_go(
    both: tuple[Stock, Cluster], adapters: tuple[Path, Path]
) -> None:
    order = {"lora_name": LATER, "lora_path": str(adapters[1])}

    async def on_both(path: str, body: Any) -> None:
        ours, theirs = [await ask_raw(each.url, path, body) for each in reversed(both)]
        assert (ours.status, ours.raw) == (theirs.status, theirs.raw)

    async def lists() -> None:
        ours, theirs = [get(f"{each.url}/v1/models")["data"] for each in both]
        kept = ("id", "root", "parent", "max_model_len")
        assert [[each[name] for name in kept] for each in ours[1:]] == [
            [each[name] for name in kept] for each in theirs[1:]
        ]

    await lists()
    await on_both(UNLOAD, {"lora_name": LATER})
    await on_both(LOAD, order)
    await lists()
    await on_both(LOAD, order)  # vLLM refuses it
    # Beside requests of as many adapters as there are slots, stock vLLM computes those of the base
    # model on CPU with one of the adapters.
    texts = await equal(both, STATIC, LATER) | await equal(both, MODEL)
    assert len({each[-1] for each in texts.values()}) == len(texts)
    await on_both(UNLOAD, {"lora_name": LATER})
    await lists()
    for each in both:
        assert (await ask(each.url, completion(5, model=LATER))).status == 404
    await on_both(LOAD, {"lora_name": LATER, "lora_path": "/nothing"})
    await equal(both, STATIC)
    await equal(both, MODEL)


async def test_other_content_of_the_same_name_is_computed_where_it_is(
    both: tuple[Stock, Cluster], adapters: tuple[Path, Path]
) -> None:
    """An instance has another adapter by that name: KV of the one is of no use to the other."""
    cluster = both[1]
    urls = {
        each["id"]: each["url"] for each in get(f"{cluster.url}/tetri/v1/instances")["instances"]
    }
    for name, adapter in zip(("prefill-0", "decode-0"), adapters, strict=True):
        loaded = await ask_raw(urls[name], LOAD, {"lora_name": "mixed", "lora_path": str(adapter)})
        assert loaded.status == 200
    expected = {
        name: (await ask(url, completion(200, model="mixed"))).text for name, url in urls.items()
    }
    assert len({*expected.values()}) == len(expected)
    async with asyncio.timeout(10):  # the router asks instances at most once a second
        while (await ask(cluster.url, completion(5, model="mixed"))).status == 404:
            await asyncio.sleep(0.1)
    for _ in range(4):
        reply = await ask(cluster.url, completion(200, model="mixed"))
        assert reply.status == 200, reply
        assert reply.text == expected[reply.decode]
    for url in urls.values():
        assert (await ask_raw(url, UNLOAD, {"lora_name": "mixed"})).status == 200
