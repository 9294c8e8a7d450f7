"""What an engine asks of a length predictor, whatever it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_tetri.types import Prediction


@dataclass(slots=True)
class Tally:
    """What became of the prompts that a predictor was asked about; only grows.

    Attributes:
        made: Answered.
        refused: Turned away at once, because too many were waiting.
        failed: Without an answer: the predictor was not there, died, or erred.
    """

    made: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt that has just come in.

    Attributes:
        name: The request's id.
        token_ids: In the target model's vocabulary.
        answer_tokens: How long the answer will be, where the client has fixed that
            (`ignore_eos`); only an oracle may look.
    """

    name: str
    token_ids: list[int]
    answer_tokens: int | None = None


class Predictor(Protocol):
    """Guesses the lengths of answers. Used by the engine thread: nothing here waits.

    Answers come when they come, so a predictor that needs more than the prompt fits
    as well: one over the target model's hidden state (EGTP, arXiv 2602.11812) would
    note the name in `ask` and answer from `poll` once the first chunk was computed.
    """

    @property
    def tally(self) -> Tally: ...

    def ask(self, ask: Ask) -> None:
        """A prompt came in."""

    def withdraw(self, name: str) -> None:
        """Nobody waits for this one any more; unknown names are ignored."""

    def poll(self) -> list[tuple[str, Prediction | None]]:
        """What became known since the last call; None means that there will be no
        answer. Called once per step, and when an answer is due."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until there may be something to poll, at most `timeout_s`."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""
