"""Tables of a report."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tetri.bench.report.claims import Claim, is_asked
from vllm_tetri.bench.report.document import Table
from vllm_tetri.bench.report.losses import Beside, beside
from vllm_tetri.bench.report.values import (
    CHUNKED,
    METRICS,
    OURS,
    Source,
    Value,
    Values,
    perf,
    ratio,
)
from vllm_tetri.bench.stats import Estimate
from vllm_tetri.bench.suite.experiments import EXPERIMENTS

NOTHING = "–"
NOT_RUN = "not run"
_BASES = {Source.MEASURED: "stock", Source.SIMULATED: "vllm-2023"}
_SIMULATED = (Source.SIMULATED,)
_ENGINES = (Source.MEASURED, Source.PACED, Source.ESTIMATE)
_COMPARED = ("ttft_mean_s", "jct_mean_s", "itl_p99_s", "goodput_strict", "goodput")
_JUDGED = ("e1", "e11", "e12", "e13")  # whose values e13 looks at


def claims_table(claims: Sequence[Claim]) -> Table:
    """Numbers of papers, and ours beside them. An experiment's engines are all paced, or none."""
    is_paced = any(is_asked(claim.number, Source.PACED) for claim in claims)
    engines = "paced engines" if is_paced else "real engines"
    heads = ["what", "paper", "reproduction (simulator)", engines, "where it stands"]
    rows = []
    for claim in claims:
        number = claim.number
        simulated, others = (_ours(claim, sources) for sources in (_SIMULATED, _ENGINES))
        rows.append([number.what, number.text(), simulated, others, number.source])
    return Table(heads, rows, num_text=len(heads))


def _ours(claim: Claim, sources: Sequence[Source]) -> str:
    """Ours of these kinds; nothing where none could stand there."""
    found = [each.text(claim.number) for each in claim.ours if each.ask.source in sources]
    if found:
        return "; ".join(found)
    return NOT_RUN if any(is_asked(claim.number, source) for source in sources) else NOTHING


def values_table(found: Sequence[Value]) -> Table:
    """A row for each system and what it was asked, a column for each metric."""
    metrics = [key for key in METRICS if any(each.metric == key for each in found)]
    rows = {(each.group, each.system): [NOTHING] * len(metrics) for each in found}
    for each in found:
        metric = METRICS[each.metric]
        text = each.found.text(metric.factor, metric.digits)
        rows[each.group, each.system][metrics.index(each.metric)] = text
    heads = ["asked", "system", *(METRICS[key].title for key in metrics)]
    return Table(heads, [[*key, *cells] for key, cells in rows.items()], num_text=2)


def perf_table(values: Values, source: Source) -> Table | None:
    """Performance per dollar by both formulas; None without anything to compare."""
    known = {(each.group, each.system, each.metric): each for each in values.of("e1", source)}
    base = _BASES[source]
    rows = []
    for group, system in dict.fromkeys((group, system) for group, system, _ in known):
        if system == base:
            continue
        keys = [(group, name, metric) for metric in ("jct_mean_s", "resource_s")
                for name in (system, base)]  # fmt: skip
        if any(key not in known for key in keys):
            continue
        jct, base_jct, used, base_used = (known[key] for key in keys)
        both = perf(jct, base_jct, used, base_used)
        if both is not None:
            times = [ratio(jct, base_jct), ratio(used, base_used), both.paper, both.plain]
            rows.append([group, system, *map(_times, times)])
    heads = ["asked", "system", f"JCT to {base}", f"resource time to {base}",
             "perf/$, the paper's formula", "perf/$, plain"]  # fmt: skip
    return Table(heads, rows, num_text=2) if rows else None


def chunked_table(values: Values, source: Source) -> Table | None:
    """Systems of ours beside the best that is tuned with chunks of prompts; None without."""
    found = [each for name in _JUDGED for each in values.of(name, source)]
    wanted = [each for each in found if each.metric in _COMPARED]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in beside(wanted, CHUNKED):
        row = rows.setdefault((each.mine.group, each.mine.system), {})
        row[each.mine.metric] = f"{_times(each.times)} ({each.best.system}){mark(each)}"
    metrics = [key for key in _COMPARED if any(key in row for row in rows.values())]
    if not metrics:
        return None
    heads = ["asked", "system", *(METRICS[key].title.partition(",")[0] for key in metrics)]
    cells = [[*key, *(row.get(each, NOTHING) for each in metrics)] for key, row in rows.items()]
    return Table(heads, cells, num_text=2)


def losses_table(lost: Sequence[Beside]) -> Table:
    """Everything that is worse than the best of the others."""
    heads = ["experiment", "how", "asked", "metric", "system", "its", "best other", "its", "ratio",
             "certain"]  # fmt: skip
    rows = []
    for each in lost:
        metric = METRICS[each.mine.metric]
        mine, best = (
            one.found.text(metric.factor, metric.digits) for one in (each.mine, each.best)
        )
        rows.append([
            EXPERIMENTS[each.mine.experiment].title, each.mine.source.value, each.mine.group,
            metric.title, each.mine.system, mine, each.best.system, best, _times(each.times),
            {True: "yes", False: "no", None: "one run"}[each.is_certain],
        ])  # fmt: skip
    return Table(heads, rows, num_text=5)


def tally(found: Sequence[Beside]) -> list[str]:
    """How often each system of ours is worse, of how many comparisons."""
    texts = []
    for source in Source:
        for system in OURS:
            own = [e for e in found if (e.mine.system, e.mine.source) == (system, source)]
            if own:
                lost = [each for each in own if each.is_worse]
                certain = sum(each.is_certain is True for each in lost)
                texts.append(
                    f"{system}, {source}: worse than the best of the others in {len(lost)} of "
                    f"{len(own)} comparisons, {certain} of them with 95 % certainty"
                )
    return texts


def mark(each: Beside) -> str:
    """Better or worse, where that is certain."""
    if each.is_certain is not True:
        return ""
    return " ✗" if each.is_worse else " ✓"


def _times(found: Estimate | None) -> str:
    return NOTHING if found is None else found.text(1, 2)
