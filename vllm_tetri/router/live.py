"""What the page at `/` and `vllm-tetri top` show: one snapshot a second while any is open, the same
for all of them, as server-sent events."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from vllm_tetri import __version__
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.route import apart
from vllm_tetri.router.errors import event
from vllm_tetri.router.history import Ended
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.metrics import LOAD_NUMBERS, Happening
from vllm_tetri.router.replies import Reply, Response, StreamedResponse
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.types import InstanceId, InstanceLoad

PERIOD_S = 1.0  # between two snapshots
BIN_S = 5.0
NUM_BINS = 60
_MOST_REQUESTS = 120  # of those in flight, the oldest
_MOST_OUTPUTS = 200
_MOST_EVENTS = 60
_LONGEST_WORDS = 300
_NUMBERS = (
    "running", "waiting", "held", "queued_prefill_tokens", "heavy", "light", "step_s",
    "blocks_used", "reserved_blocks", "blocks_total", "arena_used_bytes", "arena_total_bytes",
    "kv_pool_blocks", "kv_pool_total_blocks",
)  # fmt: skip
_REFUSED = ("busy", "late", "poison")
_TROUBLES = {
    **{each: f"refused: {each}" for each in _REFUSED},
    "rejected": "rejected",
    "error": "failed",
}
_RATES = ("prompt_tokens_done", "kv_bytes_sent", "output_tokens_done")
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Bin(NamedTuple):
    """What ended in `BIN_S` seconds. Latencies are of responses that were served, in seconds; None
    where none has that number."""

    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_s: float | None  # mean over requests
    jct_s: float | None  # mean
    served: int
    in_time: int  # of the served ones; all where nothing is promised
    refused: int
    failed: int


def bin_of(rows: Sequence[Ended], objective: Objective = NO_OBJECTIVE) -> Bin:
    """Summarise requests that ended in the same few seconds. What is not known of a request, as the
    first token of a response that was not streamed, is not late."""
    outcomes = Counter(row.outcome for row in rows)
    done = [row for row in rows if row.outcome == "ok"]
    both = [_latencies(row) for row in done]
    firsts = sorted(ttft for ttft, _ in both if ttft is not None)
    return Bin(
        _quantile(firsts, 0.5),
        _quantile(firsts, 0.99),
        _mean([tpot for _, tpot in both if tpot is not None]),
        _mean([row.ended_s - row.arrival_s for row in done]),
        len(done),
        sum(
            (ttft or 0.0) <= objective.ttft_s and (tpot or 0.0) <= objective.tpot_s
            for ttft, tpot in both
        ),
        sum(outcomes[each] for each in _REFUSED),
        outcomes["error"],
    )


def _latencies(row: Ended) -> tuple[float | None, float | None]:
    """Return the time to the first token, and the mean time per further token."""
    if not row.generated or row.first_byte_s is None:
        return None, None
    tokens = row.output_tokens or row.generated
    tpot_s = (row.ended_s - row.first_byte_s) / (tokens - 1) if tokens > 1 else None
    return row.first_byte_s - row.arrival_s, tpot_s


def _quantile(ascending: Sequence[float], part: float) -> float | None:
    return ascending[ceil(part * len(ascending)) - 1] if ascending else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


class Recent:
    """The last minutes, from requests as they end: `bins`, the newest last, that are over; lengths
    of `outputs`, predicted and actual; `troubles`, of which some of one kind are one."""

    def __init__(self, objective: Objective = NO_OBJECTIVE) -> None:
        self._objective = objective
        self._open: list[Ended] = []  # ended in a bin that is not over
        self._next = 0  # number of that bin
        self.bins: deque[Bin] = deque(maxlen=NUM_BINS)
        self.outputs: deque[tuple[int, int]] = deque(maxlen=_MOST_OUTPUTS)
        self.troubles: deque[tuple[Happening, int]] = deque(maxlen=_MOST_EVENTS)

    def take(self, rows: Iterable[Ended], now_s: float) -> None:
        """Add requests that have ended since the last call, oldest first."""
        current, parts = int(now_s // BIN_S), defaultdict[int, list[Ended]](list)
        for row in rows:
            self._open.append(row)
            if row.outcome in _TROUBLES:
                self._add_trouble(row)
        for row in self._open:
            parts[int(row.ended_s // BIN_S)].append(row)
        for number in range(max(self._next, current - NUM_BINS), current):
            self.bins.append(bin_of(parts[number], self._objective))
            self.outputs.extend(
                (row.predicted, tokens)
                for row in parts[number]
                if row.outcome == "ok"
                and row.predicted is not None
                and (tokens := row.output_tokens or row.generated)
            )
        self._open, self._next = parts[current], current

    def _add_trouble(self, row: Ended) -> None:
        kind, count = _TROUBLES[row.outcome], 1
        words = row.problem or " → ".join(filter(None, (row.prefill, row.decode)))
        if self.troubles and self.troubles[-1][0].kind == kind:
            count += self.troubles.pop()[1]
        self.troubles.append((Happening(row.ended_s, kind, words[:_LONGEST_WORDS]), count))


async def page(_: ClientRequest) -> Response:
    """Respond with the page, which has no data and needs no key."""
    html, headers = _page()
    return Response(html, headers=headers)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Read the page, and make its headers, by which nothing else may run in it."""
    html = Path(__file__).with_name("page.html").read_bytes()
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'; frame-ancestors 'none'"
    for kind, source in _INLINE.findall(html):
        digest = b64encode(sha256(source).digest())
        policy += f"; {kind.decode()}-src 'sha256-{digest.decode()}'"
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return html, headers


def plain_cluster(
    scheduler: GlobalScheduler, numbers: Iterable[str] = LOAD_NUMBERS
) -> dict[str, Any]:
    """Return instances as `GET /tetri/v1/instances` shows them, with these numbers of each."""
    monitor, workers = scheduler.monitor, scheduler.table.workers
    views = monitor.view().instances
    rows = [
        {
            "id": each.info.id,
            "url": each.info.url,
            "model": each.info.models[0],
            "role": each.info.role,
            "state": each.state,
            "age_s": round(each.age_s, 3),
            "seq": each.seq,
            "in_flight": workers[each.info.id],
            **{name: getattr(each.load, name) for name in numbers},
            "flip": each.flip and {**asdict(each.flip), "age_s": round(each.flip.age_s, 3)},
        }
        for each in views
    ]
    return {
        "instances": rows,
        "departed": dict(monitor.members.departed.items()),
        "apart": list(apart(each.info for each in views).values()),
        "spared": sorted(scheduler.placer.spared),
        "watcher": scheduler.flips.explanation,
        "changes": scheduler.flips.changes,
        "mode": scheduler.placer.mode,
    }


class LiveView:
    """Streams snapshots. Owned by the event loop; nothing is computed while no stream is open."""

    def __init__(self, scheduler: GlobalScheduler) -> None:
        self._scheduler = scheduler
        self._recent = Recent(scheduler.objective)
        self._closing = asyncio.Event()
        self._slot, self._seq, self._event = -1, 0, b""
        self._seen_s = -inf  # until when requests that ended are known
        self._before: dict[InstanceId, InstanceLoad] = {}  # at `_slot`

    async def serve(self, http: ClientRequest) -> Reply:
        """Stream until the client leaves, or the router ends. One that does not read gets nothing
        more, and is cut off by its connection (`Limits.stalled_s`)."""
        response = StreamedResponse(http, 200, _EVENTS)
        loop = asyncio.get_running_loop()
        while not self._closing.is_set():
            slot = int(loop.time() / PERIOD_S + 0.01)  # timers may be early
            response.send(self._event_of(slot))
            await http.connection.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout_at((slot + 1) * PERIOD_S):
                    await self._closing.wait()
        return response

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    def _event_of(self, slot: int) -> bytes:
        if slot != self._slot:
            self._slot, self._seq = slot, self._seq + 1
            self._event = event(self._snapshot(time.monotonic()))
        return self._event

    def _snapshot(self, now_s: float) -> dict[str, Any]:
        scheduler = self._scheduler
        table, objective, recent = scheduler.table, scheduler.objective, self._recent
        since_s, self._seen_s = self._seen_s, now_s
        oldest_s = now_s - (NUM_BINS + 1) * BIN_S
        recent.take(scheduler.history.since(max(since_s, oldest_s)), now_s)
        found = [*recent.troubles, *((each, 1) for each in scheduler.metrics.happened)]
        newest = sorted(found, key=lambda each: -each[0].at_s)[:_MOST_EVENTS]
        return {
            "seq": self._seq,
            "router": table.router,
            "version": __version__,
            "objective": {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s},
            **plain_cluster(scheduler, _NUMBERS),
            "rates": self._rates(now_s - since_s),
            "phases": Counter(entry.phase for entry in table),
            **table.plain(now_s, _MOST_REQUESTS),
            "bin_s": BIN_S,
            "bins": {
                name: [each[at] for each in recent.bins] for at, name in enumerate(Bin._fields)
            },
            "outputs": list(recent.outputs),
            "events": [
                {"age_s": now_s - at_s, "kind": kind, "words": words, "count": count}
                for (at_s, kind, words), count in newest
            ],
        }

    def _rates(self, past_s: float) -> dict[str, float | None]:
        """Return what instances did per second since the last snapshot; None if that is too old."""
        now = {each.info.id: each.load for each in self._scheduler.monitor.view().instances}
        before, self._before = self._before, now

        def grown(name: str) -> int:
            pairs = ((getattr(each, name) for each in (new, before.get(id, new)))
                     for id, new in now.items())  # fmt: skip
            return sum(max(0, one - other) for one, other in pairs)

        return {name: grown(name) / past_s if past_s < 3 * PERIOD_S else None for name in _RATES}
