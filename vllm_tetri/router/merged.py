"""Responses that the router makes from those of its instances: vLLM's metrics, the description
of the API, and the headers that let pages of other origins read responses (CORS)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec
from cachetools import FIFOCache, TTLCache

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.response import HttpResponse
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceState

_TIMEOUT_S = 2.0  # longest wait for one instance
_FRESH_S = 1.0  # metrics are not scraped again before this time
_REMEMBERED_S = 30.0  # of what follows from options of instances
_MAX_ORIGINS = 256
_MOST_AWAY = 64  # processes that may come back as they were
_OPENAPI = "/openapi.json"
_VLLM = "# HELP vllm:"  # first words of a family; others are about the process
_Process = tuple[InstanceId, int]


@dataclass(slots=True)
class Family:
    """One family of metrics: its type, and its values by series, one for every instance."""

    help: str  # whole line
    kind: str = "untyped"
    series: dict[str, list[float]] = field(default_factory=dict)

    def combined(self, name: str) -> dict[str, float]:
        """Return one value for each series: the sum of counters, histograms and numbers of
        requests, the mean of percentages, else the largest value."""
        combine: Callable[[list[float]], float] = max
        if self.kind != "gauge" or name.startswith("vllm:num_"):
            combine = sum
        elif name.endswith("_perc"):
            combine = fmean
        return {key: combine(values) for key, values in self.series.items()}


def read_families(texts: Iterable[str]) -> dict[str, Family]:
    """Parse vLLM's families of several instances in Prometheus' text format."""
    families: dict[str, Family] = {}
    for text in texts:
        family: Family | None = None
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name, is_ours = line.split(" ", 3)[2], line.startswith(_VLLM)
                family = families.setdefault(name, Family(line)) if is_ours else None
            elif family is not None and line.startswith("# TYPE "):
                family.kind = line.rpartition(" ")[2]
            elif family is not None and line:
                key, _, text_value = line.rpartition(" ")
                with suppress(ValueError):
                    value = float(text_value)
                    family.series.setdefault(key, []).append(value)
    return families


def render_families(families: Mapping[str, Family]) -> str:
    """Write families in Prometheus' text format, combined."""
    lines = []
    for name, family in families.items():
        lines += [family.help, f"# TYPE {name} {family.kind}"]
        values = family.combined(name).items()
        lines += [f"{key} {value}" for key, value in values]
    return "".join(line + "\n" for line in lines)


def _process(info: InstanceInfo) -> _Process:
    return info.id, info.pid


def _without_gauges(texts: Iterable[str]) -> str:
    families = read_families(texts).items()
    return render_families({name: each for name, each in families if each.kind != "gauge"})


class Merged:
    """Asks instances and remembers what they said. Owned by the event loop."""

    def __init__(self, monitor: Monitor, upstream: Upstream) -> None:
        self._monitor, self._upstream = monitor, upstream
        self._scrape: asyncio.Task[str] | None = None
        self._scraped_s = 0.0
        # The last metrics of every instance's process, and counts of those that are gone: a sum
        # must not fall when an instance leaves.
        self._texts: dict[_Process, str] = {}
        self._tellers: dict[_Process, _Process] = {}  # by rank: which rank told of its server
        self._seqs: dict[_Process, int] = {}  # of their last reports
        self._gone = ""
        self._remembered: TTLCache[str, Any] = TTLCache(_MAX_ORIGINS, _REMEMBERED_S)
        self._allowed: FIFOCache[str, dict[str, str]] = FIFOCache(_MAX_ORIGINS)  # by origin
        self._asking: set[asyncio.Task[dict[str, str]]] = set()  # about origins, once more

    async def metrics(self) -> str:
        """Return vLLM's metrics of all instances as one, at most a second old."""
        now = time.monotonic()
        if self._scrape is None or (self._scrape.done() and now - self._scraped_s > _FRESH_S):
            self._scraped_s, self._scrape = now, asyncio.create_task(self._scrape_all())
        return await asyncio.shield(self._scrape)

    async def _scrape_all(self) -> str:
        # Ranks of a data-parallel server share one `/metrics`.
        view = sorted(self._monitor.view().instances, key=lambda one: one.info.id, reverse=True)
        servers = {each.info.url: each.info for each in view}
        infos, ask = list(servers.values()), self._upstream.ask
        tellers = {_process(each.info): _process(servers[each.info.url]) for each in view}
        for rank, teller in tellers.items():  # another one may tell the same from now on
            if (former := self._tellers.get(rank, rank)) != teller and former in self._texts:
                self._texts[teller] = self._texts.pop(former)
        self._tellers = tellers
        # In containers the process after a restart has the pid of the one before.
        seqs, before = {_process(each.info): each.seq for each in view}, self._seqs
        again = [each for each, seq in seqs.items() if 0 < seq < before.get(each, 0)]
        gone = [self._texts.pop(each) for each in again if each in self._texts]
        self._seqs = {each: seq or before.get(each, 0) for each, seq in seqs.items()}
        found = await asyncio.gather(*(ask(info.url, "/metrics", _TIMEOUT_S) for info in infos))
        for info, each in zip(infos, found, strict=True):
            if each is not None and each[0].status == 200:
                self._texts.pop(_process(info), None)  # the newest last
                self._texts[_process(info)] = each[1].decode(errors="replace")
        here, names = set(tellers.values()), {info.id for info in infos}
        # Some may only be out of reach, unless another process has their name.
        away = [each for each in self._texts if each not in here]
        ended = [each for each in away if each[0] in names]
        rest = [each for each in away if each[0] not in names]
        ended += rest[: max(0, len(rest) - _MOST_AWAY)]
        gone += [self._texts.pop(each) for each in ended]
        texts = [text for each, text in self._texts.items() if each in here]
        left = [text for each, text in self._texts.items() if each not in here]

        def merge() -> str:  # takes milliseconds an instance
            self._gone = _without_gauges([self._gone, *gone])
            counts = _without_gauges([self._gone, *left])
            return render_families(read_families([*texts, counts]))

        return await asyncio.to_thread(merge)

    async def openapi(self, routes: Collection[tuple[str, str]]) -> bytes:
        """Return an instance's description of the API, without what is not among the routes
        (method and path) of the router. Raises `Refusal`: no instance has one."""
        if (known := self._remembered.get(_OPENAPI)) is None:
            response, body = await self._ask(_OPENAPI)
            try:
                document = msgspec.json.decode(body, type=dict[str, Any])
                paths = msgspec.convert(document.get("paths"), dict[str, dict[str, Any]])
            except msgspec.MsgspecError:
                paths = None
            if response.status != 200 or paths is None:
                raise Refusal(404, "the instances do not describe their API")
            document["paths"] = {
                path: kept
                for path, each in paths.items()
                if (kept := {name: each[name] for name in each if (name.upper(), path) in routes})
            }
            known = self._remembered[_OPENAPI] = msgspec.json.encode(document)
        return known

    async def cors(self, origin: str) -> dict[str, str]:
        """Return the headers with which instances let pages of an origin read a response. What they
        said once is used until they say something else: a busy one may take long."""
        if (known := self._allowed.get(origin)) is None:
            return await self._ask_cors(origin)
        if origin not in self._remembered:
            self._remembered[origin] = None
            task = asyncio.create_task(self._ask_cors(origin))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return known

    async def _ask_cors(self, origin: str) -> dict[str, str]:
        try:
            response, _ = await self._ask("/version", {"Origin": origin})
        except Refusal:
            return {}
        self._remembered[origin] = None
        found = self._allowed[origin] = {
            name: value
            for name, value in response.headers.items()
            if name == "vary" or name.startswith("access-control-")
        }
        return found

    async def _ask(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[HttpResponse, bytes]:
        for each in self._monitor.view().instances:
            if each.state is InstanceState.READY:
                found = await self._upstream.ask(each.info.url, path, _TIMEOUT_S, headers)
                if found is not None:
                    return found
        raise Refusal(503, "no instance is ready; try again")
