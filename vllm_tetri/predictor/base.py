"""What an engine asks of a length predictor, and one that knows the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_tetri.types import Prediction


@dataclass(slots=True)
class Tally:
    """Outcomes of the prompts that a predictor was asked about; they only grow."""

    made: int = 0
    refused: int = 0  # at once, because too many were waiting
    failed: int = 0  # the predictor was down, died or erred


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt that has just come in."""

    name: str  # the request's id
    token_ids: list[int]  # in the target model's vocabulary
    output_tokens: int | None = None  # fixed by the client (`ignore_eos`); for an oracle


class Predictor(Protocol):
    """Predicts output lengths. Used by the engine thread: nothing here waits. Predictions may come
    at any time, and replace earlier ones."""

    @property
    def tally(self) -> Tally: ...
    def ask(self, query: Query) -> None: ...  # begin to predict for a prompt
    def withdraw(self, name: str) -> None: ...  # its request has ended; ignored if unknown
    def poll(self) -> list[tuple[str, Prediction | None]]: ...  # new ones; None: there is none
    def wait(self, timeout_s: float) -> None: ...  # sleep until there may be something to poll
    def close(self) -> None: ...  # idempotent


class Oracle:
    """A `Predictor` that knows, for experiments: the length that the client fixed by `ignore_eos`
    with `max_tokens`."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Prediction | None]] = []
        self.tally = Tally()

    def ask(self, query: Query) -> None:
        tokens = query.output_tokens
        self._known.append((query.name, Prediction((tokens,)) if tokens is not None else None))
        self.tally.made += tokens is not None

    def poll(self) -> list[tuple[str, Prediction | None]]:
        known, self._known = self._known, []
        return known

    def withdraw(self, name: str) -> None: ...  # `poll` has the prediction at once
    def wait(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...
