"""How often and how long a request is tried, and with whom not again."""

from __future__ import annotations

import logging
import time

from vllm_tetri.router.answers import LegFailed, Refusal
from vllm_tetri.router.call import Call
from vllm_tetri.router.hooks import Hooks
from vllm_tetri.router.table import Entry
from vllm_tetri.types import InstanceId, InstanceInfo

# After failures, mid-stream ones included; busy instances are asked until none is left.
MAX_RETRIES = 2
# No further retry so long after the first failure, or the first since there was progress.
RETRY_S = 30.0
# Who was dead then does not count as ready any more, or has another process.
_RECOVERS_S = 2.0

_log = logging.getLogger(__name__)


class Tries:
    """Of one request. Owner: its task."""

    def __init__(self, call: Call, entry: Entry, hooks: Hooks) -> None:
        self._call = call
        self._entry = entry
        self._hooks = hooks
        self._failed: dict[InstanceId, tuple[int, float]] = {}  # processes, and when
        self._failure: LegFailed | None = None
        self._num_failures = 0
        self._give_up_s = 0.0
        self._generated = -1

    @property
    def are_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self._give_up_s

    @property
    def num_failures(self) -> int:
        """How often an instance failed."""
        return self._num_failures

    @property
    def excluded(self) -> frozenset[InstanceId]:
        """Instances that failed, unless others have their names by now."""
        return frozenset(name for name in self._failed if self._is_same(name))

    @property
    def just_excluded(self) -> frozenset[InstanceId]:
        """Of those, without the ones that failed a while ago: if they are in use, they were
        silent for a time, or only this request's connection broke."""
        since_s = time.monotonic() - _RECOVERS_S
        return frozenset(name for name in self.excluded if self._failed[name][1] > since_s)

    async def note(self, error: LegFailed, asked: InstanceInfo | None, *, has_shown: bool) -> None:
        """An instance failed.

        Args:
            error: How.
            asked: The instance, if it got the request.
            has_shown: Whether the client has got something.

        Raises:
            Refusal: That is enough.
        """
        _log.warning("request %s: %s", self._entry.id, error)
        if self._generated != self._entry.generated:
            self._generated = self._entry.generated
            self._give_up_s = time.monotonic() + RETRY_S
        self._failure, self._num_failures = error, self._num_failures + 1
        process = asked.pid if asked is not None else 0
        self._failed[error.instance] = process, time.monotonic()
        quarantine = self._hooks.quarantine
        if asked is not None and error.had_it:
            quarantine.accuse(self._call, asked)
        if await quarantine.holds(self._call):
            if has_shown:
                self._hooks.faults.broke("failed")
            raise quarantine.refusal(self._call)
        if error.is_final or self._num_failures > MAX_RETRIES or self.are_over:
            raise self.refusal(has_shown=has_shown)
        if not has_shown:
            self._hooks.faults.retried()

    def refusal(self, *, has_shown: bool) -> Refusal:
        """What the client is told when nobody is left to try."""
        if has_shown:
            self._hooks.faults.broke("failed")
        if self._failure is None:
            return Refusal(503, "no instance can serve this request now; try again")
        return Refusal(self._failure.status, f"{self._failure} (tried {self._num_failures})")

    def _is_same(self, name: InstanceId) -> bool:
        instance = self._hooks.info(name)
        return instance is None or instance.pid == self._failed[name][0]
