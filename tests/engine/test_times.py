"""What an engine tells of the times of requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.engine.harness import Engine
from vllm_tetri.messages import Served
from vllm_tetri.types import Role


def test_a_request_that_ends_is_told_with_its_times(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Role.BOTH, arena_bytes=1 << 20)
    told: list[Any] = []
    engine.endpoint.agent.publish = lambda message, **_: told.append(message)
    began_s = time.monotonic()
    for name in ("a", "b"):  # the same prompt again is in the prefix cache
        engine.add(name, list(range(300)), max_tokens=5)
        engine.run_until(lambda name=name: name in engine.finished)
    engine.add("c", list(range(300)), max_tokens=5)
    engine.abort("c")  # before any step has it
    took_s = time.monotonic() - began_s
    first, again, cancelled = (each for each in told if isinstance(each, Served))
    assert (first.request, again.request, cancelled.request) == ("a", "b", "c")
    assert first.output_tokens == 5
    assert first.cached_tokens == 0 < again.cached_tokens < 300
    assert min(first.compute_s, first.output_s, again.compute_s, cancelled.queue_s) > 0
    assert cancelled.compute_s == cancelled.output_s == 0
    parts = (each.queue_s + each.compute_s + each.output_s for each in (first, again, cancelled))
    assert sum(parts) <= took_s
    engine.close()
