"""Results of all commands in one form, so that tables need not know who measured what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_tetri.bench.modes.figures import Metric
from vllm_tetri.bench.stats import Estimate, estimate

# Systems that hand requests from one instance to another, or decide for each whether to.
OURS = ("split", "adaptive", "adaptive-slo", "tetri", "prefill + decode")
STOCK_CHUNK = "stock, budget = chunk"
# Systems that share a step between decodes and chunks of prompts and are tuned for it.
CHUNKED = (
    *("stock-128", "stock-256", STOCK_CHUNK),
    *("sarathi", "sarathi on all cards"),
)

METRICS = {
    metric.key: metric
    for metric in (
        Metric("ttft_mean_s", "TTFT mean, ms"),
        Metric("ttft_p50_s", "TTFT p50, ms"),
        Metric("ttft_p99_s", "TTFT p99, ms"),
        Metric("itl_p99_s", "ITL p99, ms", 1e3, 1),
        Metric("jct_mean_s", "JCT mean, s", 1, 2),
        Metric("jct_p99_s", "JCT p99, s", 1, 2),
        Metric("resource_s", "resource time, s", 1, 1),
        Metric("goodput_loose", "goodput loose, 1/s", 1, 2, is_rate=True),
        Metric("goodput_strict", "goodput strict, 1/s", 1, 2, is_rate=True),
        Metric("goodput", "goodput, 1/s", 1, 2, is_rate=True),
        Metric("share_strict", "in time (strict), %", 100, 0, is_rate=True),
        Metric("sustained_per_s", "sustained, 1/s", 1, 2, is_rate=True),
        Metric("failed", "refused or failed", 1, 1),
        Metric("waiting_s", "waiting mean, ms"),
        Metric("prefill_s", "prefill mean, ms"),
        Metric("schedule_s", "scheduling a step, µs", 1e6, 0),
        Metric("total_s", "total, s", 1, 2),
        Metric("decode_s", "total decode time, s", 1, 1),
        Metric("preemptions", "preemptions", 1, 0),
        Metric("heavy_of_slowest", "heavy of the slowest", 1, 1),
        Metric("light_of_slowest", "light of the slowest", 1, 1),
        Metric("spread_heavy", "spread of heavy", 1, 1),
        Metric("latency_s", "latency, ms", 1e3, 1),
        Metric("step_s", "step, ms", 1e3, 1),
        Metric("tokens_per_s", "tokens/s", 1, 0, is_rate=True),
        Metric("prompts_per_s", "prompts/s", 1, 2, is_rate=True),
        Metric("unaffected", "unaffected, %", 100, 0, is_rate=True),
        Metric("accuracy", "accuracy, %", 100, 1, is_rate=True),
        Metric("calibration_error", "calibration error, %", 100, 1),
        Metric("chunk_tokens", "saturating chunk, tokens", 1, 0),
        Metric("attained", "in time, %", 100, 0, is_rate=True),
        Metric("commit_s", "flip itself, ms", 1e3, 2),
        Metric("drain_s", "finishing old work, ms", 1e3, 0),
        Metric("flips", "flips", 1, 1),
        Metric("bytes_per_s", "GB/s", 1e-9, 2, is_rate=True),
        Metric("second_s", "second token beyond a step, ms", 1e3, 1),
        Metric("decision_s", "a decision, µs", 1e6, 1),
    )
}
# Neither better nor worse when they are more.
NEUTRAL = ("chunk_tokens", "flips", "drain_s", "heavy_of_slowest", "light_of_slowest")
# Around 0, so that a ratio of two says nothing.
DIFFERENCES = ("second_s",)


class Source(StrEnum):
    """How a number came about."""

    MEASURED = "measured"
    PACED = "paced"  # by engines that keep the pace of an imagined device
    SIMULATED = "simulated"
    ESTIMATE = "estimate"  # computed from measured step costs


@dataclass(frozen=True, slots=True)
class Value:
    """A metric of one system.

    Attributes:
        experiment: Whose it is, such as `e1`.
        group: What all systems that are compared were asked: a class and a rate, say.
        samples: By repeat; equal repeats of a group had equal requests.
        half: Of a 95 % interval that is known otherwise.
    """

    experiment: str
    source: Source
    group: str
    system: str
    metric: str
    samples: Mapping[int, float]
    half: float | None = None

    @property
    def found(self) -> Estimate:
        """Over repeats."""
        plain = estimate(list(self.samples.values()))
        return plain if self.half is None else Estimate(plain.mean, self.half)


def value(
    experiment: str,
    group: str,
    system: str,
    metric: str,
    samples: Sequence[float] | Mapping[int, float],
    *,
    source: Source = Source.MEASURED,
    half: float | None = None,
) -> Value | None:
    """One value; None where there are no samples."""
    known = samples if isinstance(samples, Mapping) else dict(enumerate(samples))
    if not known:
        return None
    kept = {place: float(each) for place, each in known.items()}
    return Value(experiment, source, group, system, metric, kept, half)


def ratio(mine: Value, other: Value) -> Estimate | None:
    """Of two systems repeat by repeat; None where they share none, or one is 0."""
    common = sorted(mine.samples.keys() & other.samples.keys())
    if not common or any(other.samples[each] == 0 for each in common):
        return None
    return estimate([mine.samples[each] / other.samples[each] for each in common])


def difference(mine: Value, other: Value) -> Estimate | None:
    """As `ratio`, for metrics that may be 0."""
    common = sorted(mine.samples.keys() & other.samples.keys())
    if not common:
        return None
    return estimate([mine.samples[each] - other.samples[each] for each in common])


def is_certain(found: Estimate, equal: float = 1.0) -> bool | None:
    """Whether an interval leaves out what equal systems would have; None with one repeat."""
    return None if math.isnan(found.half) else abs(found.mean - equal) > found.half


@dataclass(frozen=True, slots=True)
class Perf:
    """Performance per dollar of a system over another's.

    Attributes:
        paper: (1 + JCT reduction) / resource ratio, which gives all of the paper's numbers.
        plain: 1 / (JCT ratio · resource ratio): speed per resource.
    """

    paper: Estimate
    plain: Estimate


def perf(jct: Value, other_jct: Value, resource: Value, other_resource: Value) -> Perf | None:
    """Both formulas, repeat by repeat; None without a common repeat, or with a 0 in it."""
    parts = (jct, other_jct, resource, other_resource)
    common = sorted(set.intersection(*(set(each.samples) for each in parts)))
    pairs = [
        (jct.samples[each], other_jct.samples[each], resource.samples[each],
         other_resource.samples[each])
        for each in common
    ]  # fmt: skip
    if not pairs or any(0 in pair for pair in pairs):
        return None
    ratios = [(mine / base, used / other) for mine, base, used, other in pairs]
    return Perf(
        paper=estimate([(2 - jct_part) / used for jct_part, used in ratios]),
        plain=estimate([1 / (jct_part * used) for jct_part, used in ratios]),
    )


class Values:
    """All that was found, by what it is about."""

    def __init__(self, found: Sequence[Value]) -> None:
        self.all = list(found)
        self._by_key = {
            (each.experiment, each.source, each.group, each.system, each.metric): each
            for each in found
        }

    def get(
        self, experiment: str, source: Source, group: str, system: str, metric: str
    ) -> Value | None:
        """One of them, if it is there."""
        return self._by_key.get((experiment, source, group, system, metric))

    def of(self, experiment: str, source: Source | None = None) -> list[Value]:
        """Those of an experiment."""
        return [
            each
            for each in self.all
            if each.experiment == experiment and source in (None, each.source)
        ]
