"""What a router does when requests come faster than they are served. Pure.

- *Persistent queues.* A queue that stays delays every prompt and serves none sooner (Nichols
  and Jacobson, "Controlling Queue Delay", 2012). So a prompt may wait for long after a burst,
  but where prompts have waited for long for `PATIENCE_S` the queue is kept short until it was
  nearly empty once.
- *Fair share.* A client may have up to four times what is still free (a "dynamic threshold", as
  switches share their buffers: Choudhury and Hahne, 1998). Alone it comes to four fifths of the
  limit; with n clients that want all they can get each has 4 / (1 + 4 n) of it, and
  1 / (1 + 4 n) stays free for the next one.
- *Early rejection* (Mooncake). A request that is expected to miss its objective takes time from
  others in vain, and one whose prompt makes others miss theirs wastes what they were given. Both
  are refused on arrival, unless a request would miss its own on an idle cluster too.
- *Retry-After* follows from the load report of an instance, which says what its steps take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_tetri.policy.adaptive import Objective, PricedRoute
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow
from vllm_tetri.policy.step_cost import GUESS
from vllm_tetri.types import InstanceId

LONGEST_S = 60  # what OpenAI's client library is willing to wait
PATIENCE_S = 5.0  # above the limit for this long, a queue counts as persistent (CoDel's interval)
_EMPTY = 0.25  # part of the allowed wait at which a persistent queue counts as empty
_FEW = 8  # queues of fewer prompts are never limited


def whole_seconds(wait_s: float) -> int:
    """Round a wait as for `Retry-After`, 1 to 60."""
    return min(LONGEST_S, max(1, math.ceil(wait_s)))


class Backlogs:
    """The prompts that wait at every instance, priced by its own steps. `most_s` is the longest
    wait in a persistent queue; 0 sets no limit. Owner: one thread; calls come in order of `now`."""

    def __init__(self, most_s: float = 0.0) -> None:
        self.at_limit: frozenset[InstanceId] = frozenset()  # they should get no further prompt
        self._most_s = most_s
        self._long_since_s: dict[InstanceId, float] = {}
        self._persistent: set[InstanceId] = set()

    def observe(self, table: ClusterTable, now: float) -> None:
        """Take over the loads of a newer view."""
        if not self._most_s:
            return
        # One that is not ready may be back soon, and its queue may still be there.
        away = {each.info.id for each in table.view.instances} - table.by_id.keys()
        before, were_persistent, at_limit = self._long_since_s, self._persistent, []
        self._long_since_s = {name: at_s for name, at_s in before.items() if name in away}
        self._persistent = were_persistent & away
        for name, row in table.by_id.items():
            wait_s, since_s = _wait_s(row), before.get(name, now)
            is_long = wait_s > self._most_s and row.view.load.waiting >= _FEW
            has_lasted = is_long and now - since_s >= PATIENCE_S
            is_persistent = has_lasted or name in were_persistent
            if is_long or (is_persistent and wait_s > _EMPTY * self._most_s):
                self._long_since_s[name] = since_s
                if is_persistent:
                    self._persistent.add(name)
            if is_long and is_persistent:
                at_limit.append(name)
        self.at_limit = frozenset(at_limit)

    def retry_after_s(self, table: ClusterTable, full: Iterable[InstanceId]) -> int:
        """Return the whole seconds, 1 to 60, until the first of the `full` instances has capacity.

        That is the time to drain one prompt of average length, or the whole queue where it is a
        persistent one. An instance of which too little is known counts as 1 s.
        """
        waits = []
        for row in filter(None, map(table.by_id.get, full)):
            # One prompt is being computed; others that run are decoding or sending their KV.
            is_persistent = row.id in self.at_limit
            num_prompts = 1 if is_persistent else max(0, row.view.load.waiting) + 1
            waits.append(_wait_s(row) / num_prompts)
        return whole_seconds(min(waits, default=0.0))


def _wait_s(row: InstanceRow) -> float:
    """Return how long the prompts of an instance take; 0 while its steps are not known."""
    if row.cost is GUESS or row.queued_tokens <= 0:
        return 0.0
    return row.computing_s(row.queued_tokens, row.queued_s())


SHARE = 4
RELAX_S = 60.0


def may_begin(own: int, taken: int, limit: float, *, num_clients: int) -> bool:
    """Whether a client that has `own` requests may have one more, if all clients together have
    `taken` of at most `limit`. A single client may have everything."""
    free = limit - taken
    return free > 0 and (num_clients <= 1 or own < SHARE * free)


def may_queue(own: int, taken: int, num_clients: int) -> bool:
    """Whether a client that has `own` requests may have one more where too much waits already:
    while it has less than an equal share of what is `taken` there by these clients, itself
    included."""
    return own == 0 or own * num_clients < taken


@dataclass(frozen=True, slots=True)
class SoftLimit:
    """A guess of the limit of an instance that refused a request below its known limit: the
    requests that it had `taken` at `at_s`, monotonic seconds. Its own bound is one of tokens,
    which a router does not know."""

    taken: int
    at_s: float

    def is_over(self, now: float) -> bool:
        """Whether it is too old to count."""
        return now - self.at_s >= RELAX_S

    def limit(self, most: float, now: float) -> float:
        """Return the limit, of at most `most`; it grows to twice what was there."""
        grown = self.taken * (1 + max(0.0, now - self.at_s) / RELAX_S)
        return max(1, min(most, int(grown)))


_TOLERANCE = 1.25  # error of forecasts; only what is later than that is refused
_LEAST_CONFIDENCE = 0.5  # with less a forecast is a guess, and no request is refused by a guess


@dataclass(frozen=True, slots=True)
class Late:
    """Why a request is refused, and the whole seconds after which it may come again."""

    reason: str
    retry_after_s: int


def expected_late(route: PricedRoute, objective: Objective, output_tokens: float) -> Late | None:
    """Say what the best route for a request would miss; None if it keeps what was promised. A
    pace recovers when outputs of the expected length have ended."""
    if route.confidence < _LEAST_CONFIDENCE:
        return None  # serving it is how one learns
    if route.waits and route.ttft_s > _TOLERANCE * objective.ttft_s:
        reason = f"first token expected in {route.ttft_s:.2g} s, promised {objective.ttft_s:g} s"
        return Late(reason, whole_seconds(route.ttft_s - objective.ttft_s))
    own_s = route.tpot_s if route.shares else 0.0
    pace_s = max(own_s, route.others_tpot_s)
    if pace_s > _TOLERANCE * objective.tpot_s:
        expected_ms, promised_ms = pace_s * 1e3, objective.tpot_s * 1e3
        beside = "" if pace_s == own_s else " of outputs that its prompt interrupts"
        reason = f"{expected_ms:.3g} ms a token{beside} expected, promised {promised_ms:g} ms"
        # Outputs are half written on average.
        return Late(reason, whole_seconds(route.tpot_s * output_tokens / 2))
    return None
