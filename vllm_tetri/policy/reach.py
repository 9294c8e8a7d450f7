"""Decode instances that routers see and this instance cannot reach.

A network can be cut between two instances only. Every transfer to the other side then costs
its whole timeout, and nothing in the cluster's picture says so.
"""

from __future__ import annotations

from collections.abc import Set

AVOID_S = 10.0
_MOST = 1024  # endpoints that are remembered


class Reach:
    """Endpoints to which the last transfer failed; one request at a time tries them again.

    Owner: whoever dispatches. An instance that was started again has another endpoint.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def failed(self, endpoint: str, now: float) -> None:
        """A transfer got no answer, or its connection broke."""
        self._until_s.pop(endpoint, None)
        self._until_s[endpoint] = now + AVOID_S
        if len(self._until_s) > _MOST:
            del self._until_s[next(iter(self._until_s))]

    def succeeded(self, endpoint: str) -> None:
        """A transfer was done."""
        self._until_s.pop(endpoint, None)

    def tries(self, endpoint: str, now: float) -> None:
        """A request goes there: the next ones wait for what becomes of it."""
        if endpoint in self._until_s:
            self._until_s[endpoint] = now + AVOID_S

    def avoided(self, now: float) -> Set[str]:
        """Endpoints that are better left alone while there are others."""
        return {endpoint for endpoint, until in self._until_s.items() if now < until}
