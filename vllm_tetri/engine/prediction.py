"""What is predicted of the requests that this instance has.

Owner: the engine thread, for which nothing here waits, except that an engine with
nothing but unpredicted prompts sleeps until one of them may go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tetri.config import TetriConfig, option_of
from vllm_tetri.engine.compat import Request, SamplingParams
from vllm_tetri.engine.own import is_own
from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.artefact import read_about, require_whole
from vllm_tetri.predictor.base import Ask, Predictor, Tally
from vllm_tetri.predictor.client import PredictorProcess, serve_command
from vllm_tetri.predictor.oracle import Oracle
from vllm_tetri.types import Prediction, Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRANULARITY_TOKENS = 200  # paper section 3.3.2
NONE, ORACLE = "none", "oracle"
# Sequential mode: without an answer a prompt goes on after this, unpredicted.
SEQUENTIAL_WAIT_S = 1.0
_MOST_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Buckets:
    """What a predictor's answers mean, and what they are worth remembering under."""

    granularity_tokens: int
    num_buckets: int
    predictor: str


def buckets_of(config: TetriConfig, window_tokens: int) -> Buckets:
    """The buckets of the configured predictor.

    Args:
        window_tokens: Of the target model.

    Raises:
        ConfigError: There is no such artefact, or it is cut up differently.
    """
    granularity = config.granularity
    if config.predictor in (NONE, ORACLE):
        width = granularity or GRANULARITY_TOKENS
        count = min(max(1, -(-window_tokens // width)), _MOST_BUCKETS)
        name = config.predictor
        if name == ORACLE and config.predictor_accuracy < 1:
            name += f" {config.predictor_accuracy:g}"
        return Buckets(width, count, name)
    about = read_about(Path(config.predictor))
    if granularity not in (None, about.granularity_tokens):
        raise ConfigError(
            f"{option_of('granularity')} {granularity}: {config.predictor} was trained for "
            f"buckets of {about.granularity_tokens} tokens; leave the option out"
        )
    return Buckets(about.granularity_tokens, about.num_buckets, about.weights_digest)


def require_predictor(config: TetriConfig) -> None:
    """Say now what is wrong with the configured predictor.

    Raises:
        ConfigError: It is missing, damaged, or cut up differently.
    """
    buckets_of(config, window_tokens=1)
    if config.predictor not in (NONE, ORACLE):
        require_whole(Path(config.predictor))


def make_predictor(
    config: TetriConfig, vllm_config: VllmConfig, buckets: Buckets, role: Role
) -> Predictor | None:
    """Start what the options name; a process only where prompts are computed."""
    if config.predictor == NONE:
        return None
    if config.predictor == ORACLE:
        return Oracle(buckets.granularity_tokens, buckets.num_buckets, config.predictor_accuracy)
    if role is Role.DECODE:
        return None
    command = serve_command(
        Path(config.predictor).absolute(), vllm_config.model_config.tokenizer, _spare_cores()
    )
    return PredictorProcess(command, buckets.granularity_tokens, buckets.num_buckets)


def _spare_cores() -> tuple[int, ...]:
    """Cores that this instance may use and its engine is not bound to."""
    try:
        allowed = os.sched_getaffinity(os.getppid())
    except OSError:
        return ()
    return tuple(sorted(allowed - os.sched_getaffinity(0)))


@dataclass(slots=True)
class _Entry:
    deadline: float
    is_answered: bool = False
    is_missed: bool = False
    prediction: Prediction | None = None


class Predictions:
    """From requests to predictions.

    Args:
        predictor: None predicts nothing.
        is_sequential: Prompts wait for their prediction, at most `SEQUENTIAL_WAIT_S`.
        clock: Monotonic seconds.

    Attributes:
        missed: Predictions that were not there when they were needed.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        *,
        is_sequential: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor = predictor
        self._is_sequential = is_sequential
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self.missed = 0

    @property
    def num_asked(self) -> int:
        """Prompts that were asked about and have not ended (any thread)."""
        return len(self._entries)

    @property
    def is_sequential(self) -> bool:
        """Whether prompts wait for their prediction."""
        return self._is_sequential and self.predictor is not None

    @property
    def tally(self) -> Tally:
        """What became of the prompts that the predictor was asked about."""
        return self.predictor.tally if self.predictor is not None else Tally()

    def begin(self, request: Request) -> None:
        """A prompt came in whose answer is not predicted yet."""
        prompt, sampling = request.prompt_token_ids, request.sampling_params
        if self.predictor is None or prompt is None or sampling is None:
            return
        if is_own(request.request_id):
            return
        known_tokens = _fixed_tokens(sampling)
        self._entries[request.request_id] = _Entry(self._clock() + SEQUENTIAL_WAIT_S)
        self.predictor.ask(Ask(request.request_id, prompt, known_tokens))

    def exchange(self) -> None:
        """Send what is new, take what was answered; once per step."""
        if self.predictor is None:
            return
        for request_id, prediction in self.predictor.poll():
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.is_answered, entry.prediction = True, prediction

    def get(self, request_id: str, *, is_due: bool = False) -> Prediction | None:
        """What is known. When it `is_due` (the first chunk is done) and not there, that
        is counted, once per request; a later answer still helps whoever asks later."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if is_due and not entry.is_answered and not entry.is_missed:
            self.exchange()
            if not entry.is_answered:
                entry.is_missed = True
                self.missed += 1
        return entry.prediction

    def holds(self, request_id: str) -> bool:
        """Sequential mode: whether a prompt must not start yet."""
        entry = self._entries.get(request_id)
        return (
            self.is_sequential
            and entry is not None
            and not entry.is_answered
            and self._clock() < entry.deadline
        )

    def wait(self, timeout_s: float) -> None:
        """Sleep until an answer may be there, at most `timeout_s`."""
        if self.predictor is not None:
            self.predictor.wait(timeout_s)

    def end(self, request_id: str) -> None:
        """The request ended; nobody needs its prediction any more."""
        if self._entries.pop(request_id, None) is not None and self.predictor is not None:
            self.predictor.withdraw(request_id)

    def close(self) -> None:
        """Stop the predictor. Idempotent."""
        if self.predictor is not None:
            self.predictor.close()


def _fixed_tokens(sampling: SamplingParams) -> int | None:
    """How long the client made the answer: what it must have before a token that then
    ends it, or what it may have when no token ends it."""
    if sampling.ignore_eos:
        return sampling.max_tokens
    return sampling.min_tokens + 1 if sampling.min_tokens else None
