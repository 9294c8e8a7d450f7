"""What an instance that takes nothing new may still get, as its routers say."""

from __future__ import annotations

ROUTER_LOST_S = 1.0  # a router that said nothing for so long has no say any more


class Expected:
    """Requests that every router has for one instance. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._in_flight: dict[int, tuple[int, float]] = {}

    def ask_again(self, now: float) -> None:
        """Forget what was said before now."""
        self._since = now
        self._in_flight.clear()

    def told(self, router: int, in_flight: int, now: float) -> None:
        """A router says how many requests it has for this instance."""
        self._in_flight[router] = in_flight, now

    def is_any(self, now: float) -> bool:
        """Whether a router that can be heard has a request for it."""
        return any(
            in_flight > 0 and now - at_s < ROUTER_LOST_S
            for in_flight, at_s in self._in_flight.values()
        )

    def is_known(self, now: float) -> bool:
        """Whether a router has spoken since `ask_again`, or none can be heard."""
        return bool(self._in_flight) or now - self._since >= ROUTER_LOST_S
