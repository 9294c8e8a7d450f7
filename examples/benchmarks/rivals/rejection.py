"""Which requests Mooncake refuses where there are too many (section 7 of its paper).

All rules look on arrival at the time to the first token, and again at the pace where a request is
to be decoded once its prompt is computed (7.1): what is refused then was computed in vain. They
differ in the pace at which they look on arrival:

- `Rule.LATER`: none.
- `Rule.NOW` (7.2): that of the outputs which are decoded there now. Those to come, whose prompts
  wait, are not among them, so the load swings (7.3).
- `Rule.FORECAST` (7.4): that at the end of the own prompt. Outputs whose prompts are computed by
  then have come, those that are decoded for the usual time have gone, and all decode instances
  share them evenly.

- `Rule.OUTLIVED`, ours: the same, but outputs go as often as those did that had lasted as long.

Counts are exact; times are learnt from outputs that have ended. Prompts are computed one by one.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from statistics import fmean

from examples.benchmarks.rivals.modes import MooncakeMode
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective, PricedRoute
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow
from vllm_tetri.policy.overload import Late, expected_late
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId, Role


class Rule(Enum):
    """The pace that counts on arrival."""

    LATER, NOW, FORECAST, OUTLIVED = auto(), auto(), auto(), auto()


@dataclass(slots=True)
class _Output:
    prefill: InstanceId
    decode: InstanceId
    prompt_tokens: int
    sent_s: float
    first_s: float  # when its prompt is computed; expected, while `is_decoded` is false
    is_decoded: bool = False


class RejectingMode(MooncakeMode):
    """Mooncake's Conductor with one of these rules."""

    def __init__(
        self, config: ClusterConfig, rule: Rule, objective: Objective = NO_OBJECTIVE
    ) -> None:
        super().__init__(config, objective)
        self._rule = rule
        self._num_decode = sum(each.role is not Role.PREFILL for each in config.instances)
        self._outputs: dict[int, _Output] = {}
        self._engines = {each.id: each.engine for each in config.instances}
        self._done_s: dict[InstanceId, float] = {}  # when the newest prompt was computed there
        self._durations: list[float] = []  # of outputs that have ended, sorted
        self._now = self._first_s = 0.0  # of the request that is routed

    def forecast(self, at_s: float, now: float) -> float:
        """Return the outputs that each instance is expected to decode at a time to come."""

        def outliving(seconds: float) -> float:  # one more takes for ever
            return len(self._durations) - bisect_right(self._durations, seconds) + 1

        usual_s, num = fmean(self._durations) if self._durations else inf, 0.0
        for each in self._outputs.values():
            first_s = each.first_s if each.is_decoded else max(now, each.first_s)
            if first_s <= at_s and self._rule is Rule.OUTLIVED:
                num += outliving(at_s - first_s) / outliving(now - first_s)
            elif first_s <= at_s < first_s + usual_s:
                num += 1
        return num / self._num_decode

    def decoded(self, name: InstanceId) -> int:
        """Return the outputs that an instance decodes now."""
        return sum(each.is_decoded and each.decode == name for each in self._outputs.values())

    def has_room(self, decode: InstanceRow, tokens: int) -> bool:
        return True  # room is taken to be enough: only the pace counts

    def first_s(self, prefill: InstanceRow, tokens: int) -> float:
        name = prefill.id
        if prefill.role is not Role.PREFILL:
            return super().first_s(prefill, tokens)
        here = [each for each in self._outputs.values() if each.prefill == name]
        queue = [each for each in here if not each.is_decoded]
        ready_s = max(self._done_s.get(name, 0.0), queue[0].sent_s) if queue else self._now
        ready_s += sum(self._prompt_s(name, each.prompt_tokens) for each in queue)
        return max(0.0, ready_s - self._now) + self._prompt_s(name, tokens)

    def _prompt_s(self, prefill: InstanceId, tokens: int) -> float:
        cost, most = self._engines[prefill].cost, self._engines[prefill].chunk_tokens
        chunks = [(start, min(most, tokens - start)) for start in range(0, tokens, most)]
        return sum(cost.step_s(0, 0, num, start + (num - 1) / 2) for start, num in chunks)

    def pace_s(self, decode: InstanceRow, tokens: int, first_s: float) -> float:
        self._first_s = first_s
        if self._rule is Rule.LATER:
            return 0.0
        if self._rule is Rule.NOW:
            return _pace_s(decode, self.decoded(decode.id), tokens)
        return _pace_s(decode, self.forecast(first_s, self._now), tokens)

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        self._now = now
        route = super().route(table, spec, now)
        if not isinstance(route, Late):
            prefill = route.prefill
            decode = self._decodes.get(spec.id, prefill)
            tokens, first_s = spec.prompt_tokens, self._first_s
            self._outputs[spec.id] = _Output(prefill, decode, tokens, now, first_s)
        return route

    def prefilled(self, spec: RequestSpec, now: float) -> Late | None:
        output = self._outputs[spec.id]
        row = self._state.row(self._state.table.by_id[output.decode])
        others, known = self.decoded(row.id), row.cost.confidence
        pace_s = _pace_s(row, others, spec.prompt_tokens)
        route = PricedRoute(row.id, row.id, 0.0, pace_s, 0.0, "", False, others > 0, known)
        self._done_s[output.prefill] = now
        late = expected_late(route, self.objective, row.left_tokens)
        if late is None or output.prefill == output.decode:
            output.is_decoded, output.first_s = True, now
            return None
        del self._outputs[spec.id], self._decodes[spec.id]
        return late

    def ended(self, spec: RequestSpec, now: float) -> None:
        super().ended(spec, now)
        output = self._outputs.pop(spec.id)
        if output.is_decoded:
            insort(self._durations, now - output.first_s)
        else:  # its first token was the last one
            self._done_s[output.prefill] = now


def _pace_s(row: InstanceRow, others: float, tokens: int) -> float:
    """Return the time per token of an output beside so many others, prompts counted in."""
    cost = row.cost
    own_s = cost.request_s + tokens * cost.token_s
    return (cost.base_s + others * row.request_s + own_s) / (1 - row.prompt_share)
