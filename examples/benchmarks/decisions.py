"""CPU time of decisions, without any engine: a dispatch, a router's placement of a conversation's
next turn, and what is done once per view.

Each decision is timed several times over the same inputs, and the quickest counts: what else runs
on the machine only adds.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from examples.benchmarks.cluster import Site, conditions
from examples.benchmarks.figures import Results
from vllm_tetri.messages import NAME_BYTES, CacheReport, RequestChain
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.policy.cluster import ClusterTable, Need
from vllm_tetri.policy.dispatch import DISPATCHES, GRACE_S, DecodeCandidates, choose_decode
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.route import Route
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import ApiRequest, parse_request
from vllm_tetri.router.table import RequestTable, Shares
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Mode,
    RequestId,
    Role,
)

SIZES = (10, 100, 1000)
BLOCKS = 10_000
KV_BYTES_PER_TOKEN = 100_000
OWN_DISPATCHES = 8  # since the newest report
WARM_UP = 20
# Which of 50 instances have free blocks, and which free arena.
CLUSTERS = {
    "all have capacity": (range(50), range(50)),
    "1 in 50 has capacity": (range(1), range(1)),
    "none has capacity": (range(0), range(50)),
    "blocks here, arena there": (range(25), range(24, 50)),
}


def info(name: str, role: Role) -> InstanceInfo:
    """Describe an instance of the one model."""
    return InstanceInfo(
        id=InstanceId(name), url="http://127.0.0.1:1", role=role, models=("model",),
        kv_endpoint=f"{name}:1", identity={"model": "model"}, max_model_len=4096, block_size=16,
        pid=1, root="m",
    )  # fmt: skip


def view_of(size: int, cluster: str, rng: Random) -> ClusterView:
    """Draw the loads of `size` decode instances."""
    with_blocks, with_arena = CLUSTERS[cluster]
    instances = []
    for index in range(size):
        load = InstanceLoad(
            blocks_total=BLOCKS,
            blocks_used=BLOCKS - rng.randint(5000, 9000) * (index % 50 in with_blocks),
            arena_total_bytes=1 << 30,
            arena_used_bytes=(1 << 30) - rng.randint(1 << 28, 1 << 29) * (index % 50 in with_arena),
            heavy=rng.randrange(100),
            light=rng.randrange(100),
        )
        own = info(f"decode-{index}", Role.DECODE)
        instances.append(InstanceView(own, InstanceState.READY, load, 0.0))
    return ClusterView("router", 1, tuple(instances))


def draw_need(rng: Random) -> Need:
    """Draw what a request needs."""
    prompt_tokens = rng.randint(50, 1000)
    return Need(prompt_tokens, rng.randint(1, 600), prompt_tokens * KV_BYTES_PER_TOKEN)


def timed(decide: Callable[[], object], count: int) -> list[float]:
    """Return CPU microseconds of each call, without the first ones."""
    found = []
    for _ in range(count + WARM_UP):
        began = time.thread_time_ns()
        decide()
        found.append((time.thread_time_ns() - began) / 1e3)
    return found[WARM_UP:]


def dispatches(size: int, cluster: str, count: int, policy: str, seed: int) -> list[float]:
    """Time dispatches in one state of the cluster."""
    rng = Random(seed)
    state, me = ClusterState(GRACE_S), info("prefill-0", Role.PREFILL)
    state.observe(TableMaker().make(view_of(size, cluster, rng), 0.0))
    for _ in range(OWN_DISPATCHES):
        state.record_sent(None, InstanceId(f"decode-{rng.randrange(size)}"), Need(1, 1, 1), 0.0)
    needs = iter([draw_need(rng) for _ in range(count + WARM_UP)])
    chosen = DISPATCHES[policy]

    def decide() -> object:
        need = next(needs)
        return choose_decode(DecodeCandidates(state, me, need, (), rng), need, chosen)

    return timed(decide, count)


def turn(user: int, num_messages: int) -> ApiRequest:
    """Parse a user's turn of a chat with messages of 1 KB."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": f"{user} {number} " + 1000 * "x"}
        for number in range(num_messages)
    ]
    raw = msgspec.json.encode({"model": "model", "messages": messages, "max_tokens": 200})
    return parse_request("/v1/chat/completions", raw, {})


def namings(count: int) -> list[float]:
    """Time what names the starts of a prompt."""
    requests = iter([turn(user, 9) for user in range(count + WARM_UP)])
    return timed(lambda: next(requests).starts, count)


def placements(size: int, mode: Mode, count: int, seed: int) -> list[float]:
    """Time where a router sends requests, of each of which two instances hold the first blocks."""
    rng, seqs = Random(seed), [0] * size
    view = view_of(size, "all have capacity", rng)
    roles = (Role.PREFILL, Role.DECODE)
    instances = [
        replace(each, info=replace(each.info, role=roles[i % 2]))
        for i, each in enumerate(view.instances)
    ]
    view = replace(view, instances=tuple(instances))
    shares = Shares(RequestTable(), limit_each=inf, num_clients=0)
    placer = Placer(
        lambda: view, shares, objective=NO_OBJECTIVE, refuses_late=False, max_queue_delay_s=1e9
    )
    placer.mode = mode
    for user in range(count + WARM_UP):
        entry, holders = RequestId(f"r{user}"), [2 * rng.randrange(size // 2) + i for i in range(2)]
        names = b"".join((user << 16 | each).to_bytes(NAME_BYTES, "big") for each in range(100))
        for each in holders:
            holder, seqs[each] = instances[each].info.id, seqs[each] + 1
            placer.record_sent(entry, turn(user, 7), Route(holder, holder, ""))
            chain = RequestChain(f"chatcmpl-{entry}", 1600, names)
            report = CacheReport(holder, seqs[each], 16, seqs[each] == 1, names, b"", [chain])
            assert placer.record_cache(report)
    requests = [turn(user, 9) for user in range(count + WARM_UP)]
    assert all(each.starts for each in requests)  # named once, whatever the cluster is
    queue = iter(enumerate(requests))

    def place() -> None:
        number, request = next(queue)
        route = placer.place(
            request, may_split=True, excluded=frozenset(), at_limit=frozenset(), is_new=True
        )
        assert route is not None
        placer.record_sent(RequestId(f"s{number}"), request, route)

    return timed(place, count)


def tables(size: int, count: int, seed: int) -> list[float]:
    """Time what a new view costs once: its table, with the order that a dispatch needs."""
    view, maker = view_of(size, "all have capacity", Random(seed)), TableMaker()
    me = info("prefill-0", Role.PREFILL)

    def make() -> ClusterTable:
        table = maker.make(view, 0.0)
        takers = table.takers(me)
        assert takers.by_blocks
        assert takers.by_bytes
        return table

    return timed(make, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1000, help="of each kind; 1000")
    parser.add_argument("--repeats", type=int, default=5, help="of each decision; 5")
    parser.add_argument("--policy", default="power-of-two", help="of dispatch; power-of-two")
    parser.add_argument("--seed", type=int, default=0, help="of loads and requests; 0")
    parser.add_argument("--output", type=Path, default=Path("decisions.jsonl"), help="result file")
    options = parser.parse_args()
    site = Site("none", tuple(sorted(os.sched_getaffinity(0))), Path())
    by, metrics = ["decision", "case", "instances"], ["median_us", "p99_us"]
    count = options.decisions
    given = conditions(site, policy=options.policy, decisions=count)
    results = Results.of(options.output, by, metrics, given, is_new=True)
    gc.collect()
    gc.disable()
    for size in SIZES:
        cases: dict[tuple[str, str], Callable[[], list[float]]] = {
            ("dispatch", name): partial(dispatches, size, name, count, options.policy, options.seed)
            for name in CLUSTERS
        }
        for mode in (Mode.SPLIT, Mode.ADAPTIVE):
            run_one = partial(placements, size, mode, count, options.seed)
            cases["placement", f"{mode}, two hold a part"] = run_one
        cases["naming", "a chat of 9 KB"] = partial(namings, count)
        cases["once per view", ""] = partial(tables, size, count // 20 + 1, options.seed)
        for (decision, case), run in cases.items():
            times = np.min([run() for _ in range(options.repeats)], axis=0)
            figures = {"median_us": np.median(times), "p99_us": np.quantile(times, 0.99)}
            cell = {name: float(value) for name, value in figures.items()}
            results.add(decision=decision, case=case, instances=size, **cell)


if __name__ == "__main__":
    main()
