"""What a step costs, and how many prompt tokens may share one with decodes.

The model is small enough to be measured in seconds when an engine starts:

    prefill(n, c)  = curve(n) + n·c·context_s        n tokens behind c others
    decode(b, k)   = base_s + b·request_s + k·token_s    b requests, k context tokens in all
    step           = prefill + decode - shared_s     when it has both

`curve` is measured, flat and then linear on a GPU (Sarathi-Serve, figure 7) and
linear on a CPU. `shared_s` is what both parts pay only once, such as reading
the weights (TetriInfer section 3.3.3, Sarathi-Serve section 4.3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# A chunk saturates the device when it reaches this part of the best throughput.
SATURATED_PART = 0.9
# Doubling the chunk without gaining this much, twice, means that the curve is flat.
_FLAT_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A prefill step of `tokens` tokens without context takes `seconds`."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def has_flattened(curve: Sequence[CurvePoint]) -> bool:
    """Whether longer chunks have stopped to pay; points come by rising size."""
    if len(curve) < 3:
        return False
    first, *later = (point.tokens_per_s for point in curve[-3:])
    return max(later) < (1 + _FLAT_GAIN) * first


def knee_tokens(
    curve: Sequence[CurvePoint], *, aligned_to: int = 1, part: float = SATURATED_PART
) -> int:
    """The smallest chunk, in tokens, that saturates the device.

    Between two measured sizes the throughput is taken from the straight line
    between their times. The result is a multiple of `aligned_to` where a
    measured size allows one.

    Raises:
        ValueError: The curve is empty.
    """
    if not curve:
        raise ValueError("no point of the curve was measured")
    enough = part * max(point.tokens_per_s for point in curve)
    most_tokens = curve[-1].tokens
    tokens = aligned_to
    while tokens < most_tokens:
        if tokens >= curve[0].tokens and tokens / interpolate(curve, tokens) >= enough:
            return tokens
        tokens += aligned_to
    return max(most_tokens // aligned_to * aligned_to, min(aligned_to, most_tokens))


def interpolate(curve: Sequence[CurvePoint], tokens: int) -> float:
    """Seconds of a prefill step without context, from a curve with a point or more.

    Below the first point as long as there; above the last one in proportion.
    """
    if tokens <= curve[0].tokens:
        return curve[0].seconds
    if tokens >= curve[-1].tokens:
        return curve[-1].seconds * tokens / curve[-1].tokens
    above = bisect_right(curve, tokens, key=lambda point: point.tokens)
    left, right = curve[above - 1], curve[above]
    part = (tokens - left.tokens) / (right.tokens - left.tokens)
    return left.seconds + part * (right.seconds - left.seconds)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted duration of one step, in seconds; see the module.

    Attributes:
        curve: Prefill without context, by rising size; at least one point.
        context_s: Per prefill token and token of context before it.
        base_s: Of any step with decodes.
        request_s: Per decoding request.
        token_s: Per token of context of a decoding request.
        shared_s: Saved when decodes and prefill share a step.
    """

    curve: tuple[CurvePoint, ...]
    context_s: float = 0.0
    base_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    shared_s: float = 0.0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """A step with `tokens` prompt tokens behind `context_tokens` computed ones."""
        if tokens == 0:
            return 0.0
        return interpolate(self.curve, tokens) + tokens * context_tokens * self.context_s

    def decode_s(self, num_decodes: int, context_tokens: int) -> float:
        """A step of decodes whose contexts have `context_tokens` tokens together."""
        if num_decodes == 0:
            return 0.0
        return self.base_s + num_decodes * self.request_s + context_tokens * self.token_s

    def step_s(
        self, num_decodes: int, decode_context: int, prefill_tokens: int, prefill_context: int = 0
    ) -> float:
        """A step with both, or either."""
        decode_s = self.decode_s(num_decodes, decode_context)
        prefill_s = self.prefill_s(prefill_tokens, prefill_context)
        if not num_decodes or not prefill_tokens:
            return decode_s + prefill_s
        return max(decode_s, prefill_s, decode_s + prefill_s - self.shared_s)

    def most_tokens(
        self,
        limit_s: float,
        num_decodes: int,
        decode_context: int,
        prefill_context: int = 0,
        *,
        most: int,
        tile: int,
    ) -> int:
        """Tokens of the longest step within `limit_s`, decodes included.

        The sum is a multiple of `tile`, since a device computes whole tiles
        (Sarathi-Serve: 257 tokens instead of 256 cost it 32 %). Prompts must go
        on, so there is room for one tile of them however small the limit is;
        only `most` is never exceeded.
        """
        low = -(-(num_decodes + tile) // tile)  # in tiles; taken even beyond the limit
        high = most // tile
        while low < high:
            middle = (low + high + 1) // 2
            prefill_tokens = middle * tile - num_decodes
            if self.step_s(num_decodes, decode_context, prefill_tokens, prefill_context) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return min(low * tile, most)


class Drift:
    """How real steps compare with predicted ones, and how much they scatter.

    A smoothed mean and mean deviation of measured / predicted, as in Jacobson's
    estimate of round-trip times. A single outlier counts only so much.
    """

    MEAN_GAIN = 1 / 16
    DEVIATION_GAIN = 1 / 16
    # Of a normal distribution, 99 % lie within 2.9 mean deviations above the mean.
    DEVIATIONS = 2.9
    LEAST, MOST = 0.25, 4.0

    def __init__(self) -> None:
        self.mean = 1.0
        self.deviation = 0.0

    def learn(self, measured_s: float, predicted_s: float) -> None:
        """A step that took `measured_s`."""
        ratio = min(max(measured_s / predicted_s, self.LEAST), self.MOST)
        self.deviation += (abs(ratio - self.mean) - self.deviation) * self.DEVIATION_GAIN
        self.mean += (ratio - self.mean) * self.MEAN_GAIN

    def limit_s(self, slo_s: float) -> float:
        """Prediction up to which 99 of 100 steps stay within `slo_s`."""
        return slo_s / (self.mean + self.DEVIATIONS * self.deviation)
