"""The router runs on uvloop, so its tests do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

# Its transports behave a little differently, and so the own HTTP is tried on both.
_ON_BOTH = ("test_http_client.py",)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """How pytest-asyncio makes a test's event loop."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in _ON_BOTH:
        loops["asyncio"] = asyncio.new_event_loop
    return loops
