"""Which long outputs are copied to a second instance while they run, and to which. Pure.

The copy is in the prefix cache there, so it takes no block that anything else wants, and an
instance that goes on after a death computes only what followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need
from vllm_tetri.types import InstanceId, RequestId

# Of the time of an instance, copies take one part in so many.
SHARE = 10


class Mirror(NamedTuple):
    """What a second instance, by name and process, has of a running output."""

    instance: InstanceId
    pid: int
    num_tokens: int  # prompt and output
    generated: int  # of the output when it was copied


class LongOutput(NamedTuple):
    """A running output that could be copied."""

    request: RequestId
    model: str
    source: InstanceId
    generated: int
    prompt_tokens: int
    mirror: Mirror | None

    @property
    def num_new(self) -> int:
        """Return how many tokens of it no second instance has."""
        return self.generated - (self.mirror.generated if self.mirror is not None else 0)


class MirrorOrder(NamedTuple):
    """An output of which the target gets all blocks beyond the first `held_tokens`."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    held_tokens: int


def choose_mirrors(
    table: ClusterTable, outputs: Iterable[LongOutput], busy: Collection[InstanceId], every: int
) -> list[MirrorOrder]:
    """Choose which outputs are copied now: those with the most tokens that no second instance has,
    at least `every`. No instance takes part in two copies, and none that is `busy` in any. An
    output stays with its mirror as long as that is ready, and else begins anew, on another device
    if there is one, where steps are shortest. A target has to have room for all of it."""
    taken, orders = set(busy), list[MirrorOrder]()
    current = [each._replace(mirror=_current(table, each)) for each in outputs]
    for each in sorted(current, key=lambda one: -one.num_new):
        source, mirror = table.by_id.get(each.source), each.mirror
        if each.num_new < every or source is None or each.source in taken:
            continue
        # An adapter is no model of an instance: block hashes have only its name.
        if source.view.info.alone or each.model not in source.view.info.models:
            continue
        rows = [
            row
            for row in table.takers(source.view.info).by_name
            if row.id not in taken and row.id != source.id and _takes(row, each)
        ]
        if mirror is not None:
            rows = [row for row in rows if row.id == mirror.instance]
        target = min(rows, key=partial(_rank, source), default=None)
        if target is not None:
            taken |= {source.id, target.id}
            held_tokens = mirror.num_tokens if mirror is not None else 0
            orders.append(MirrorOrder(each.request, source.id, target.id, held_tokens))
    return orders


def _current(table: ClusterTable, output: LongOutput) -> Mirror | None:
    """Return the mirror of an output if its process is there, and not what writes the output."""
    if (mirror := output.mirror) is None or (row := table.by_id.get(mirror.instance)) is None:
        return None
    return mirror if row.id != output.source and row.view.info.pid == mirror.pid else None


def _takes(row: InstanceRow, output: LongOutput) -> bool:
    tokens = output.prompt_tokens + output.generated
    has_room = row.has_capacity(Need(tokens, 1)) and row.arena_tokens >= tokens
    return has_room and output.model in row.view.info.models


def _rank(source: InstanceRow, row: InstanceRow) -> tuple[bool, float, InstanceId]:
    is_near = bool(row.device) and row.device == source.device
    return is_near, row.step_s, row.id
