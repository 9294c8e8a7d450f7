"""Requests that ended lately, for `explain`, the page and the error of expected times."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import NamedTuple

from vllm_tetri.messages import Served
from vllm_tetri.router.table import Entry, Mark
from vllm_tetri.types import InstanceId, RequestId

MOST = 2048  # requests that are kept
_NEW = 1 / 32  # weight of the newest in the mean error of expected times


class Ended(NamedTuple):
    """A request that ended; times are monotonic seconds, durations seconds."""

    id: RequestId
    route: str  # as in tetri_requests_total, like `outcome`
    outcome: str
    problem: str  # of one that was refused or broke off
    arrival_s: float
    ended_s: float
    first_byte_s: float | None
    generated: int  # events of a stream, 0 if it was none
    prompt_tokens: int | None
    predicted: int | None
    prefill: InstanceId
    decode: InstanceId
    reason: str
    expected_s: float  # to the first token; 0: not priced
    expected_error_s: float  # mean error of expected times before this one
    marks: list[Mark]
    served: list[tuple[InstanceId, Served]]  # may come later than the end
    model: str = ""

    @property
    def output_tokens(self) -> int | None:
        """The length of the output as the instance counted it that wrote its end; None: not known
        (yet). Instances tell in any order."""
        told = (each for name, each in reversed(self.served) if name == self.decode)
        return next((each.output_tokens for each in told), None)


class History:
    """The newest requests that ended at this router. Owned by the event loop."""

    def __init__(self) -> None:
        self._rows: deque[Ended] = deque(maxlen=MOST)
        self._by_id: dict[RequestId, Ended] = {}
        self._error_s = 0.0

    def record(self, entry: Entry, route: str, outcome: str, problem: str, now: float) -> Ended:
        """Keep a request that ends now, instead of the oldest one, and return what is kept."""
        row = self.row(entry, route, outcome, problem, now)
        if row.expected_s and row.first_byte_s is not None and row.generated:
            error_s = abs(row.first_byte_s - row.arrival_s - row.expected_s)
            weight = _NEW if self._error_s else 1.0
            self._error_s += weight * (error_s - self._error_s)
        rows, by_id = self._rows, self._by_id
        if len(rows) == rows.maxlen and by_id.get(rows[0].id) is rows[0]:
            del by_id[rows[0].id]
        rows.append(row)
        by_id[row.id] = row
        return row

    def row(self, entry: Entry, route: str, outcome: str, problem: str, now: float) -> Ended:
        """Return what is known of a request at a time."""
        return Ended(
            entry.id, route, outcome, problem, entry.arrival_s, now, entry.first_byte_s,
            entry.generated, entry.prompt_tokens, entry.predicted, entry.prefill, entry.decode,
            entry.reason, entry.expected_s, self._error_s, entry.marks, entry.served, entry.model,
        )  # fmt: skip

    def get(self, request: RequestId) -> Ended | None:
        """Return a request that ended, if it is kept."""
        return self._by_id.get(request)

    def since(self, at_s: float) -> list[Ended]:
        """Return what ended after a monotonic time, the newest last."""
        newest = takewhile(lambda row: row.ended_s > at_s, reversed(self._rows))
        return list(newest)[::-1]
