"""Stage B: stock vLLM and this package side by side, with vLLM's V2 model runner and asynchronous
scheduling. On a CPU `tests/runners` makes vLLM compute so, with Triton's interpreter."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from examples.benchmarks.faults import send
from examples.smollm2 import prepare
from tests.e2e.client import Answer, ask_all, struck, until
from tests.e2e.cluster import ByHand, Cluster, Stock, post, running, side_by_side
from tests.e2e.compare import difference, merged, replies_to
from tests.e2e.prompts import STREAM, chat, completion
from tests.gpu.catalogue import Skip
from tests.gpu.reuse import ROOT, run_pytest
from tests.models.families import FAMILIES
from tests.models.run import judge
from tests.tiny_model import tiny_model

SEEDED = {"temperature": 0.8, "seed": 11}
SHAPES: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"max_tokens": 1, "logprobs": 1},
    {**SEEDED, "logprobs": 0},
    {**SEEDED, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "min_tokens": 10},
    {"n": 2, **SEEDED},
]
PAIR = ("--prefill", "1", "--decode", "1")
TRIO = ("--prefill", "1", "--decode", "2")
# Two instances and a stock one share the GPU; float32 and one attention kernel, so that outputs do
# not depend on how many requests a step has. `tests/e2e/cluster.py` has the options before these.
ON_GPU = ("--gpu-memory-utilization", "0.2", "--attention-backend", "TRITON_ATTN")
ON_CPU = ("--max-model-len", "768", "--block-size", "32")
KINDS = ("Llama-3", "Qwen3-MoE", "Gemma-3-text", "GPT-OSS", "Mistral-v0.1", "Falcon-H1")
OF_EXPERTS = ("Qwen3-MoE", "GPT-OSS")
SUITE = (
    "equality", "shapes", "modes", "first_token", "disconnect", "conversations", "whole_routes",
    "pool", "failures", "flip", "head", "groups", "lora", "variants", "order", "cluster", "clients",
    "sigterm",
)  # fmt: skip
REST_S = 30.0
SLEPT_BYTES = 64 << 20  # least that sleep must give back of 128 MiB of KV


def contract(device: str, folder: Path) -> dict[str, Any]:
    """What this package relies on in the vLLM that is installed, and its schedulers' tests."""
    words = ["tests/engine/test_contract.py"]
    if device == "cuda":  # in the suite of a CPU host they are anyway
        words += ["tests/engine/test_handover.py", "tests/engine/test_continuation.py"]
    return run_pytest(folder, "-m", "not slow and not long and not e2e", *words)


def dummy(device: str, folder: Path) -> dict[str, Any]:
    """Weights that vLLM makes up."""
    return equality(tiny_model(), device, folder, ("--load-format", "dummy"))


def real(device: str, folder: Path) -> dict[str, Any]:
    """Weights that were trained: SmolLM2-135M."""
    try:
        model = prepare("float32")
    except FileNotFoundError as error:
        raise Skip(f"no weights here: {error}") from None
    return equality(model, device, folder, ())


def links(device: str, folder: Path) -> dict[str, Any]:
    """Outputs are stock's through the links, too, that `auto` does not choose on one host."""
    with ThreadPoolExecutor() as threads:
        folders = {kind: folder / kind for kind in ("ipc", "tcp")}
        for each in folders.values():
            each.mkdir()
        found = {
            kind: threads.submit(
                equality,
                tiny_model(),
                device,
                at,
                ("--load-format", "dummy"),
                ("--tetri-link", kind),
            )
            for kind, at in folders.items()
        }
    figures = {kind: each.result() for kind, each in found.items()}
    words = [f"{kind}: {each.pop('summary')}" for kind, each in figures.items()]
    return {**figures, "summary": "; ".join(words)}


def models(device: str, folder: Path) -> dict[str, Any]:
    """Families of models whose KV is in several groups, has states, or comes from experts, tiny and
    in float32: the answers of stock, and KV handed over."""
    has_moe = importlib.util.find_spec("vllm._moe_C_stable_libtorch") is not None  # not packed
    kinds = [each for each in KINDS if has_moe or each not in OF_EXPERTS]
    with ProcessPoolExecutor(3, get_context("spawn")) as processes:
        verdicts = dict(zip(kinds, processes.map(partial(judged, folder), kinds), strict=True))
    words = {name: str(each["split"]["verdict"]) for name, each in verdicts.items()}
    words |= {each: "left out" for each in KINDS if each not in kinds}
    figures = {"verdicts": verdicts, "summary": ", ".join(map(" ".join, words.items()))}
    if set(words.values()) - {"equal", "left out"}:
        raise Unequal(figures)
    return figures


class Unequal(AssertionError):
    """Not all answers were stock's."""

    def __init__(self, figures: dict[str, Any]) -> None:
        super().__init__(figures["summary"])
        self.figures = figures


def judged(folder: Path, name: str) -> dict[str, Any]:
    """The verdicts of `tests.models.run` on a family."""
    at = folder / name
    at.mkdir()
    return asyncio.run(judge(FAMILIES[name], "split", at, ON_GPU[:2]))


def suite(device: str, folder: Path) -> dict[str, Any]:
    """The end-to-end tests that do not depend on how a CPU computes."""
    files = [f"tests/e2e/test_{name}.py" for name in SUITE]
    words = ("-vv", "-n", "5", "--dist", "loadfile", "-m", "e2e and not long", *files)
    return run_pytest(folder, *words, TETRI_TEST_SERVE=" ".join(ON_GPU))


def equality(
    model: Path, device: str, folder: Path, serve: tuple[str, ...], ours_too: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Greedy and seeded requests, streamed and not: the same tokens, texts and log probabilities
    from one stock instance and through one prefill and one decode instance, which has the options
    `ours_too` besides."""
    options = (*options_for(device), *serve)
    asked = requests(4 if device == "cuda" else 1)
    with computing(device):
        stock = Stock(model, folder, serve=options)
        cluster = Cluster(model, folder, roles=PAIR, serve=(*options, *ours_too))
        with side_by_side(stock, cluster):
            theirs = asyncio.run(replies_to(stock.url, asked))
            ours = asyncio.run(replies_to(cluster.url, asked))
            rows = cluster.instances()
            cluster.rest(REST_S)
    for body, mine, other in zip(asked, ours, theirs, strict=True):
        assert mine.status == other.status == 200, (body, mine.raw, other.raw)
        found = difference(merged(mine), merged(other), tolerance=1e-3)
        assert not found, f"{body}: {found}"
    return {**counted(rows), "requests": len(asked), "computed": computed(cluster, device),
            "summary": f"{len(asked)} requests equal, {sent(rows)}"}  # fmt: skip


def requests(times: int) -> list[dict[str, Any]]:
    """Every shape with a short and a longer prompt, every other one streamed, and a chat."""
    shapes = [(shape, 63 + 11 * at) for at, shape in enumerate(SHAPES * times)]
    found = [
        completion(length, **{"max_tokens": 12, **shape}, **(STREAM if at % 2 else {}))
        for at, (shape, base) in enumerate(shapes)
        for length in (base % 300, 200 + base % 300)
    ]
    return [*found, chat(30, max_tokens=12, logprobs=True, top_logprobs=2, **STREAM)]


def options_for(device: str) -> tuple[str, ...]:
    return ON_GPU if device == "cuda" else ON_CPU


@contextmanager
def computing(device: str) -> Any:
    """What is started in the block computes with the V2 runner and asynchronous scheduling: as a
    GPU does by default, on a CPU through `tests/runners`."""
    before = os.environ["PYTHONPATH"]
    if device == "cpu":
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/runners"), before])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def computed(cluster: Cluster, device: str) -> str:
    """What the instances' logs say of the runner; on a CPU also of scheduling, with AssertionError
    if they are others than a GPU's. On a GPU vLLM chooses both."""
    found = ""
    for log in sorted(cluster.logs.glob("*code-*.log")):
        text = log.read_text()
        if device == "cpu":
            (found,) = set(re.findall("any_runner: (.*)", text))
            assert found == "TetriAsyncScheduler on v2", found
        else:
            found = "as vLLM chose: " + " ".join(
                re.findall(r"(?i)\bV2 model runner\b|async\w* scheduling is \w+", text)
            )
    return found


def counted(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What instances say of the hand-over; AssertionError if it did not happen."""
    decodes = [row for row in rows.values() if row["role"] == "decode"]
    assert sum(row["kv_loads_failed"] for row in decodes) == 0, "KV loads failed"
    assert sum(row["continued"] for row in decodes) > 0, "no request was continued from its KV"
    return {"kv_bytes_sent": sum(row["kv_bytes_sent"] for row in rows.values()),
            "continued": sum(row["continued"] for row in decodes)}  # fmt: skip


def sent(rows: dict[str, dict[str, Any]]) -> str:
    return f"{sum(row['kv_bytes_sent'] for row in rows.values()) / 1e6:.1f} MB handed over"


def kills(device: str, folder: Path) -> dict[str, Any]:
    """`kill -9` of a decode and then of the prefill instance: every stream ends as it would have,
    and all instances come back."""
    options, model = options_for(device), tiny_model()
    asked = [completion(50 + 9 * at, max_tokens=96, **STREAM) for at in range(4)]
    with computing(device):
        with running(Stock(model, folder, serve=options)) as stock:
            expected = asyncio.run(ask_all(stock.url, asked))
        with running(Cluster(model, folder, roles=TRIO, serve=options)) as cluster:
            seconds = asyncio.run(strike_both(cluster, asked, expected))
    return {"requests": len(asked), **seconds,
            "summary": f"2 kills, {seconds['resumed']:g} streams resumed"}  # fmt: skip


async def strike_both(
    cluster: Cluster, asked: list[Any], expected: list[Answer]
) -> dict[str, float]:
    """Kill each side while the requests are under way; then how long until all were ready again."""

    def kill_decode(seen: list[Answer]) -> None:
        send(cluster.processes(seen[0].decode), signal.SIGKILL)

    def kill_prefill(seen: list[Answer]) -> None:
        send(cluster.processes("prefill-0"), signal.SIGKILL)

    strikes: dict[str, Callable[[list[Answer]], None]] = {
        "decode": kill_decode, "prefill": kill_prefill}  # fmt: skip
    for side, strike in strikes.items():
        got = await struck(cluster.url, asked, strike)
        for mine, other in zip(got, expected, strict=True):
            assert mine.same_as(other), f"kill of {side}: {mine} != {other}"
    found = {"ready_again_s": await until(lambda: cluster.are_ready(3), "all are ready again", 180)}
    for mine, other in zip(await ask_all(cluster.url, asked), expected, strict=True):
        assert mine.same_as(other), f"after the kills: {mine} != {other}"
    found["resumed"] = await asyncio.to_thread(cluster.resumed)
    assert found["resumed"] > 0, "no stream was resumed"
    return found


def sleep(device: str, folder: Path) -> dict[str, Any]:
    """Both instances sleep and wake up: memory is given back, and outputs are as before."""
    import torch

    asked = [completion(200, **STREAM), completion(100, **SEEDED)]
    with running(ByHand(folder)) as cluster:
        for name in ("prefill", "decode"):
            cluster.start(name, name, tiny_model(), *options_for(device), "--enable-sleep-mode")
        cluster.wait("prefill", "decode")
        before = asyncio.run(ask_all(cluster.url, asked))
        cluster.rest(REST_S)
        awake = torch.cuda.mem_get_info(0)[0]
        urls = [row["url"] for row in cluster.instances().values()]
        for url in urls:
            post(f"{url}/sleep?level=1")
        freed = torch.cuda.mem_get_info(0)[0] - awake
        for url in urls:
            post(f"{url}/wake_up")
        after = asyncio.run(ask_all(cluster.url, asked))
    assert freed > SLEPT_BYTES, f"two sleeping instances gave back {freed} bytes"
    for mine, other in zip(after, before, strict=True):
        assert mine.same_as(other), f"after waking: {mine} != {other}"
    return {"freed_bytes": freed, "summary": f"{freed / 1e6:.0f} MB given back"}
