"""Two prefill and two decode instances: every class of load, joining and leaving."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import Answer, ask, ask_all
from tests.e2e.cluster import (
    ARENA_BYTES,
    CHUNK,
    SERVE,
    Cluster,
    Process,
    Stock,
    free_port,
)
from tests.e2e.prompts import completion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]  # six instances on two cores

# The paper's classes (section 5.1.1), scaled to the tiny model: prompts of less than a
# chunk or of many, answers of a few tokens or of many.
LIGHT_PROMPTS, HEAVY_PROMPTS = (9, 20, 33, 47, 58, 63), (300, 450, 600, 801, 1000, 1300)
LIGHT_ANSWER, HEAVY_ANSWER = 6, 60
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
LOAD = 3  # requests at a time while instances come and go


def of_class(prompts: tuple[int, ...], max_tokens: int) -> list[dict[str, Any]]:
    """Six requests, every other one streamed."""
    return [
        completion(n, max_tokens=max_tokens, **(STREAM if index % 2 else {}))
        for index, n in enumerate(prompts)
    ]


CLASSES = {
    "LPLD": of_class(LIGHT_PROMPTS, LIGHT_ANSWER),
    "LPHD": of_class(LIGHT_PROMPTS, HEAVY_ANSWER),
    "HPLD": of_class(HEAVY_PROMPTS, LIGHT_ANSWER),
    "HPHD": of_class(HEAVY_PROMPTS, HEAVY_ANSWER),
}
CLASSES["mixed"] = [body for bodies in CLASSES.values() for body in bodies[1::2]]


class Joiner(Process):
    """One more decode instance, started by hand."""

    def __init__(self, model: Path, folder: Path, cluster: dict[str, str]) -> None:
        super().__init__(
            ["vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--role", "decode",
             "--port", str(free_port()), "--tetri-instance", "decode-2",
             "--tetri-control", cluster["control"], "--tetri-secret-file", cluster["secret_file"],
             "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK)],
            folder / "decode-2.log",
            **PASSIVE,
        )  # fmt: skip

    def says(self, words: str) -> bool:
        assert self.child.poll() is None, self.log.read_text()[-4000:]
        return words in self.log.read_text()


class Load:
    """Clients that ask for all classes in turn, and what they got."""

    def __init__(self, url: str, expected: dict[int, Answer]) -> None:
        self._url = url
        self._expected = expected
        self._next = cycle(enumerate(CLASSES["mixed"]))
        self.num_answers = 0
        self.decodes: set[str] = set()
        self.wrong: list[str] = []

    async def client(self) -> None:
        while True:
            index, body = next(self._next)
            answer = await ask(self._url, body)
            self.num_answers += 1
            self.decodes.add(answer.headers.get("x-tetri-decode", ""))
            if not answer.same_as(self._expected[index]):
                self.wrong.append(f"{index}: {answer} != {self._expected[index]}")

    async def until_used(self, name: str) -> None:
        self.decodes.discard(name)
        await eventually(lambda: name in self.decodes, f"{name} has decoded something")

    async def go_on(self) -> None:
        """Everything that is under way now, and more, is answered."""
        wanted = self.num_answers + 3 * LOAD
        await eventually(lambda: self.num_answers >= wanted, "clients are served")


@asynccontextmanager
async def load(url: str, expected: dict[int, Answer]) -> AsyncIterator[Load]:
    made = Load(url, expected)
    clients = [asyncio.create_task(made.client()) for _ in range(LOAD)]
    try:
        yield made
        assert not any(client.done() for client in clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def eventually(condition: Any, what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.05)


async def leave(cluster: Cluster, name: str, *options: str) -> tuple[int, str]:
    """`vllm-tetri leave`: its status, and what it says."""
    words = [sys.executable, "-m", "vllm_tetri.cli", "leave", name, "--url", cluster.url, *options]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def processes_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    (pid,) = (row["pid"] for row in cluster.facts["instances"] if row["id"] == name)
    guard = psutil.Process(pid)
    return [guard, *guard.children(recursive=True)]


@pytest.mark.parametrize("name", CLASSES)
async def test_a_class_of_load_is_answered_as_by_stock(
    single: Stock, many: Cluster, name: str
) -> None:
    asked = CLASSES[name]
    ours = await ask_all(many.url, asked)
    theirs = await ask_all(single.url, asked)
    for mine, its, body in zip(ours, theirs, asked, strict=True):
        assert its.token_ids
        assert mine.same_as(its), f"{len(body['prompt'])}: {mine} != {its}"
        assert mine.headers["x-tetri-prefill"].startswith("prefill-")
        assert mine.headers["x-tetri-decode"].startswith("decode-")


async def test_every_instance_takes_part(many: Cluster) -> None:
    for _ in range(3):
        await ask_all(many.url, CLASSES["mixed"])
    instances = many.instances()
    assert set(instances) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    for name, row in instances.items():
        assert row["prefills_done" if row["role"] == "prefill" else "decodes_done"] > 0, name


async def test_instances_join_and_leave_under_load(
    single: Stock, many: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    answers = [await ask(single.url, body) for body in CLASSES["mixed"]]
    joiner = Joiner(tiny_llama, tmp_path, many.facts)
    below = [processes_of(many, name) for name in ("decode-0", "prefill-1")]
    try:
        # Importing takes longest and has nothing to do with the cluster.
        await eventually(lambda: joiner.says("Starting to load model"), "it loads")
        async with load(many.url, dict(enumerate(answers))) as under_load:
            await eventually(
                lambda: many.instances().get("decode-2", {}).get("state") == "ready", "it joins"
            )
            await under_load.until_used("decode-2")
            for name in ("decode-0", "prefill-1"):
                status, said = await leave(many, name)
                assert (status, said.splitlines()[-1]) == (0, f"{name} has left")
                await under_load.go_on()
            below.append(joiner.tree())
            assert (await leave(many, "decode-2"))[0] == 0
            assert await asyncio.to_thread(joiner.child.wait, 30) == 0, joiner.log.read_text()
            await under_load.go_on()
        assert under_load.wrong == []
    finally:
        joiner.stop()
    assert set(many.instances()) == {"prefill-0", "decode-1"}
    await eventually(
        lambda: not any(each.is_running() for tree in below for each in tree), "nothing is left"
    )
    said = many.log.read_text()
    for name in ("decode-0", "prefill-1"):
        assert re.search(rf"^{name} +left", said, re.MULTILINE)
        assert not re.search(rf"^{name} +ended", said, re.MULTILINE)


async def test_the_last_of_its_kind_stays_unless_it_is_forced(single: Stock, many: Cluster) -> None:
    for name in [each for each in many.instances() if each not in ("prefill-0", "decode-1")]:
        assert (await leave(many, name))[0] == 0
    status, said = await leave(many, "decode-1")
    assert (status, "is the last instance for decode" in said) == (1, True)
    status, said = await leave(many, "nobody")
    assert (status, "there is no instance 'nobody'" in said) == (1, True)

    long = completion(20, max_tokens=1500, **STREAM)
    expected = await ask(single.url, long)
    asking = asyncio.create_task(ask(many.url, long))
    await eventually(lambda: many.instances()["decode-1"]["running"], "it decodes")
    status, said = await leave(many, "decode-1", "--force", "--deadline", "0.3")
    assert (status, "decode-1 has left; cut off: 1 unfinished requests" in said) == (0, True), said
    answer = await asking
    assert answer.error is None
    assert answer.same_as(expected)  # what was cut off went on

    alone = await ask(many.url, completion(20))
    assert (alone.status, alone.headers["x-tetri-decode"]) == (200, "prefill-0")
