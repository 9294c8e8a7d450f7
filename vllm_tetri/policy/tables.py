"""Makes the table of each view, with what one view alone does not tell. Pure."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from vllm_tetri.policy.cluster import ClusterTable, InstanceRow
from vllm_tetri.policy.spare import Sparing
from vllm_tetri.policy.step_cost import GUESS
from vllm_tetri.types import ClusterView, InstanceId, InstanceState, InstanceView, StepCoefficients

_SHARE_S = 2.0  # memory of the part of an instance's time that prompts take
_MAX_SHARE = 0.9


class TableMaker:
    """Makes a table of every view, and keeps what one view does not tell. Owner: one thread."""

    def __init__(self) -> None:
        self._shares: dict[InstanceId, _Share] = {}
        self._sparing = Sparing()

    def make(self, view: ClusterView, now: float, *, spares: bool = False) -> ClusterTable:
        """Make the table of a view whose ages are right at `now`. With `spares` some of alike
        instances for everything have the role prefill in it, if load is better served so."""
        ready = [each for each in view.instances if each.state is InstanceState.READY]
        kinds: dict[frozenset[tuple[str, str]], int] = {}
        keys = {
            each.info.id: kinds.setdefault(frozenset(each.info.identity.items()), len(kinds))
            for each in ready
        }
        # An instance that has taken no steps yet is as fast as another one of its kind.
        known = {keys[each.info.id]: each.load.cost for each in ready if each.load.cost.is_known}
        shares, rows = {}, []
        for each in ready:
            name, cost = each.info.id, each.load.cost
            cost = cost if cost.is_known else known.get(keys[name], GUESS)
            shares[name] = share = _share(each, cost, self._shares.get(name), now - each.age_s)
            rows.append(InstanceRow(each, cost, keys[name], share.part, now))
        self._shares = shares
        if spares:
            self._sparing.apply(rows, now)
        return ClusterTable(view, now, rows)


class _Share(NamedTuple):
    """The part of an instance's time that prompts take: its last report, and weighted sums
    over the last seconds."""

    seq: int
    tokens_done: int
    reported_s: float
    taken_s: float = 0.0
    passed_s: float = 0.0

    @property
    def part(self) -> float:
        return min(_MAX_SHARE, self.taken_s / self.passed_s) if self.passed_s > 0 else 0.0


def _share(
    one: InstanceView, cost: StepCoefficients, before: _Share | None, reported_s: float
) -> _Share:
    done = one.load.prompt_tokens_done
    if before is None or one.seq < before.seq or done < before.tokens_done:  # a new instance
        return _Share(one.seq, done, reported_s)
    passed_s = reported_s - before.reported_s
    if one.seq == before.seq or passed_s <= 0:
        return before
    kept = exp(-passed_s / _SHARE_S)
    taken_s = kept * before.taken_s + (done - before.tokens_done) * cost.prompt_s
    return _Share(one.seq, done, reported_s, taken_s, kept * before.passed_s + passed_s)
