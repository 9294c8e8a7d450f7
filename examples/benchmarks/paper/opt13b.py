"""What profiles hold: `python -m examples.benchmarks.paper.opt13b [PROFILE]`.

The profile of the paper's device, OPT-13B on two V100, follows from sections 2.1 and 2.2. They
state how many times longer steps take together than alone, no times. So the proportions of a
linear step cost are fitted to those, and its scale is that of a roofline: a step that decodes
one request. What the text does not state is assumed, and marked by brackets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from examples.benchmarks.report import markdown
from vllm_tetri.sim.cost.hardware import GPUS, MODELS, roofline
from vllm_tetri.sim.cost.profiles import Profile, profile
from vllm_tetri.sim.cost.step_cost import StepCost, linear
from vllm_tetri.types import StepCoefficients

PROFILE = "opt-13b-2xv100"
_LIGHT, _HEAVY = 18, 512  # prompts of section 2.2.1
# Outputs of 20 to 100 and of 512 tokens: half of that is there on average.
_LIGHT_CONTEXT, _HEAVY_CONTEXT = _LIGHT + 30, _LIGHT + 256
_BATCH = 128
_STEPS = ((1, 0), (16, 0), (64, 0), (256, 0), (0, 128), (0, 512), (0, 2048), (64, 512))


@dataclass(frozen=True, slots=True)
class Statement:
    """A number of the paper, and how a step cost gives it."""

    where: str
    words: str
    stated: float
    of: Callable[[StepCost], float]
    is_fitted: bool = True
    is_least: bool = False

    def deviation(self, cost: StepCost) -> float:
        """Deviation of a cost, as part of what is stated; 0 above a least number."""
        found = self.of(cost) / self.stated - 1
        return min(found, 0.0) if self.is_least else found


def _prompts_s(cost: StepCost, prompts: Sequence[int], num_decodes: int = 0) -> float:
    """Seconds of a step of whole prompts and light decodes."""
    tokens = sum(prompts)
    before = sum(each * (each - 1) / 2 for each in prompts) / tokens if tokens else 0.0
    return cost.step_s(num_decodes, num_decodes * _LIGHT_CONTEXT, tokens, before)


def _with(watched: int, others: Sequence[int], num_decodes: int = 0) -> Callable[..., float]:
    """How many times longer a prompt takes with others than alone."""
    return lambda cost: (
        _prompts_s(cost, [watched, *others], num_decodes) / _prompts_s(cost, [watched])
    )


def _half_heavy(cost: StepCost) -> float:
    mixed = cost.step_s(_BATCH, _BATCH // 2 * (_LIGHT_CONTEXT + _HEAVY_CONTEXT), 0, 0)
    return mixed / cost.step_s(_BATCH, _BATCH * _LIGHT_CONTEXT, 0, 0)


def _saturated(cost: StepCost) -> float:
    """Throughput of a prompt of 512 tokens, by the best of any up to the model's window."""
    best = max(tokens / _prompts_s(cost, [tokens]) for tokens in range(128, 2049, 128))
    return _HEAVY / _prompts_s(cost, [_HEAVY]) / best


# fmt: off
STATEMENTS = (
    Statement("2.1, fig. 2", "prefill throughput is flat from 512 tokens on", 1.0, _saturated),
    Statement("2.2.1, fig. 3a", "light prompt with 7 light ones", 2.0, _with(_LIGHT, [_LIGHT] * 7)),
    Statement("2.2.1, fig. 3a", "light prompt with 63 light ones", 8.0,
              _with(_LIGHT, [_LIGHT] * 63)),
    Statement("2.2.1, fig. 3b", "light prompt with heavy ones, more than [7 of them]", 10.0,
              _with(_LIGHT, [_HEAVY] * 7), is_fitted=False, is_least=True),
    Statement("2.2.1, fig. 3c", "heavy prompt with light ones [63 of them]", 3.0,
              _with(_HEAVY, [_LIGHT] * 63), is_fitted=False),
    Statement("2.2.2, fig. 4b", "light decode with 1 heavy prompt", 5.0,
              lambda cost: _prompts_s(cost, [_HEAVY], 1) / _prompts_s(cost, [], 1)),
    Statement("2.2.2, fig. 4c", "light prompt with light decodes, up to [128 of them]", 2.5,
              _with(_LIGHT, [], _BATCH)),
    Statement("2.2.2, fig. 4d", "heavy prompt with light decodes, up to [128 of them]", 2.5,
              _with(_HEAVY, [], _BATCH), is_fitted=False),
    Statement("2.2.3, fig. 5", "latency, batch of 128, half heavy decodes by none", 1.23,
              _half_heavy),
    Statement("2.2.3, fig. 5", "throughput of the same", 0.84, lambda cost: 1 / _half_heavy(cost)),
)
# fmt: on


def residual(statement: Statement, cost: StepCost) -> float:
    """Logarithm of what a cost gives by what is stated."""
    return log(statement.of(cost) / statement.stated)


def fit() -> StepCoefficients:
    """Find the proportions with the least squares of residuals of the fitted statements, by
    Gauss-Newton on their logarithms."""
    wanted = [each for each in STATEMENTS if each.is_fitted]
    parts = np.log(np.array([0.005, 2e-5, 0.005]))

    def residuals(parts: np.ndarray) -> np.ndarray:
        return np.array([residual(each, _cost(parts)) for each in wanted])

    for _ in range(50):
        now, step = residuals(parts), 1e-6
        slopes = [(residuals(parts + step * unit) - now) / step for unit in np.eye(3)]
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -now, rcond=None)[0]
        parts = parts + np.clip(change, -0.5, 0.5)
    return _cost(parts)


def _cost(parts: np.ndarray) -> StepCoefficients:
    """Build a cost from logarithms of seconds per decode, token of context and prompt token, by
    the seconds of a step that decodes one request."""
    estimate = roofline(MODELS["opt-13b"], GPUS["v100-32g"], 2)
    lone_s = estimate.step_s(1, _LIGHT_CONTEXT, 0, 0)
    request_s, token_s, prompt_s = (float(each) * lone_s for each in np.exp(parts))
    base_s = lone_s - request_s - _LIGHT_CONTEXT * token_s
    return StepCoefficients(
        base_s, request_s, token_s, prompt_s, estimate.attention_s, confidence=1.0
    )


def _steps(known: Profile) -> Iterator[dict[str, object]]:
    for decodes, tokens in _STEPS:
        step = (decodes, decodes * 512, tokens, max(0, tokens - 1) / 2)
        seconds, fitted_s = known.cost.step_s(*step), linear(known.cost).step_s(*step)
        yield {
            "decodes of 512 tokens": decodes, "prompt tokens": tokens,
            "ms": f"{seconds * 1e3:.1f}", "linear, ms": f"{fitted_s * 1e3:.1f}",
        }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Print the steps of a profile, and for the paper's device what the paper states of them."""
    name, *_ = [*(sys.argv[1:] if words is None else words), PROFILE]
    known = profile(name)
    print(f"{known.name}: {known.source}\n\n{markdown(list(_steps(known)))}")
    if known.name == PROFILE:
        rows = [
            {"paper": each.where, "what": each.words, "stated": f"{each.stated:g}",
             "profile": f"{each.of(known.cost):.2f}", "is fitted": each.is_fitted,
             "deviation": f"{each.deviation(known.cost):+.0%}"}
            for each in STATEMENTS
        ]  # fmt: skip
        print(f"\n{markdown(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
