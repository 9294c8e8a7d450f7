"""Break a cluster under load again and again, and check what it promises.

`vllm-tetri up` runs several prefill and decode instances and routers. Each of a few dozen greedy
requests is first served alone, so its output is known. Then clients ask for them without a pause,
streamed or not, and some leave in the middle, while faults of a seeded sequence hit instances,
routers, engines and predictors, never the last ready one of a role. After each fault (or every N)
clients pause, and everything has to be back and at rest. The verdict is a table of promises; the
exit status is 1 if one was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psutil

from examples.benchmarks import faults
from examples.benchmarks.client import Reply, Request, Target, random_prompt, send
from examples.benchmarks.cluster import (
    Site,
    System,
    add_site,
    conditions,
    get_json,
    our_cluster,
    parse,
)
from examples.benchmarks.faults import READY, Asked, Deck, Fault, Leftovers, Promise
from examples.benchmarks.report import markdown

PROMPTS, OUTPUTS = (12, 40, 150, 330, 700), (1, 8, 40, 160)  # tokens
WORDS = ("river", "stone", "garden", "winter", "market", "letter", "bridge", "silver", "music")
TEMPLATE_TOKENS, TOKENS_A_WORD = 64, 4
CALM_S = 10.0
LOOK_S = 0.5
LIMIT_S, PATIENCE_S, RETRY_S = 120.0, 90.0, 0.25
WHOLE_S, REST_S, QUIET_S = 240.0, 60.0, 2.0
BUSY = ("running", "waiting", "held", "blocks_used", "arena_used_bytes")

Rows = Mapping[str, Mapping[str, Any]]


def known_requests(window_tokens: int, rng: Random) -> list[Request]:
    """Draw every combination of lengths that fits into the window, every other one as a chat."""
    found: list[Request] = []
    for prompt_tokens in PROMPTS:
        for output_tokens in OUTPUTS:
            if prompt_tokens + TEMPLATE_TOKENS + output_tokens >= window_tokens:
                continue
            words = " ".join(rng.choices(WORDS, k=max(1, prompt_tokens // TOKENS_A_WORD)))
            prompt = words if len(found) % 2 else random_prompt(prompt_tokens, rng)
            extra = {"return_token_ids": True}
            found.append(Request(0.0, prompt, output_tokens, False, extra))
    return found


def streamed(request: Request) -> Request:
    """Return the same request as a stream."""
    return Request(0.0, request.prompt, request.output_tokens, True, request.extra)


class Crowd:
    """Clients that ask routers in turn, as through a load balancer, without a pause."""

    def __init__(self, routers: Mapping[str, str], model: str, number: int, seed: int) -> None:
        self.asked: list[Asked] = []
        self._routers = dict(routers)
        self._model = model
        self._known: list[tuple[Request, Reply]] = []
        self._is_open = asyncio.Event()
        self._in_flight = 0
        self._rngs = [Random(f"{seed} client {place}") for place in range(number)]

    async def learn(self, requests: Sequence[Request]) -> None:
        """Serve every request alone, twice, so that its output is known.

        Raises:
            RuntimeError: One fails, or the same request has two outputs.
        """
        url = next(iter(self._routers.values()))
        for request in requests:
            first, again = [
                await send(self._target(url), each) for each in (request, streamed(request))
            ]
            if first.error or again.error:
                raise RuntimeError(f"before any fault: {first.error or again.error}")
            if (first.text, first.token_ids) != (again.text, again.token_ids):
                raise RuntimeError("the cluster alone is not deterministic; try --dtype float32")
            self._known.append((request, first))

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Ask as long as the block runs, paused at first."""
        tasks = [asyncio.create_task(self._ask_on(rng)) for rng in self._rngs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError | None):
                    raise outcome

    def resume(self) -> None:
        """Begin requests (again)."""
        self._is_open.set()

    async def pause(self) -> None:
        """Begin no request, and wait for the end of those in flight."""
        self._is_open.clear()
        while self._in_flight:
            await asyncio.sleep(0.02)

    def _target(self, url: str) -> Target:
        return Target(url, self._model, LIMIT_S, keep_outputs=True)

    async def _ask_on(self, rng: Random) -> None:
        while True:
            await self._is_open.wait()
            request, expected = rng.choice(self._known)
            patience_s = rng.uniform(0.0, 1.0) if rng.random() < 0.1 else None
            self._in_flight += 1
            try:
                each = streamed(request) if rng.random() < 0.5 else request
                self.asked.append(await self._ask(each, expected, rng, patience_s))
            finally:
                self._in_flight -= 1

    async def _ask(
        self, request: Request, expected: Reply, rng: Random, patience_s: float | None
    ) -> Asked:
        began, names = time.monotonic(), list(self._routers)
        turn, retries, broke = rng.randrange(len(names)), 0, list[str]()
        while True:
            router = names[(turn + retries) % len(names)]
            try:
                async with asyncio.timeout(patience_s):
                    reply = await send(self._target(self._routers[router]), request)
            except TimeoutError:
                return Asked("left", began, time.monotonic(), retries=retries, router=router)
            now = time.monotonic()
            is_untaken = reply.is_refused or (reply.error and not reply.status)
            if not is_untaken or now - began > PATIENCE_S:
                break
            if "Refused" not in reply.error and not reply.status:
                broke.append(router)
            retries += 1
            await asyncio.sleep(RETRY_S if retries % len(names) == 0 else 0.0)
        gap_s = max([reply.ttft_s, *(gap / 1e6 for gap in reply.gaps_us)])
        end, words = end_of(reply, expected)
        return Asked(end, began, now, gap_s, retries, words, router, tuple(broke))


def end_of(reply: Reply, expected: Reply) -> tuple[str, str]:
    """Return how a request ended, and the words for a bad end."""
    if reply.error:
        return ("error" if reply.is_clear_error else "lost"), reply.error[:200]
    if (reply.text, reply.token_ids) != (expected.text, expected.token_ids):
        pairs = zip(reply.token_ids, expected.token_ids, strict=False)
        same = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), -1)
        return "wrong", f"{reply.num_tokens} tokens, the first other one at {same}"
    return "good", ""


@dataclass(slots=True)
class Soak:
    """One run against a cluster that serves."""

    facts: Mapping[str, Any]
    stop_s: float
    key: str = ""
    faults: list[Fault] = field(default_factory=list)
    rests: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    leftovers: Leftovers = field(default_factory=Leftovers)
    seen: set[psutil.Process] = field(default_factory=set)
    predictors: set[str] = field(default_factory=set)
    is_stopped: bool = False

    @property
    def routers(self) -> dict[str, str]:
        """URLs of routers by name."""
        return {each["id"]: each["url"] for each in self.facts["routers"]}

    def members(self) -> dict[str, list[psutil.Process]]:
        """Return processes by member."""
        ports = {urlsplit(url).port or 0: name for name, url in self.routers.items()}
        found = faults.members(psutil.Process(self.facts["guard"]), ports)
        self.seen.update(each for tree in found.values() for each in tree)
        return found

    async def look(self) -> tuple[Rows, dict[str, tuple[str, str]]]:
        """Return what the best informed router says, and everything's role and state."""
        return await asyncio.to_thread(self._look)

    def _look(self) -> tuple[Rows, dict[str, tuple[str, str]]]:
        views: dict[str, Rows] = {}
        for name, url in self.routers.items():
            content = get_json(f"{url}/tetri/v1/instances", self.key)
            views[name] = {row["id"]: row for row in content.get("instances", ())}
        instances = {each["id"] for each in self.facts["instances"]}
        states = {name: ("router", READY if rows else "away") for name, rows in views.items()}
        rows = max(views.values(), key=len)
        for name in instances:
            # Every router that serves has to see it.
            seen = {view.get(name, {}).get("state") for view in views.values() if view}
            role = rows.get(name, {}).get("role", "")
            states[name] = (role, READY if seen == {READY} else "away")
        found = self.members()
        for name in self.predictors | {each for each in found if "'s predictor" in each}:
            lives = any(each.status() != psutil.STATUS_STOPPED for each in found.get(name, ()))
            states[name] = ("predictor", READY if lives else "away")
        self._record(rows, states)
        return rows, states

    def _record(self, rows: Rows, states: Mapping[str, tuple[str, str]]) -> None:
        now = time.monotonic()
        newest = {each.victim: each for each in self.faults}
        for fault in newest.values():
            fault.observe(states, now)
        if self.is_stopped:
            self.leftovers.restart()
            return
        idle = {
            name: row.get("leftovers") or ()
            for name, row in rows.items()
            if row["state"] == READY and not any(row.get(each) for each in BUSY[:3])
        }
        self.leftovers.record(idle, now)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def hit(self, kind: str, victim: str) -> None:
        """Let a fault happen."""
        processes = (await asyncio.to_thread(self.members)).get(victim, [])
        if kind.endswith("engine"):
            processes = faults.engine_of(processes)
        # No router reports predictors, and one may be back before anything looks.
        was_gone = kind.endswith("predictor")
        self.faults.append(Fault(kind, victim, time.monotonic(), was_gone))
        print(f"fault {len(self.faults)}: {kind} hits {victim}", flush=True)
        if kind.startswith("kill"):
            faults.send(processes, signal.SIGKILL)
            return
        self.is_stopped = True
        try:
            faults.send(processes, signal.SIGSTOP)
            await asyncio.sleep(self.stop_s)
        finally:
            faults.send(processes, signal.SIGCONT)
            self.is_stopped = False

    async def rest(self) -> None:
        """Wait until everything is back and nothing is left of any request."""
        began, quiet_s, missing = time.monotonic(), 0.0, ["everything"]
        while missing or time.monotonic() - quiet_s < QUIET_S:
            rows, states = await self.look()
            missing = [f"{name} is away" for name, each in states.items() if each[1] != READY]
            limit_s = WHOLE_S if missing else WHOLE_S + REST_S
            for name, row in sorted(rows.items()):
                busy = [each for each in (*BUSY, "leftovers") if row.get(each)]
                missing += [f"{name}: {each} {row[each]}" for each in busy]
            for name, url in self.routers.items():
                left = get_json(f"{url}/tetri/v1/requests", self.key).get("requests", ())
                missing += [f"{name}: {len(left)} requests"] if left else []
            quiet_s = time.monotonic() if missing or not quiet_s else quiet_s
            if time.monotonic() - began > limit_s:
                break
            await asyncio.sleep(LOOK_S)
        if not missing:
            self.samples.append(await asyncio.to_thread(self._usage))
        took_s = round(time.monotonic() - began, 1)
        self.rests.append({"faults": len(self.faults), "took_s": took_s, "missing": missing})
        print(f"at rest after {took_s} s" + "".join(f"; {each}" for each in missing), flush=True)

    def _usage(self) -> dict[str, float]:
        found = {"processes": 0.0, "descriptors": 0.0, "threads": 0.0, "rss MiB": 0.0}
        for each in psutil.Process(self.facts["guard"]).children(recursive=True):
            with suppress(psutil.Error), each.oneshot():
                found["descriptors"] += each.num_fds()
                found["threads"] += each.num_threads()
                found["rss MiB"] += each.memory_info().rss / (1 << 20)
                found["processes"] += 1
        segments = Path("/dev/shm").glob("tetri-*")
        return {**found, "shared MiB": sum(each.stat().st_size for each in segments) / (1 << 20)}


async def soak(soak: Soak, crowd: Crowd, options: argparse.Namespace) -> None:
    """Learn outputs, then break the cluster under load until all faults have happened."""
    kinds = options.faults or list(faults.KINDS)
    _, states = await soak.look()
    soak.predictors = {name for name, (role, _) in states.items() if role == "predictor"}
    if not soak.predictors:
        kinds = [kind for kind in kinds if not kind.endswith("predictor")]
    content = get_json(f"{next(iter(soak.routers.values()))}/v1/models")
    window_tokens = int(content["data"][0]["max_model_len"])
    await crowd.learn(known_requests(window_tokens, Random(options.seed)))
    number = max(1, round(60 * options.minutes / options.fault_every))
    deck = Deck(kinds, number, Random(f"{options.seed} faults"))
    watching = asyncio.create_task(soak.watch())
    try:
        async with crowd.asking():
            crowd.resume()
            await asyncio.sleep(CALM_S)
            await crowd.pause()
            await soak.rest()
            crowd.resume()
            deadline = time.monotonic() + number * (options.fault_every + WHOLE_S)
            while len(deck) and time.monotonic() < deadline and not watching.done():
                drawn = deck.draw((await soak.look())[1])
                if drawn is None:
                    await asyncio.sleep(LOOK_S)
                    continue
                await soak.hit(*drawn)
                await asyncio.sleep(options.fault_every)
                if len(soak.faults) % options.rest_every == 0 or not len(deck):
                    await crowd.pause()
                    await soak.rest()
                    crowd.resume()
            await crowd.pause()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def verdict(run: Soak, asked: Sequence[Asked], unended: Sequence[str]) -> list[Promise]:
    """Return every promise and whether it was kept."""
    missed = [text for each in run.rests for text in each["missing"]]
    return [
        *faults.promises_of_outputs(asked, run.faults),
        run.leftovers.promise(),
        Promise("everything comes back and comes to rest", not missed, "; ".join(missed) or "yes"),
        *faults.promises_of_usage(run.samples),
        Promise("the end leaves nothing", not unended, ", ".join(unended) or "nothing"),
    ]


def conclude(site: Site, name: str, content: Mapping[str, Any], promises: Sequence[Promise]) -> int:
    """Write NAME.json, print the promises, and return the exit status."""
    kept = {None: "cannot say", True: "kept", False: "BROKEN"}
    shown = [{"promise": x.text, "": kept[x.is_kept], "found": x.found} for x in promises]
    broken = [each.text for each in promises if each.is_kept is False]
    content = {**content, "promises": [asdict(each) for each in promises], "broken": broken}
    (site.folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(markdown(content["rows"]), markdown(shown), sep="\n\n")
    print(f"\nverdict: broken: {'; '.join(broken)}" if broken else "\nverdict: all kept")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    parser.add_argument("--minutes", type=float, default=30.0, help="under faults; 30")
    parser.add_argument("--fault-every", type=float, default=10.0, help="seconds of load each; 10")
    parser.add_argument("--rest-every", type=int, default=1, help="faults between two rests; 1")
    parser.add_argument("--faults", type=lambda text: text.split(","), help=", ".join(faults.KINDS))
    parser.add_argument("--stop", type=float, default=3.0, help="seconds a stopped one stays so; 3")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time; 8")
    parser.add_argument("--predictor", help="folder, as for --tetri-predictor; none")
    parser.add_argument("--mode", default="split", help="as for up; split")
    for name in ("prefill", "decode", "routers"):
        parser.add_argument(f"--{name}", type=int, default=2, help="how many; 2")
    options, site = parse(parser)
    up = ["--mode", options.mode, "--flip", "off"]  # roles stay, so a name says what is hit
    for name in ("prefill", "decode", "routers"):
        up += [f"--{name}", str(getattr(options, name))]
    if options.predictor:
        site = replace(site, serve=(*site.serve, "--tetri-predictor", options.predictor))
    engines = options.prefill + options.decode
    up += ["--placement", "shared-cores"] if engines > len(site.cores) else []
    with our_cluster(site, up, system=System(engines)) as facts:
        run = Soak(facts, options.stop)
        crowd = Crowd(run.routers, facts["model"], options.clients, options.seed)
        asyncio.run(soak(run, crowd, options))
        faults.send(run.seen, signal.SIGCONT)
    unended = [f"process {each.pid}" for each in faults.alive(run.seen)]
    content = {
        "conditions": conditions(site, **{k: str(v) for k, v in vars(options).items()}),
        "rows": faults.rows(crowd.asked, run.faults),
        "faults": [asdict(each) for each in run.faults],
        "rests": run.rests,
        "samples": run.samples,
        "bad": [asdict(each) for each in crowd.asked if each.end in ("lost", "error", "wrong")],
    }
    return conclude(site, "soak", content, verdict(run, crowd.asked, unended))


if __name__ == "__main__":
    raise SystemExit(main())
