"""Waiting in tests that have no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(check: Callable[[], Any], timeout_s: float = 10.0, what: str = "") -> Any:
    """Poll until `check` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or check}"
        time.sleep(0.002)
