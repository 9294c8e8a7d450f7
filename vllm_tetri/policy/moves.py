"""Which running outputs move to another instance, and where. Pure.

An output moves when its instance leaves or changes role, when an instance is about to run out of
KV blocks, or when it would be much faster elsewhere. The last two only where both instances are
better off than if they had changed places: what moved would not move back, so nothing swings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_tetri.policy.adaptive import paced_s, prefill_harm_s
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.types import InstanceId, InstanceState, InstanceView, RequestId, Role

# Outputs on their way from one instance at a time: a leaving one sends as fast as it can.
MOST_LEAVING, MOST_ON_WAY = 16, 2
MOST_MOVES = 4  # of one output, unless its instance leaves
REST_S = 2.0  # between two moves of one output, and before the first
# A step has to be so much longer here than there with the output, and the output so much shorter.
_FASTER = 1.25
# Part of the cached KV which a move displaces that a prompt would find and now computes again.
_USED_AGAIN = 0.25
_WORTH_S = 0.5
LEAVES = {InstanceState.DRAINING: "drain", InstanceState.FLIPPING: "flip"}
# With fewer free blocks than this for each decode, some are about to be preempted.
_SCARCE_BLOCKS = 1.0


class RunningOutput(NamedTuple):
    """A running output that could move."""

    request: RequestId
    context_tokens: float  # prompt and output
    left_tokens: float  # of the output, expected
    num_moves: int
    here_s: float  # since it was sent here, or its output began here, in seconds
    model: str = ""  # or adapter, that its next instance must have; empty for any

    @property
    def need(self) -> Need:
        """What it needs elsewhere."""
        return Need(round(self.context_tokens), self.left_tokens)


class Source(NamedTuple):
    """An instance that outputs should leave, and the short reason (`why_leave`)."""

    view: InstanceView
    reason: str
    outputs: Sequence[RunningOutput]
    num_on_way: int = 0  # that leave it already


class MoveOrder(NamedTuple):
    """An output's next instance; `reason` is short."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    reason: str


def usual_left(one: InstanceView) -> float:
    """Return the mean output that an instance expects its decodes to have left, in tokens."""
    load = one.load
    return max(0.0, load.remaining_tokens / max(1.0, load.heavy + load.light))


def move_s(view: InstanceView, step_s: float, context_tokens: float) -> float:
    """Return how long a move takes from an instance, of which the output pauses for a part."""
    return view.load.handover_s + view.load.handover_token_s * context_tokens + 2 * step_s


def why_leave(table: ClusterTable) -> dict[InstanceId, str]:
    """Say of every instance that outputs should leave why they should."""
    found: dict[InstanceId, str] = {}
    takers: dict[int, list[InstanceRow]] = {}  # of outputs, by kind, the fastest first
    for one in table.view.instances:
        row = table.by_id.get(one.info.id)
        if one.info.alone:
            continue
        if one.state in LEAVES:
            found[one.info.id] = LEAVES[one.state]
        elif row is not None and row.decodes >= 2 and row.role is not Role.PREFILL:
            if row.key not in takers:
                takers[row.key] = sorted(table.takers(one.info).by_name, key=_step_with_one_more)
            fastest = next(_apart(row, takers[row.key]), None)
            if row.base_blocks < _SCARCE_BLOCKS * row.decodes and any(
                each.base_blocks > 4 * max(row.decodes, each.decodes)
                for each in _apart(row, takers[row.key])
            ):  # and another one has blocks to spare
                found[row.id] = "memory"
            elif fastest and row.step_s > _FASTER * _step_with_one_more(fastest):
                found[row.id] = "balance"
    return found


def choose_moves(
    sources: Iterable[Source],
    table: ClusterTable,
    *,
    coming: Iterable[tuple[InstanceId, RunningOutput]] = (),
    any_role: bool,
) -> list[MoveOrder]:
    """Choose which outputs leave their instances, and where each goes. What is `coming` to an
    instance already, or goes there from one source, counts there for the next one. With `any_role`
    any instance takes outputs, else those that decode."""
    rows = ClusterState(0.0)  # with the outputs that come or go
    rows.observe(table)
    for target, output in coming:
        if target in table.by_id:
            rows.own(target).add_decode(output.need)
    return [order for each in sources for order in _leave(each, table, rows, any_role=any_role)]


def _leave(
    source: Source, table: ClusterTable, rows: ClusterState, *, any_role: bool
) -> Iterator[MoveOrder]:
    """Yield the moves of outputs from one instance."""
    one, reason, outputs, num_on_way = source
    leaves, base = reason in LEAVES.values(), table.by_id.get(one.info.id)
    left = (MOST_LEAVING if leaves else MOST_ON_WAY) - num_on_way
    if left <= 0 or not outputs:
        return
    takers = table.takers(one.info, any_role=any_role).by_name
    others = [
        row
        for row in (takers if leaves or base is None else _apart(base, takers))
        if row.id != one.info.id
    ]
    step_s = base.step_s if base is not None else one.load.step_s
    for each in sorted(outputs, key=lambda output: -output.left_tokens):
        if not leaves and (each.num_moves >= MOST_MOVES or each.here_s < REST_S):
            continue
        if each.left_tokens * step_s <= move_s(one, step_s, each.context_tokens):
            continue
        able = [
            row
            for row in map(rows.row, others)
            if row.has_capacity(each.need)
            if not each.model or each.model in row.view.info.names
        ]
        target = min(able, key=lambda row: (row.step_s, row.id), default=None)
        if target is None:
            continue
        if reason == "balance":
            if base is None or not _pays(rows.row(base), target, each):
                continue
            here = rows.own(base.id)
            here.step_s -= here.request_s
        rows.own(target.id).add_decode(each.need)
        yield MoveOrder(each.request, one.info.id, target.id, reason)
        left -= 1
        if not left:
            return


def _pays(here: InstanceRow, there: InstanceRow, output: RunningOutput) -> bool:
    """Whether an output is faster elsewhere by far, prompts and what its KV displaces counted in,
    while the instance that it leaves stays the slower one."""
    step_s, context_tokens = _step_with_one_more(there), output.context_tokens
    stays_slower = here.step_s - here.request_s >= step_s
    here_s, there_s = paced_s(here, here.step_s), paced_s(there, step_s)
    computed_s = context_tokens * there.token_s(context_tokens)
    displaced_s = _USED_AGAIN * (computed_s + prefill_harm_s(there, context_tokens))
    cost_s = _WORTH_S + move_s(here.view, here.step_s, context_tokens) + displaced_s
    is_faster = here.step_s > _FASTER * step_s and here_s > _FASTER * there_s
    return stays_slower and is_faster and output.left_tokens * (here_s - there_s) > cost_s


def _step_with_one_more(row: InstanceRow) -> float:
    return row.step_s + row.request_s


def _apart(row: InstanceRow, rows: Iterable[InstanceRow]) -> Iterator[InstanceRow]:
    """Yield the others, none on the same device: those do not help each other."""
    device = row.device or None
    return (each for each in rows if each.id != row.id and each.device != device)
