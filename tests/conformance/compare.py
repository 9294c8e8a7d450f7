"""One script through real engines and through the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.real import Play
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.log import Decision, Step
from vllm_tetri.sim.modes import SplitMode
from vllm_tetri.sim.snapshot import SimSnapshot
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import Role

# What decisions are made on.
_PREFILL_FIELDS = (
    "running", "waiting", "queued_prefill_tokens", "blocks_total", "heavy", "light",
    "remaining_tokens", "decodes_done", "bucket_tokens",
)  # fmt: skip
# Where KV leaves, blocks are free again as soon as it has, which is a matter of real time.
_FIELDS = (*_PREFILL_FIELDS, "blocks_used", "reserved_blocks")


def assert_same(
    setting: ClusterConfig, specs: Sequence[RequestSpec], folder: Path, patch: pytest.MonkeyPatch
) -> list[Decision]:
    """Both decide the same. Returns what the simulator decided."""
    simulated: list[Decision] = []
    seen: dict[int, SimSnapshot] = {}

    class Watched(SplitMode):
        def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Any:
            seen[snapshot.view.seq] = snapshot
            return super().route(snapshot, spec, now)

        def dispatch(self, prefill: Any, snapshot: SimSnapshot, *args: Any, **options: Any) -> Any:
            seen[snapshot.view.seq] = snapshot
            return super().dispatch(prefill, snapshot, *args, **options)

    run(replace(setting, mode=Watched), specs, log=simulated.append)
    play = Play(setting, specs, folder, patch)
    play.run()
    for seq, loads in enumerate(play.loads, 1):
        if seq in seen:
            for each in seen[seq].view.instances:
                where = f"report {seq} of {each.info.id}"
                facts = _FIELDS if each.info.role is not Role.PREFILL else _PREFILL_FIELDS
                ours = {name: getattr(each.load, name) for name in facts}
                real = {name: getattr(loads[each.info.id], name) for name in facts}
                assert ours == real, where
    real_by, simulated_by = _sorted(play.decisions), _sorted(simulated)
    for what in sorted({*real_by, *simulated_by}):
        _assert_equal(what, simulated_by[what], real_by[what])
    return simulated


def steps(decisions: Sequence[Decision]) -> list[Step]:
    """Return the decisions of all instances."""
    return [each for each in decisions if isinstance(each, Step)]


def _sorted(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
    """Steps by instance, and the others by kind: at the same time instances take turns."""
    found: dict[str, list[Decision]] = defaultdict(list)
    for each in decisions:
        found[each.instance if isinstance(each, Step) else type(each).__name__].append(each)
    return found


def _assert_equal(what: str, simulated: list[Decision], real: list[Decision]) -> None:
    for place, (ours, theirs) in enumerate(zip(simulated, real, strict=False)):
        before = "".join(f"\n  before    {each}" for each in real[max(0, place - 3) : place])
        assert ours == theirs, f"{what}:{before}\n  simulated {ours}\n  real      {theirs}"
    assert len(simulated) == len(real), f"{what}: {len(simulated)} simulated, {len(real)} real"
