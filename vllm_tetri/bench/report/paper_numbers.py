"""Numbers that the papers state, with where they stand.

TetriInfer is arXiv 2401.11181; its figures are images, so these are the numbers of its text
and captions. None of them was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """How a number is told: by which part something changes, how many times as much it is,
    or its size in a unit."""

    CHANGE = "change"
    TIMES = "times"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """One statement.

    Attributes:
        key: `experiment what`, unique.
        what: Of what, to what.
        value: A part for a change (-0.44), a factor, or a size; None where only `words` are
            stated.
        source: Figure and section.
        words: How the paper puts it, where a number would not do.
        unit: Of a size.
    """

    key: str
    what: str
    form: Form
    value: float | None
    source: str
    words: str = ""
    unit: str = ""

    @property
    def experiment(self) -> str:
        """Whose it is, such as `e1`."""
        return self.key.partition(" ")[0]

    def text(self) -> str:
        """As a table shows it."""
        return self.words if self.value is None else told(self.form, self.value, self.unit)


def told(form: Form, value: float, unit: str = "") -> str:
    """A number in the words of its form."""
    if form is Form.CHANGE:
        text = f"{100 * value:+.1f}".removesuffix(".0")
        return f"{'0' if text in ('+0', '-0') else text} %"
    if form is Form.TIMES:
        return f"{value:.2f}x"
    return f"{value:.3g} {unit}".strip()


PERF = "perf"  # in keys: performance per dollar
_E1 = "section 5.1"
_TTFT, _JCT, _RESOURCE = "mean TTFT, to vLLM", "mean JCT, to vLLM", "resource time, to vLLM"

# Class: figure; TTFT, JCT and resource time to vLLM's; perf/$.
_CLASSES: dict[str, tuple[int, float | None, float, float | None, float]] = {
    "lpld": (11, -0.44, -0.40, None, 1.4),
    "lphd": (12, -0.97, -0.47, -0.38, 2.4),
    "hpld": (13, -0.09, -0.23, 0.43, 0.86),
    "hphd": (14, None, -0.19, 0.07, 1.1),
    "mixed": (15, -0.85, -0.50, -0.21, 1.9),
}
_ONLY_WORDS = {"lpld resource": "comparable", "hphd ttft": "better than with light decodes"}


def _class_numbers() -> list[PaperNumber]:
    found = []
    for name, (figure, ttft, jct, resource, perf) in _CLASSES.items():
        source = f"Figure {figure}, {_E1}"
        for short, what, value in (
            ("ttft", _TTFT, ttft), ("jct", _JCT, jct), ("resource", _RESOURCE, resource)
        ):  # fmt: skip
            words = _ONLY_WORDS.get(f"{name} {short}", "")
            found.append(
                PaperNumber(
                    f"e1 {name} {short}", f"{name}: {what}", Form.CHANGE, value, source, words
                )
            )
        found.append(
            PaperNumber(f"e1 {name} {PERF}", f"{name}: perf/$, to vLLM", Form.TIMES, perf, source)
        )
    return found


NUMBERS = (
    *_class_numbers(),
    PaperNumber(
        "e2 chunked", "chunked, fcfs: mean prefill latency, to vLLM with a fixed batch of 16",
        Form.CHANGE, -0.864, "Figure 16, section 5.2.1",
    ),
    PaperNumber(
        "e2 sjf", "sjf in batches of 16: mean waiting, to fcfs",
        Form.CHANGE, -0.078, "Figure 16, section 5.2.1",
    ),
    PaperNumber(
        "e2 batch", "sjf: mean TTFT in batches of 128, to batches of 16",
        Form.CHANGE, -0.465, "Figure 16, section 5.2.1",
    ),
    PaperNumber(
        "e3 latency", "mean prefill latency beside a predictor, to none",
        Form.CHANGE, 0.10, "Figure 17, section 5.2.2",
    ),
    PaperNumber(
        "e3 throughput", "prefill throughput beside a predictor, to none",
        Form.CHANGE, -0.12, "Figure 17, section 5.2.2",
    ),
    PaperNumber(
        "e3 unaffected", "prompts that are as fast as without a predictor",
        Form.SIZE, 80, "Figure 17, section 5.2.2", unit="%",
    ),
    PaperNumber(
        "e4 100", "accuracy in buckets of 100 tokens", Form.SIZE, 58.9, "section 5.2.2", unit="%"
    ),
    PaperNumber(
        "e4 200", "accuracy in buckets of 200 tokens", Form.SIZE, 74.9, "section 5.2.2", unit="%"
    ),
    PaperNumber(
        "e4 400", "accuracy in buckets of 400 tokens", Form.SIZE, 85, "section 5.2.2", unit="%"
    ),
    PaperNumber(
        "e5 dynamic actual", "reserve-dynamic at 74.9 % accuracy: mean JCT, to greedy",
        Form.CHANGE, 0.0, "Figure 18, section 5.2.3",
    ),
    PaperNumber(
        "e5 dynamic ideal", "reserve-dynamic at 100 % accuracy: mean JCT, to greedy",
        Form.CHANGE, -0.12, "Figure 18, section 5.2.3",
    ),
    PaperNumber(
        "e5 static ideal", "reserve-static at 100 % accuracy: mean JCT, to greedy",
        Form.CHANGE, -0.10, "Figure 18, section 5.2.3",
    ),
    PaperNumber(
        "e6 random", "power-of-two: total decode time, to random",
        Form.CHANGE, None, "Figure 19, section 5.2.3", "lowest of three (no number)",
    ),
    PaperNumber(
        "e6 imbalance", "power-of-two: total decode time, to imbalance",
        Form.CHANGE, None, "Figure 19, section 5.2.3", "lowest of three (no number)",
    ),
    PaperNumber(
        "e7 light 7", "latency of a light prompt with 7 light ones, to alone",
        Form.TIMES, 2, "Figure 3, section 2.2.1",
    ),
    PaperNumber(
        "e7 light 63", "latency of a light prompt with 63 light ones, to alone",
        Form.TIMES, 8, "Figure 3, section 2.2.1",
    ),
    PaperNumber(
        "e7 light heavy", "latency of a light prompt with heavy ones, to alone",
        Form.TIMES, None, "Figure 3, section 2.2.1", "more than 10x",
    ),
    PaperNumber(
        "e7 heavy light", "latency of a heavy prompt with light ones, to alone",
        Form.TIMES, 3, "Figure 3, section 2.2.1",
    ),
    PaperNumber(
        "e7 decode heavy", "step of a light decode with one heavy prompt, to alone",
        Form.TIMES, 5, "Figure 4, section 2.2.2",
    ),
    PaperNumber(
        "e7 prompt decodes", "step of a heavy prompt with light decodes, to alone",
        Form.TIMES, 2.5, "Figure 4, section 2.2.2",
    ),
    PaperNumber(
        "e7 half throughput", "batch of 128, half of it heavy decodes: tokens/s, to all light",
        Form.CHANGE, -0.16, "Figure 5, section 2.2.3",
    ),
    PaperNumber(
        "e7 half latency", "batch of 128, half of it heavy decodes: step, to all light",
        Form.CHANGE, 0.23, "Figure 5, section 2.2.3",
    ),
    PaperNumber(
        "e8 chunk", "tokens of a step that saturate the device",
        Form.SIZE, 512, "Figure 2, section 3.3.3 (OPT-13B on V100)", unit="tokens",
    ),
    PaperNumber(
        "e9 flip", "a flip, without waiting for old work",
        Form.SIZE, None, "section 3.5", "5 to 7 ms",
        unit="ms",
    ),
    PaperNumber(
        "e10 direct", "bandwidth between instances, direct link",
        Form.SIZE, 300, "section 5.1 (NVLink, emulated)", unit="GB/s",
    ),
    PaperNumber(
        "e10 network", "bandwidth between instances, over the network",
        Form.SIZE, 25, "section 5.1 (200 Gb/s RoCE, emulated)", unit="GB/s",
    ),
    PaperNumber(
        "e11 capacity", "capacity with stall-free chunked prefill, to vLLM",
        Form.TIMES, 2.6, "Sarathi-Serve, section 1 (Mistral-7B on A100, at most)",
    ),
    PaperNumber(
        "e12 1P1D", "goodput per device of one prefill and one decode instance, to coupled ones",
        Form.TIMES, 1.75, "DistServe, Figure 1 (13B on A100), derived: 2.8 to 1.6 requests/s",
    ),
    PaperNumber(
        "e12 2P1D", "goodput per device of two prefill and one decode instance, to coupled ones",
        Form.TIMES, 2.1, "DistServe, Figure 1 (13B on A100)",
    ),
    PaperNumber(
        "e13 chunked", "disaggregation, to stall-free chunked prefill",
        Form.TIMES, None, "Sarathi-Serve, section 6", "left for future work",
    ),
)  # fmt: skip
BY_KEY = {each.key: each for each in NUMBERS}
