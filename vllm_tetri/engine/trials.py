"""Which steps are measured at start, in which order, and how often.

A trial is a kind of step: some decodes with the same context, and one prompt's
chunk behind some context. Every number of `policy.cost` needs a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from vllm_tetri.policy.cost import CurvePoint, has_flattened

# Figures of this kind are compared with the paper's and Sarathi-Serve's.
LEAST_PREFILL_TOKENS = 16
_MIDDLE_CONTEXT = 512
_CONTEXTS = (128, 1024)
_CONTEXT_CHUNK = 128
_BATCHES = (1, 16)
_MOST_DECODES = 256
_MIXED = ((4, 128), (16, 256))  # decodes, prefill tokens
# A step that takes longer is not doubled: slow machines must get done, too.
_LONGEST_STEP_S = 1.5
_LONGEST_DECODE_S = 0.25


@dataclass(frozen=True, slots=True)
class Trial:
    """One kind of step. Contexts are whole blocks, so that they can count as loaded.

    Attributes:
        decodes: Requests that write one token each.
        decode_context: Tokens of context of each.
        prefill: Prompt tokens computed beside them.
        prefill_context: Tokens of the same prompt that count as computed.
    """

    decodes: int = 0
    decode_context: int = 0
    prefill: int = 0
    prefill_context: int = 0

    @property
    def num_steps(self) -> int:
        """Steps in a row that one go takes."""
        if self.decodes:
            return 3
        return 2 if self.prefill <= 256 else 1

    @property
    def tokens(self) -> int:
        """Scheduled tokens of one step."""
        return self.decodes + self.prefill


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has room for; all but `requests` in tokens."""

    step: int
    requests: int
    window: int
    kv: int
    block: int

    def holds(self, trial: Trial) -> bool:
        """Whether vLLM can run all requests of a trial at the same time."""
        decode = trial.decode_context + 1 + trial.num_steps
        prefill = trial.prefill_context + trial.prefill + 1
        requests = trial.decodes + bool(trial.prefill)
        kv = trial.decodes * self._in_blocks(decode) + self._in_blocks(prefill)
        return (
            trial.tokens <= self.step
            and requests <= self.requests
            and max(decode, prefill) <= self.window
            and kv <= self.kv
        )

    def aligned(self, tokens: int) -> int:
        """A context of about so many tokens, in whole blocks, at least one."""
        return max(tokens // self.block, 1) * self.block

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block


Plan = Generator[Trial, float, None]
_Curve = Generator[Trial, float, int]


def plan(room: Room, *, with_decodes: bool) -> Plan:
    """The trials one by one; send in how long each one's step took, in seconds."""
    most = yield from _curve(room)
    if with_decodes:
        yield from _batches(room)
        chunk = min(_CONTEXT_CHUNK, most)
        rest = [
            *(Trial(prefill=chunk, prefill_context=room.aligned(c)) for c in _CONTEXTS),
            *(Trial(b, room.aligned(c)) for c in _CONTEXTS for b in _BATCHES),
            *(Trial(b, room.aligned(_MIDDLE_CONTEXT), min(n, most)) for b, n in _MIXED),
        ]
        for trial in dict.fromkeys(rest):
            if room.holds(trial):
                yield trial


def _curve(room: Room) -> _Curve:
    """Ever longer chunks, until that stops to pay; returns the longest."""
    curve: list[CurvePoint] = []
    tokens = LEAST_PREFILL_TOKENS
    if not room.holds(Trial(prefill=tokens)):
        tokens = max(1, min(room.step, room.window - 1))
    if room.holds(Trial(prefill=tokens)):
        yield Trial(prefill=tokens)  # what runs for the first time is slower
    while room.holds(Trial(prefill=tokens)):
        seconds = yield Trial(prefill=tokens)
        curve.append(CurvePoint(tokens, seconds))
        if has_flattened(curve) or seconds > _LONGEST_STEP_S:
            break
        tokens *= 2
    return curve[-1].tokens if curve else tokens


def _batches(room: Room) -> Plan:
    """Ever more decodes, as far as there is room."""
    context, decodes = room.aligned(_MIDDLE_CONTEXT), 1
    if not room.holds(Trial(decodes, context)):
        context = room.block  # a small window
    while decodes <= _MOST_DECODES and room.holds(Trial(decodes, context)):
        seconds = yield Trial(decodes, context)
        if seconds > _LONGEST_DECODE_S:
            return
        decodes *= 2


class Rounds:
    """The trials of a plan, again and again, with the best time of each.

    Attributes:
        steps: Best time of a step so far, in seconds.
    """

    def __init__(self, trials: Plan) -> None:
        self.steps: dict[Trial, float] = {}
        self.num_done = 0
        self._plan = trials
        self._planned: Trial | None = None
        self._left: list[Trial] = []

    def record(self, trial: Trial, seconds: float) -> None:
        """A step of a trial took so long."""
        self.steps[trial] = min(seconds, self.steps.get(trial, seconds))

    def next(self) -> Trial | None:
        """The next trial of this round; None at its end."""
        if self.num_done == 0:
            # The first round depends on what it measures. A trial that could not
            # be measured ends its series.
            try:
                if self._planned is None:
                    self._planned = next(self._plan)
                else:
                    self._planned = self._plan.send(self.steps.get(self._planned, math.inf))
            except StopIteration:
                return None
            return self._planned
        return self._left.pop() if self._left else None

    def start_over(self) -> None:
        """Begin another round."""
        self.num_done += 1
        self._left = list(reversed(self.steps))
