"""A rolling update with the commands, hooks and probes that the Helm chart renders.

Every pod is a process on a host of its own (network namespaces; run it as root). What Kubernetes
itself does, such as when it starts and ends which pod, is the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, load, stock_answers, until
from tests.e2e.cluster import get
from tests.e2e.pods import Pod, Release, values
from tests.e2e.prompts import STREAM, chat, completion
from tests.faults.hosts import hosts, require_hosts
from tests.needed import shared_memory_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]

BODIES: list[dict[str, Any]] = [
    *[completion(20 + 90 * index, max_tokens=200, **STREAM) for index in range(3)],
    chat(30, max_tokens=150, ignore_eos=True, **STREAM),
    completion(90, max_tokens=100),
]
HOSTS = ("here", "router-0", "router-1", "router-2", "prefill-0", "decode-0", "prefill-1",
         "decode-1")  # fmt: skip


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    require_hosts()
    shared_memory_of("1m")
    with hosts(*HOSTS) as net:
        made = Release(net, tmp_path)
        try:
            yield made
        finally:
            made.stop()


def pair_of(answer: Answer) -> tuple[str, str]:
    return answer.headers.get("x-tetri-prefill", ""), answer.decode


async def until_split(url: str, *pair: str) -> None:
    """Wait until a router lets these two share a request."""
    async with asyncio.timeout(60):
        while pair_of(await ask(url, completion(1, max_tokens=2))) != pair:
            await asyncio.sleep(0.1)


async def ends_in_time(pod: Pod) -> None:
    hook, status, seconds = await asyncio.to_thread(pod.terminate)
    assert (hook, status) == (0, 0), pod.log_end()
    print(f"\n{pod.log.stem} is gone after {seconds:.1f} s")


async def test_another_revision_takes_over_under_load(
    release: Release, tiny_llama: Path, tmp_path: Path
) -> None:
    expected = await asyncio.to_thread(stock_answers, tiny_llama, tmp_path, BODIES)
    release.upgrade(**values(tiny_llama, "one"))
    for name in ("router-0", "router-1", "prefill-0", "decode-0"):
        release.start(name[:-2], name)
    pods = release.pods
    for name in pods:
        await until(pods[name].is_ready, f"{name} is ready", 240)
    url = release.url
    for address in ("router-0", "router-1"):  # both know both, by one name
        await until_split(f"http://{pods[address].address}:8000", "llm-prefill-0", "llm-decode-0")

    release.upgrade(**values(tiny_llama, "two"))
    async with load(url, BODIES, expected, len(BODIES)) as clients:
        await clients.more(len(BODIES))
        new = release.start("decode", "decode-1")
        await until(new.is_ready, "decode-1 is ready", 240)
        await until(lambda: release.state_of("llm-decode-1") == "ready", "decode-1 is known")
        await clients.more(len(BODIES))
        differences = (await asyncio.to_thread(get, f"{url}/tetri/v1/instances"))["apart"]
        assert len(differences) == 1
        assert "differ in revision" in differences[0]
        await ends_in_time(pods["decode-0"])
        await clients.more(len(BODIES))

        new = release.start("prefill", "prefill-1")
        await until(new.is_ready, "prefill-1 is ready", 240)
        await until_split(url, "llm-prefill-1", "llm-decode-1")
        await ends_in_time(pods["prefill-0"])
        await clients.more(len(BODIES))

        router = release.start("router", "router-2")
        await until(router.is_ready, "router-2 is found by instances", 60)
        await ends_in_time(pods["router-0"])
        release.publish()
        await until_split(release.url, "llm-prefill-1", "llm-decode-1")
        await clients.more(len(BODIES))
    print(f"{len(clients.all)} requests")
    assert (clients.wrong, clients.failed) == ([], [])
    pairs = {pair_of(each) for each in clients.all}
    print(sorted(pairs))
    split = {pair for pair in pairs if all(pair) and pair[0] != pair[1]}
    assert split == {("llm-prefill-0", "llm-decode-0"), ("llm-prefill-1", "llm-decode-1")}
