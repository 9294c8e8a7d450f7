"""What several routers cost, simulated, where each knows only what it sent itself, and where each
is told what the others sent.

`python -m examples.benchmarks.several --output FILE.jsonl` lets 1, 2, 4 and 8 routers of mode
adaptive take requests in turn for eight `both` instances of each profile at the knee. All see the
reports of instances, ten a second. What a router has sent since counts there too; where it tells
the others, they count it 3 ms later.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

from examples.benchmarks.classes import RATES
from examples.benchmarks.figures import Results
from examples.benchmarks.regrets import ACCURACY, at_once_per_s
from examples.benchmarks.regrets import INSTANCES as PRICED
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.policy.cluster import ClusterTable, Need
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.fetch import FetchPlan
from vllm_tetri.policy.overload import Late
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import MODEL, ClusterConfig, EngineConfig, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.modes import AdaptiveMode, SimMode
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import RequestSpec, draw
from vllm_tetri.types import InstanceId

PROFILES = ("opt-13b-2xv100", "roofline:llama-3-8b:h100")
KINDS, COUNTS, INSTANCES = ("hpld", "mixed"), (1, 2, 4, 8), 8
LAG_S = 0.003  # over an instance, to another router
SHOWN = ("ttft_mean_s", "ttft_p99_s", "itl_p99_s", "jct_mean_s")


class Sent(NamedTuple):
    """What a router tells the others of a request."""

    due_s: float
    by: Router
    route: Route
    need: Need


class Router(AdaptiveMode):
    """One of several routers."""

    def sent(self, table: ClusterTable, spec: RequestSpec, route: Route, due_s: float) -> Sent:
        """Return what the others are told."""
        tokens = table.usual(MODEL).output_tokens or self._lengths.outlook(None, 0)[0]
        return Sent(due_s, self, route, self.need(spec, route.prefill, tokens))

    def count(self, sent: Sent, now: float) -> None:
        """Count what another one sent."""
        route = sent.route
        after_s = route.ttft_s if route.is_split else 0.0
        self._state.record_sent(route.prefill, route.decode, sent.need, now, decode_after_s=after_s)


class Routers(SimMode):
    """So many routers take requests in turn. What one sends, the others count `lag_s` later."""

    moves_outputs = spares_outputs = is_anywhere = True

    def __init__(self, config: ClusterConfig, count: int, lag_s: float) -> None:
        self._all, self._lag_s = [Router(config) for _ in range(count)], lag_s
        for each in self._all:
            each.residency = self.residency
        self._told = deque[Sent]()

    def _of(self, spec: RequestSpec) -> Router:
        return self._all[spec.id % len(self._all)]

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        while self._told and self._told[0].due_s <= now:
            told = self._told.popleft()
            for each in self._all:
                if each is not told.by:
                    each.count(told, now)
        chosen = self._of(spec)
        route = chosen.route(table, spec, now)
        if self._lag_s < inf and not isinstance(route, Late):
            self._told.append(chosen.sent(table, spec, route, now + self._lag_s))
        return route

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        return self._of(request.spec).dispatch(request, table, now, may_wait=may_wait)

    def plan_fetch(self, spec: RequestSpec, instance: InstanceId) -> FetchPlan | None:
        return self._of(spec).plan_fetch(spec, instance)

    def ended(self, spec: RequestSpec, now: float) -> None:
        self._of(spec).ended(spec, now)


def several(count: int, lag_s: float) -> Callable[[ClusterConfig], SimMode]:
    """Return the mode of so many routers."""
    return lambda config: Routers(config, count, lag_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=3000, help="requests in a cell; 3000")
    parser.add_argument("--repeats", type=int, default=3, help="seeds; 3")
    output = Path("several-routers.jsonl")
    parser.add_argument("--output", type=Path, default=output, help="result file")
    options = parser.parse_args()
    by = ["profile", "class", "routers", "told"]
    given = {"instances": INSTANCES, "num_prompts": options.num_prompts}
    results = Results.of(options.output, by, SHOWN, given, is_new=True)
    for name in PROFILES:
        engine = of_profile(EngineConfig(), profile(name))
        instances = make_instances(both=INSTANCES, engine=engine)
        for kind in KINDS:
            per_s = RATES["knee"] * at_once_per_s(engine, kind, 720) * INSTANCES / PRICED
            for seed in range(options.repeats):
                specs = draw(kind, options.num_prompts, per_s, seed, accuracy=ACCURACY)
                for count in COUNTS:
                    for is_told in (False, True) if count > 1 else (False,):
                        mode = several(count, LAG_S if is_told else inf)
                        outcome = run(ClusterConfig(instances, mode), specs)
                        found = figures(outcome.served, NO_OBJECTIVE, outcome.refused)
                        cell = {each: round(found[each], 5) for each in SHOWN}
                        results.add(
                            profile=name, **{"class": kind}, routers=count, told=is_told,
                            seed=seed, **cell,
                        )  # fmt: skip
                        words = ", ".join(f"{each} {value}" for each, value in cell.items())
                        print(f"{name} {kind} {count} told {is_told}: {words}", flush=True)


if __name__ == "__main__":
    main()
