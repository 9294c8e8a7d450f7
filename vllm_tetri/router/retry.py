"""Whether and where a request is tried again, and requests that crash engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from math import ceil, inf
from typing import Protocol, cast

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.policy.route import Route
from vllm_tetri.router.adapters import Adapters
from vllm_tetri.router.errors import InstanceFailed, Refusal
from vllm_tetri.router.fetching import Fetches
from vllm_tetri.router.liveness import Liveness
from vllm_tetri.router.metrics import Metrics
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo

# Retries after failures, mid-stream ones included. Instances at their limits do not count, nor does
# the first failure of an instance that the request is not to blame for: a node has many.
MAX_RETRIES = 2
# No retry later than this after the first failure, or the first since there was progress.
RETRY_S = 30.0
# After this time an instance that died is not ready any more, or is another process: one that is
# in use had a pause, or only the connection of one request broke.
RECOVERS_S = 2.0
MAX_CRASHES = 2
CRASHES_EXPIRE_S = 300.0
MAX_SUSPECTS = 4096
POISON = "poison_request"
# The same process cannot crash twice, but in a container the next one may have the same number.
_RESTART_S = 10.0

_log = logging.getLogger(__name__)


class PoisonFilter:
    """Refuses a request that two engines crashed with, by the digest of its body.

    An engine that crashes takes all its requests down, and which of them caused the crash is
    unknown. A successful response clears a request. Owned by the event loop.
    """

    def __init__(self, health: Liveness, metrics: Metrics) -> None:
        self._health = health
        self._metrics = metrics
        # Crashes by digest: the instance, its process, and when.
        self.crashes: OrderedDict[bytes, list[tuple[InstanceId, int, float]]] = OrderedDict()
        self._checks: defaultdict[bytes, set[asyncio.Task[None]]] = defaultdict(set)

    def check(self, request: ApiRequest) -> None:
        """Raise `Refusal` 500 for a new request that is known to crash engines."""
        if self.crashes and (refusal := self._refusal(_digest_of(request))) is not None:
            self._metrics.poison_refused.inc()
            raise refusal

    def clear(self, request: ApiRequest) -> None:
        """A request was served to its end, so it crashes no engine."""
        if self.crashes or self._checks:
            digest = _digest_of(request)
            self.crashes.pop(digest, None)
            self._checks.pop(digest, None)

    def record_failure(self, request: ApiRequest, instance: InstanceInfo) -> None:
        """An instance failed a request that it had: find out whether it crashed."""
        digest = _digest_of(request)
        task = asyncio.ensure_future(self._record_crash(digest, instance))
        self._checks[digest].add(task)

    async def refusal(self, request: ApiRequest) -> Refusal | None:
        """Return why a request must not be tried again, as soon as that is known."""
        digest = _digest_of(request)
        checks = self._checks.get(digest, ())
        if checks and len(checks) + len(self.crashes.get(digest, ())) >= MAX_CRASHES:
            await asyncio.wait(list(checks))
        return self._refusal(digest)

    def _refusal(self, digest: bytes) -> Refusal | None:
        crashes = self.crashes.get(digest, [])
        left_s = crashes[-1][2] + CRASHES_EXPIRE_S - time.monotonic() if crashes else 0.0
        if crashes and left_s <= 0:
            del self.crashes[digest]
        if len(crashes) < MAX_CRASHES or left_s <= 0:
            return None
        return Refusal(
            500,
            f"{MAX_CRASHES} engines crashed while they had this request; it is refused for "
            f"{ceil(left_s)} s: change it, or send it again after that",
            kind=POISON,
        )

    async def _record_crash(self, digest: bytes, instance: InstanceInfo) -> None:
        has_crashed, task = await self._health.has_crashed(instance), asyncio.current_task()
        checks = self._checks.get(digest, set())
        is_cleared = task not in checks
        checks.discard(cast("asyncio.Task[None]", task))
        if not checks:
            self._checks.pop(digest, None)
        if is_cleared or not has_crashed:
            return
        self._metrics.crashes.inc()
        crashes, now = self.crashes.setdefault(digest, []), time.monotonic()
        for name, pid, at_s in crashes:
            if (name, pid) == (instance.id, instance.pid) and now - at_s < _RESTART_S:
                return  # it had another request with the same body
        crashes.append((instance.id, instance.pid, now))
        if len(self.crashes) > MAX_SUSPECTS:
            self.crashes.popitem(last=False)
        if len(crashes) == MAX_CRASHES:
            self._metrics.poison_requests.inc()
            names = ", ".join(sorted(name for name, _, _ in crashes))
            _log.error("request with digest %s is refused: %s crashed", digest.hex(), names)


class Scheduler(Protocol):
    """The parts of `GlobalScheduler` that serve a request."""

    monitor: Monitor
    placer: Placer
    metrics: Metrics
    adapters: Adapters
    upstream: Upstream
    poison: PoisonFilter
    fetches: Fetches
    resumes_anywhere: bool

    def info(self, instance: InstanceId) -> InstanceInfo | None: ...
    def record_sent(
        self, entry: Entry, request: ApiRequest, route: Route, instance: InstanceInfo
    ) -> None: ...
    def record_at_limit(self, instance: InstanceId) -> None: ...
    def doubt(self, instance: InstanceInfo) -> None: ...
    def cancel_transfer(self, entry: Entry) -> None: ...


class Attempts:
    """Failures of one request, and whether it is tried again. Owned by the request's task.

    `sent_to` is written by the sender.
    """

    def __init__(self, request: ApiRequest, entry: Entry, scheduler: Scheduler) -> None:
        self._request, self._entry, self._instances = request, entry, scheduler
        self._poison, self._metrics = scheduler.poison, scheduler.metrics
        self.sent_to: dict[InstanceId, InstanceInfo] = {}
        self._failed: dict[InstanceId, tuple[int, float]] = {}  # process, and when
        self._failure: InstanceFailed | None = None
        self._give_up_s = 0.0
        self._generated = -1
        self._excused: set[InstanceId] = set()
        self.num_failures = 0

    @property
    def are_over(self) -> bool:
        """Whether there is no time left for another attempt."""
        return time.monotonic() >= self._give_up_s

    def excluded(self, within_s: float = inf) -> frozenset[InstanceId]:
        """Return the instances that failed lately, unless other processes replaced them."""
        if not self._failed:
            return frozenset()
        since_s, info = time.monotonic() - within_s, self._instances.info
        return frozenset(
            name
            for name, (pid, at_s) in self._failed.items()
            if at_s > since_s and ((one := info(name)) is None or one.pid == pid)
        )

    def for_resuming(self) -> Iterator[frozenset[InstanceId]]:
        """Yield what may not continue an output: first all but the instance that has a copy of it,
        then those that failed, at last those that failed just now."""
        mirror = self._entry.mirror
        one = self._instances.info(mirror.instance) if mirror is not None else None
        if mirror is not None and one is not None and one.pid == mirror.pid:
            everyone = {each.info.id for each in self._instances.monitor.view().instances}
            yield self.excluded() | (everyone - {mirror.instance})
        yield self.excluded()
        yield self.excluded(RECOVERS_S)

    def begin(self) -> None:
        """Count the time that other attempts have, unless there was no progress since."""
        if self._generated != self._entry.generated:
            self._generated = self._entry.generated
            self._give_up_s = time.monotonic() + RETRY_S

    async def record_failure(self, error: InstanceFailed) -> None:
        """An instance failed the request; raises `Refusal` if it is not tried again."""
        _log.warning("request %s: %s", self._entry.id, error)
        self.begin()
        self._failure = error
        self.num_failures += 1
        instance = self.sent_to.get(error.instance)
        self._failed[error.instance] = instance.pid if instance else 0, time.monotonic()
        if instance is not None and error.is_mute:
            self._instances.doubt(instance)
        if not error.is_suspect:
            self._excused.add(error.instance)
        elif instance is not None:
            self._poison.record_failure(self._request, instance)
        if (refusal := await self._poison.refusal(self._request)) is not None:
            self._record_failed()
            raise refusal
        num_counted = self.num_failures - len(self._excused)
        if error.is_final or num_counted > MAX_RETRIES or self.are_over:
            raise self.refusal()
        if not self._entry.has_output:
            self._metrics.retries.inc()

    def refusal(self) -> Refusal:
        """Return the error for the client when no instance is left to try."""
        self._record_failed()
        if self._failure is None:
            return Refusal(503, "no instance can serve this request now; try again")
        return Refusal(self._failure.status, f"{self._failure} (tried {self.num_failures})")

    def _record_failed(self) -> None:
        if self._entry.has_output:
            self._metrics.streams_broken.labels("failed").inc()


def _digest_of(request: ApiRequest) -> bytes:
    return blake2b(request.raw, digest_size=16, key=request.path.encode()[:64]).digest()
