"""Ask a cluster for ten times what it can serve, and see what is kept, and when it is over.

Clients that ask without a pause find how many requests a second the cluster serves, the full rate;
half of it is normal service. Then N times as many arrive, and at once after that half again. What
refuses them is switched on by --max-queue-delay, --max-in-flight and --ttft-slo. With --keys a
second client asks for a fifth of the full rate all the time and should be refused less. The
verdict is a table of promises; the exit status is 1 if one was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from examples.benchmarks import client, faults
from examples.benchmarks.client import Client, Reply, Request, Target, random_prompt, send
from examples.benchmarks.cluster import System, add_site, conditions, our_cluster, parse
from examples.benchmarks.faults import Promise
from examples.benchmarks.soak import Soak, conclude

RAMP_S, COUNT_S, NORMAL_S, AFTER_S = 5.0, 15.0, 20.0, 20.0
NORMAL_LOAD, MODEST_LOAD = 0.5, 0.2  # parts of the full rate
AS_NORMAL, BACK_S = 2.0, 5.0  # a normal first token takes at most AS_NORMAL times the usual p99
LONG_S = 30.0  # of overload, from which on speed is judged
LEAST_PART = 0.8  # the full rate itself is known to a few percent only
MORE_BYTES, MORE = 128 << 20, 0.5  # of memory, beyond that at rest
QUIET_S = 120.0

Played = list[tuple[Request, Reply]]


def poisson(rate_per_s: float, begin_s: float, end_s: float, rng: Random) -> list[float]:
    """Draw times of arrivals."""
    times, at_s = [], begin_s + rng.expovariate(rate_per_s)
    while at_s < end_s:
        times.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    return times


def make_requests(
    times: Iterable[float], options: argparse.Namespace, key: str, rng: Random
) -> list[Request]:
    """Return a request for each time, with this API key if there is one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    prompts = ((at_s, random_prompt(options.input_len, rng)) for at_s in times)
    return [
        Request(at_s, prompt, options.output_len, headers=headers, extra={})
        for at_s, prompt in prompts
    ]


async def full_rate(target: Target, options: argparse.Namespace, key: str) -> float:
    """Return the requests per second that clients without a pause are served.

    Raises:
        RuntimeError: A request failed, or none ended in time.
    """
    ends, start = list[float](), time.monotonic()

    async def ask_on(rng: Random) -> None:
        while time.monotonic() < start + RAMP_S + COUNT_S:
            reply = await send(target, make_requests([0.0], options, key, rng)[0])
            if reply.error:
                raise RuntimeError(f"without overload: {reply.error}; try fewer --clients")
            ends.append(time.monotonic() - start)

    await asyncio.gather(*(ask_on(Random(f"{options.seed} {n}")) for n in range(options.clients)))
    counted = sum(RAMP_S <= each < RAMP_S + COUNT_S for each in ends)
    if not counted:
        raise RuntimeError(f"no request ended in {COUNT_S:g} s; try a smaller --output-len")
    return counted / COUNT_S


def row(name: str, played: Played, begin_s: float, end_s: float) -> dict[str, Any]:
    """Return what became of the requests that were due between two times."""
    due = [(at, reply) for at, reply in played if begin_s <= at.at_s < end_s]
    served = [reply for _, reply in due if not reply.error]
    refused = [reply for _, reply in due if _is_clear_refusal(reply)]
    done = [at.at_s + reply.jct_s for at, reply in played if not reply.error]

    def quantile(values: Sequence[float], part: float) -> float:
        return round(1e3 * float(np.quantile(values, part)), 1) if values else 0.0

    return {
        "part": name,
        "seconds": end_s - begin_s,
        "sent": len(due),
        "served": len(served),
        "refused": len(refused),
        "bad": len(due) - len(served) - len(refused),
        "served/s": round(sum(begin_s <= each < end_s for each in done) / (end_s - begin_s), 2),
        "TTFT p50, ms": quantile([each.ttft_s for each in served], 0.5),
        "TTFT p99, ms": quantile([each.ttft_s for each in served], 0.99),
        "refusal p50, ms": quantile([each.jct_s for each in refused], 0.5),
        "refusal p99, ms": quantile([each.jct_s for each in refused], 0.99),
    }


def _is_clear_refusal(reply: Reply) -> bool:
    return reply.is_refused and reply.is_clear_error and "retry-after" in reply.headers


def back_s(played: Played, begin_s: float, end_s: float, normal_s: float) -> float | None:
    """Return the seconds after `begin_s` until service is as usual; None if never for long.

    Args:
        normal_s: The longest time to the first token that is usual.
    """
    due = [(at.at_s, reply) for at, reply in played if begin_s <= at.at_s < end_s]
    unusual = [at for at, reply in due if reply.error or reply.ttft_s > normal_s]
    if not unusual:
        return 0.0
    if end_s - max(unusual) < BACK_S or not any(at > max(unusual) for at, _ in due):
        return None
    return max(unusual) - begin_s


def promises(
    rows: Sequence[dict[str, Any]], served_per_s: float, waited_s: float | None, seconds: float
) -> list[Promise]:
    """Return what clients are promised; `rows[1]` is the overload. A short one says nothing about
    speed: a host that is busy for a moment is all that it would show."""
    bad = sum(each["bad"] for each in rows[:3])
    part = rows[1]["served/s"] / served_per_s
    throughput = f"{rows[1]['served/s']:.2f} a second, {part:.2f} of {served_per_s:.2f}"
    back = "not while it was watched" if waited_s is None else f"after {waited_s:.1f} s"
    is_back, is_long = waited_s is not None and waited_s <= BACK_S, seconds >= LONG_S
    fair = []
    if clients := rows[3:]:  # the greedy one and the modest one
        greedy, modest = (each["refused"] / max(1, each["sent"]) for each in clients)
        words = f"{modest:.0%} of its requests, {greedy:.0%} of the other's"
        fair = [Promise("who asks for less is refused less", modest <= greedy, words)]
    return [
        *fair,
        Promise("every response is complete, or a clear refusal", not bad, f"{bad} are neither"),
        Promise(
            "an overload takes nothing from the throughput",
            part >= LEAST_PART if is_long else None,
            throughput,
        ),
        Promise(
            f"service is normal within {BACK_S:g} s after it", is_back if is_long else None, back
        ),
    ]


def promises_of_memory(samples: Sequence[dict[str, tuple[int, int]]]) -> list[Promise]:
    """Return that memory is bounded and that no process ended.

    Args:
        samples: Processes and bytes by member; the first sample is at rest.
    """
    found, fewer = [], set()
    for name, (count, rest) in samples[0].items():
        sizes = [each[name][1] for each in samples[1:] if name in each] or [rest]
        fewer |= {name for each in samples[1:] if each.get(name, (0, 0))[0] < count}
        limit = max((1 + MORE) * rest, rest + MORE_BYTES)
        words = f"{rest >> 20:,} MiB at rest, at most {max(sizes) >> 20:,} MiB"
        found.append(Promise(f"memory of {name} is bounded", max(sizes) <= limit, words))
    return [*found, Promise("no process ends", not fewer, ", ".join(sorted(fewer)) or "none did")]


def sample(run: Soak) -> dict[str, tuple[int, int]]:
    """Return processes and resident bytes of every member."""
    found = {}
    for name, processes in run.members().items():
        sizes = []
        for each in processes:
            with suppress(psutil.Error):
                sizes.append(each.memory_info().rss)
        found[name] = (len(sizes), sum(sizes))
    return found


async def overload(
    run: Soak, asked: Client, target: Target, options: argparse.Namespace, keys: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Promise]]:
    """Measure the full rate, overload the cluster, and return rows and promises."""
    rng, greedy = Random(options.seed), keys[0] if keys else ""
    served_per_s = await full_rate(target, options, greedy)
    await run.rest()
    print(f"full rate: {served_per_s:.2f} requests a second", flush=True)
    usual = poisson(NORMAL_LOAD * served_per_s, 0.0, NORMAL_S, rng)
    requests = make_requests(usual, options, greedy, rng)
    normal = list(zip(requests, await asyncio.to_thread(asked.play, target, requests), strict=True))
    await run.rest()
    samples = [sample(run)]
    end_s = options.seconds + AFTER_S
    times = poisson(options.times * served_per_s, 0.0, options.seconds, rng)
    modest = MODEST_LOAD if keys else 0.0
    times += poisson((NORMAL_LOAD - modest) * served_per_s, options.seconds, end_s, rng)
    requests = make_requests(times, options, greedy, rng)
    if keys:
        of_modest = poisson(modest * served_per_s, 0.0, end_s, rng)
        requests += make_requests(of_modest, options, keys[1], rng)
    requests.sort(key=lambda each: each.at_s)
    playing = asyncio.create_task(asyncio.to_thread(asked.play, target, requests))
    while not playing.done():
        samples.append(await asyncio.to_thread(sample, run))
        await asyncio.wait([playing], timeout=1.0)
    played = list(zip(requests, playing.result(), strict=True))
    await run.rest()
    rows = [
        row("normal", normal, 0.0, NORMAL_S),
        row("overload", played, 0.0, options.seconds),
        row("after", played, options.seconds, end_s),
    ]
    for name, key in zip(("greedy client", "modest client"), keys, strict=False):
        own = [pair for pair in played if pair[0].headers["Authorization"].endswith(key)]
        rows.append(row(f"- {name}", own, 0.0, options.seconds))
    normal_s = AS_NORMAL * rows[0]["TTFT p99, ms"] / 1e3
    waited_s = back_s(played, options.seconds, end_s, normal_s)
    kept = promises(rows, served_per_s, waited_s, options.seconds)
    return rows, [*kept, *promises_of_memory(samples)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    parser.add_argument("--times", type=float, default=10.0, help="the full rate; 10")
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload; 120")
    parser.add_argument("--clients", type=int, default=32, help="that find the full rate; 32")
    parser.add_argument("--input-len", type=int, default=200, help="prompt tokens; 200")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens; 64")
    parser.add_argument("--mode", default="split", help="as for up; split")
    parser.add_argument("--max-queue-delay", type=float, default=2.0, help="as for up; 2")
    parser.add_argument("--max-in-flight", type=int, help="as for up, per instance")
    parser.add_argument("--ttft-slo", type=float, help="seconds; refuse what would miss it")
    parser.add_argument("--keys", action="store_true", help="two clients with a key each")
    options, site = parse(parser)
    up = ["--mode", options.mode, "--flip", "off", "--prefill", "1", "--decode", "1"]
    up += ["--max-queue-delay", str(options.max_queue_delay)]
    up += ["--max-in-flight", str(options.max_in_flight)] if options.max_in_flight else []
    up += ["--ttft-slo", str(options.ttft_slo), "--refuse-late"] if options.ttft_slo else []
    keys = [secrets.token_hex(16) for _ in range(2)] if options.keys else []
    with tempfile.TemporaryDirectory() as folder:
        if keys:
            file = Path(folder) / "keys"
            file.touch(mode=0o600)
            file.write_text("".join(f"{key}\n" for key in keys))
            up += ["--api-key-file", str(file)]
        with our_cluster(site, up, system=System(2)) as facts, client.client(site.cores) as asked:
            target = Target(facts["url"], facts["model"], QUIET_S)
            run = Soak(facts, 0.0, key=keys[0] if keys else "")
            rows, kept = asyncio.run(overload(run, asked, target, options, keys))
            faults.send(run.seen, signal.SIGCONT)
    missed = [text for each in run.rests for text in each["missing"]]
    left = [f"process {each.pid}" for each in faults.alive(run.seen)]
    kept += [
        Promise("everything comes to rest", not missed, "; ".join(missed) or "yes"),
        Promise("the end leaves nothing", not left, ", ".join(left) or "nothing"),
    ]
    said = {name: str(value) for name, value in vars(options).items()}
    content = {"conditions": conditions(site, **said), "rows": rows, "rests": run.rests}
    return conclude(site, "overload", content, kept)


if __name__ == "__main__":
    raise SystemExit(main())
