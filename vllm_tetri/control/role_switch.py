"""A role on its way from the agent's thread to the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_tetri.types import Role


class RoleSwitch:
    """One thread wants a role, another takes it between two steps.

    Args:
        is_idle: Whether the engine has nothing to do, and so takes the role before
            anything else that it will do.
        on_taken: Called by the taking thread.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool] = lambda: True,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_idle = is_idle
        self._on_taken = on_taken
        self._lock = threading.Lock()  # guards the two fields below
        self._wanted: Role | None = None
        self._taken_s: float | None = None

    # -- the agent's thread ---------------------------------------------------------

    def want(self, role: Role) -> None:
        """The newest one counts."""
        with self._lock:
            self._wanted, self._taken_s = role, None

    def taken_s(self) -> float | None:
        """When the role that is wanted was taken (monotonic); None: not yet."""
        if self._wanted is not None and self._is_idle():
            return time.monotonic()
        return self._taken_s

    def withdraw(self) -> bool:
        """Take back what is wanted; False if it was taken before."""
        with self._lock:
            self._wanted = None
            return self._taken_s is None

    # -- the engine's thread --------------------------------------------------------

    def take(self) -> Role | None:
        """The role to have from now on, if that is another one; cheap if it is not."""
        if self._wanted is None:
            return None
        with self._lock:
            role: Role | None = self._wanted  # withdrawn meanwhile, perhaps
            self._wanted = None
            if role is not None:
                self._taken_s = time.monotonic()
        if role is not None:
            self._on_taken()
        return role
