"""What an instance that takes nothing new may still get, as its routers say."""

from __future__ import annotations

ROUTER_LOST_S = 1.0  # a router that said nothing for so long has no say any more


class Expected:
    """Requests that every router has for one instance. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._heard_s: dict[int, float] = {}
        self._in_flight: dict[int, tuple[int, float]] = {}

    def ask_again(self, now: float) -> None:
        """What was said before now does not count."""
        self._since = now
        self._in_flight.clear()

    def heard(self, router: int, now: float) -> None:
        """A router said something, of whatever."""
        self._heard_s[router] = now

    def told(self, router: int, in_flight: int, now: float) -> None:
        """A router says how many requests it has for this instance."""
        self.heard(router, now)
        self._in_flight[router] = in_flight, now

    def is_any(self, now: float) -> bool:
        """Whether a router that can be heard has a request for it."""
        return any(
            in_flight > 0 and now - at_s < ROUTER_LOST_S
            for in_flight, at_s in self._in_flight.values()
        )

    def is_known(self, now: float) -> bool:
        """Whether all routers that can be heard have told since `ask_again`."""
        if now - self._since >= ROUTER_LOST_S:
            return True  # none is to hold things up for longer
        return bool(self._in_flight) and all(
            router in self._in_flight
            for router, at_s in self._heard_s.items()
            if now - at_s < ROUTER_LOST_S
        )
