"""Which of our results stands beside which number of a paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tetri.bench.report import read
from vllm_tetri.bench.report.paper_numbers import BY_KEY, PERF, Form, PaperNumber, told
from vllm_tetri.bench.report.read import ALL_AT_ONCE, QUEUE, STEP, decoders, together
from vllm_tetri.bench.report.values import METRICS, Source, Value, Values, perf, ratio
from vllm_tetri.bench.stats import Estimate

_MEASURED, _SIMULATED, _ESTIMATE = Source.MEASURED, Source.SIMULATED, Source.ESTIMATE
_CHUNKS = ("stock-128", "stock-256")
_AT_KNEE = "what came in time at the knee, not a highest rate"
# How the table of e6 calls the measures by which the better of two instances is chosen.
_TWO = {"power-of-two-ratio": "the paper's measure", "power-of-two": "ours"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What to look up.

    Attributes:
        key: Of the paper's number.
        label: What is special about it, where several stand beside one number.
        group, system: Of the value, and with `base_` of what it is compared with; without
            a base the value itself is meant.
        within: Experiment that has the values, where it is not the number's own.
    """

    key: str
    source: Source
    metric: str
    group: str
    system: str
    base_group: str = ""
    base_system: str = ""
    label: str = ""
    within: str = ""

    @property
    def experiment(self) -> str:
        """That has the values."""
        return self.within or self.key.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Ours:
    """A number of ours beside one of a paper.

    Attributes:
        found: In terms of the paper's number: -0.4 for a change by -40 %.
    """

    ask: Ask
    found: Estimate

    def text(self, number: PaperNumber) -> str:
        """As a table shows it."""
        mean = told(number.form, self.found.mean, number.unit)
        half = ""
        if self.found.half == self.found.half:
            half = " ±" + told(number.form, self.found.half, number.unit).removeprefix("+")
        return f"{self.ask.label}: {mean}{half}" if self.ask.label else mean + half


@dataclass(frozen=True, slots=True)
class Claim:
    """A number of a paper, and all of ours that stand beside it."""

    number: PaperNumber
    ours: list[Ours]


def claims(experiment: str, values: Values) -> list[Claim]:
    """All numbers of an experiment."""
    return [
        Claim(number, _ours(number, values))
        for number in BY_KEY.values()
        if number.experiment == experiment
    ]


def is_asked(number: PaperNumber, source: Source) -> bool:
    """Whether any result of this kind could stand beside it."""
    return any(ask.key == number.key and ask.source is source for ask in ASKS)


def _ours(number: PaperNumber, values: Values) -> list[Ours]:
    return [
        Ours(ask, found)
        for ask in ASKS
        if ask.key == number.key and (found := _found(ask, number, values)) is not None
    ]


def _found(ask: Ask, number: PaperNumber, values: Values) -> Estimate | None:
    if ask.metric == PERF:
        return _perf(ask, values)
    mine = values.get(ask.experiment, ask.source, ask.group, ask.system, ask.metric)
    if mine is None:
        return None
    if number.form is Form.SIZE:
        factor = METRICS[ask.metric].factor
        return Estimate(factor * mine.found.mean, factor * mine.found.half)
    base = _base(ask, ask.metric, values)
    times = None if base is None else ratio(mine, base)
    if times is None:
        return None
    return Estimate(times.mean - 1, times.half) if number.form is Form.CHANGE else times


def _base(ask: Ask, metric: str, values: Values) -> Value | None:
    group, system = ask.base_group or ask.group, ask.base_system or ask.system
    return values.get(ask.experiment, ask.source, group, system, metric)


def _perf(ask: Ask, values: Values) -> Estimate | None:
    found = []
    for metric in ("jct_mean_s", "resource_s"):
        found.append(values.get(ask.experiment, ask.source, ask.group, ask.system, metric))
        found.append(_base(ask, metric, values))
    jct, base_jct, used, base_used = found
    if jct is None or base_jct is None or used is None or base_used is None:
        return None
    both = perf(jct, base_jct, used, base_used)
    return None if both is None else both.paper


# -- the table ---------------------------------------------------------------------


def _classes() -> list[Ask]:
    """TetriInfer as it was, simulated over both links; our modes at the knee, measured."""
    metrics = {"ttft": "ttft_mean_s", "jct": "jct_mean_s", "resource": "resource_s", PERF: PERF}
    made = []
    for name in ("lpld", "lphd", "hpld", "hphd", "mixed"):
        for short, metric in metrics.items():
            key = f"e1 {name} {short}"
            made += [
                Ask(key, _SIMULATED, metric, f"{name}, {link}", "tetri", "", "vllm-2023", link)
                for link in ("roce", "nvlink")
            ]
            made += [
                Ask(key, _MEASURED, metric, f"{name} knee", mode, "", "stock", mode)
                for mode in ("split", "adaptive")
            ]
    return made


def _orders() -> list[Ask]:
    made = []
    for source, stock in ((_SIMULATED, "vllm-2023"), (_MEASURED, "stock")):
        made += [
            Ask("e2 chunked", source, "prefill_s", QUEUE, "fcfs", "", stock),
            Ask("e2 sjf", source, "waiting_s", QUEUE, "sjf 16", "", "fcfs"),
            Ask("e2 batch", source, "ttft_mean_s", QUEUE, "sjf 128", "", "sjf 16"),
        ]
    return made


def _predictors() -> list[Ask]:
    made = []
    for place in ("own", "shared"):
        group = f"all at once, predictor on {place} core"
        base = "no predictor"
        made += [
            Ask(f"e3 {short}", _MEASURED, metric, group, "parallel", "", base, f"{place} core")
            for short, metric in (
                ("latency", "ttft_mean_s"),
                ("throughput", "prompts_per_s"),
                ("unaffected", "unaffected"),
            )
        ]
    made += [
        Ask(f"e4 {size}", _MEASURED, "accuracy", f"buckets of {size} tokens", "predictor")
        for size in (100, 200, 400)
    ]
    return made


def _decodes() -> list[Ask]:
    made = []
    policies = {
        "e5 dynamic actual": "reserve-dynamic, oracle 74.9%",
        "e5 dynamic ideal": "reserve-dynamic, oracle 100.0%",
        "e5 static ideal": "reserve-static, oracle 100.0%",
    }
    for source in (_SIMULATED, Source.PACED):
        made += [
            Ask(key, source, "jct_mean_s", ALL_AT_ONCE, name, "", "greedy")
            for key, name in policies.items()
        ]
        made += [
            Ask(f"e6 {other}", source, "decode_s", decoders(count), policy, "", other,
                f"{label}, {count} instances")
            for other in ("random", "imbalance")
            for policy, label in _TWO.items()
            for count in (2, 4, 8)
        ]  # fmt: skip
    return made


def _interferences() -> list[Ask]:
    made = [
        Ask(key, _MEASURED, "latency_s", group, system, together(watched, 0, ""), "", label)
        for key, watched, count, others in (
            ("e7 light 7", "light", 7, "light"),
            ("e7 light 63", "light", 63, "light"),
            ("e7 light heavy", "light", 63, "heavy"),
            ("e7 heavy light", "heavy", 63, "light"),
        )
        for group in [together(watched, count, others)]
        for system, label in (("stock", "stock"), ("ours, sjf 16", "ours"))
    ]
    steps = (
        ("e7 decode heavy", "step_s", read.WITH_PROMPT, read.LIGHT_DECODE),
        ("e7 prompt decodes", "step_s", read.WITH_DECODES, read.PROMPT),
        ("e7 half throughput", "tokens_per_s", read.HALF_HEAVY, read.ALL_LIGHT),
        ("e7 half latency", "step_s", read.HALF_HEAVY, read.ALL_LIGHT),
    )
    made += [
        Ask(key, _ESTIMATE, metric, group, STEP, base, "", "by step costs")
        for key, metric, group, base in steps
    ]
    return made


def _others() -> list[Ask]:
    pages = "pages of 256 KiB"
    made = [
        Ask("e8 chunk", _MEASURED, "chunk_tokens", read.DEVICE, "ours"),
        Ask("e10 direct", _MEASURED, "bytes_per_s", pages, read.SHM, label=read.SHM),
        Ask("e10 network", _MEASURED, "bytes_per_s", pages, read.TCP, label="TCP, loopback"),
        *(Ask("e11 capacity", _MEASURED, "sustained_per_s", "mixed", chunk, "", "stock",
              f"{chunk} to stock, of three rates") for chunk in _CHUNKS),
        Ask("e11 capacity", _SIMULATED, "sustained_per_s", "mixed", "sarathi", "", "vllm-2023"),
        Ask("e12 1P1D", _MEASURED, "goodput_strict", "mixed knee", "split", "", "stock",
            f"split, {_AT_KNEE}"),
    ]  # fmt: skip
    made += [
        Ask("e9 flip", _MEASURED, "commit_s", read.ONE_FLIP, f"from {role}", label=f"from {role}")
        for role in ("prefill", "decode")
    ]
    for ratio_name in ("1P1D", "2P1D"):
        made += [
            Ask(f"e12 {ratio_name}", _SIMULATED, "goodput", ratio_name, "distserve", "", base,
                f"to {base}")
            for base in ("vllm-2023", "vllm")
        ]  # fmt: skip
    made += [
        Ask("e13 chunked", _MEASURED, "goodput_strict", "mixed knee", system, "", chunk,
            f"{system} to {chunk}, mixed, {_AT_KNEE}", within="e12")
        for system in ("split", "adaptive")
        for chunk in _CHUNKS
    ]  # fmt: skip
    for system in ("tetri", "adaptive"):
        label = f"goodput of {system} to sarathi, mixed"
        made.append(
            Ask("e13 chunked", _SIMULATED, "goodput", "mixed", system, "", "sarathi", label)
        )
    return made


ASKS: Sequence[Ask] = (
    *_classes(),
    *_orders(),
    *_predictors(),
    *_decodes(),
    *_interferences(),
    *_others(),
)
