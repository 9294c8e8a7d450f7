"""Output lengths: predictions of requests that are here, and what outputs turned out to be.

Owner: the engine thread, for which nothing here waits, except that an engine with nothing but
unpredicted prompts sleeps until one of them may start. A thread of `LengthsStore` writes its
file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tetri.config import TetriConfig, option_of
from vllm_tetri.engine.chunk_size import is_dummy
from vllm_tetri.engine.compat import Request, RequestStatus
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.predictor.base import Oracle, Predictor, Query
from vllm_tetri.predictor.client import PredictorProcess, serve_command
from vllm_tetri.predictor.model import read_about, require_whole
from vllm_tetri.types import Prediction, Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

GRANULARITY_TOKENS = 200  # paper section 3.3.2
NONE, ORACLE = "none", "oracle"
# Sequential mode: a prompt without a reply of the predictor starts after this, unpredicted.
SEQUENTIAL_WAIT_S = 1.0
SAVE_PERIOD_S = 30.0
_MOST_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the replies of a predictor mean; `predictor` says which one it is."""

    granularity_tokens: int
    num_buckets: int
    predictor: str


def buckets_of(config: TetriConfig, window_tokens: int) -> Buckets:
    """Return the buckets of the configured predictor for a model with this window.

    Raises:
        ConfigError: There is no such artefact, or it has other buckets.
    """
    granularity = config.granularity
    if config.predictor in (NONE, ORACLE):
        width = granularity or GRANULARITY_TOKENS
        count = min(max(1, -(-window_tokens // width)), _MOST_BUCKETS)
        return Buckets(width, count, config.predictor)
    about = read_about(Path(config.predictor))
    if granularity not in (None, about.granularity_tokens):
        raise ConfigError(
            f"{option_of('granularity')} {granularity}: {config.predictor} was trained for "
            f"buckets of {about.granularity_tokens} tokens; leave the option out"
        )
    return Buckets(about.granularity_tokens, about.num_buckets, about.weights_digest)


def require_predictor(config: TetriConfig) -> None:
    """Check the configured predictor before the model is loaded.

    Raises:
        ConfigError: It is missing, damaged, or has other buckets.
    """
    buckets_of(config, window_tokens=1)
    if config.predictor not in (NONE, ORACLE):
        require_whole(Path(config.predictor))


def make_predictor(
    config: TetriConfig, vllm_config: VllmConfig, buckets: Buckets, role: Role
) -> Predictor | None:
    """Start the configured predictor; a process only where prompts are computed."""
    if config.predictor == NONE:
        return None
    if config.predictor == ORACLE:
        return Oracle(buckets.granularity_tokens, buckets.num_buckets)
    if role is Role.DECODE:
        return None
    allowed: set[int] = set()
    with suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
    spare = tuple(sorted(allowed - os.sched_getaffinity(0)))  # its engine is not bound to them
    artefact, tokenizer = Path(config.predictor).absolute(), vllm_config.model_config.tokenizer
    command = serve_command(artefact, tokenizer, spare)
    return PredictorProcess(command, buckets.granularity_tokens, buckets.num_buckets)


@dataclass(slots=True)
class _Awaited:
    deadline: float
    is_settled: bool = False  # it has its reply, or was missed
    prediction: Prediction | None = None


class Predictions:
    """Predictions of the requests of one instance; none without a predictor. With
    `is_sequential` prompts wait for theirs, at most `SEQUENTIAL_WAIT_S`. `missed` counts those
    that were not there when they were needed."""

    def __init__(
        self,
        predictor: Predictor | None,
        *,
        is_sequential: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictor = predictor
        self.is_sequential = is_sequential  # where there is a predictor, which a flip may bring
        self._clock = clock
        self.entries: dict[str, _Awaited] = {}  # until the request ends
        self.missed = 0

    def begin(self, request: Request) -> None:
        """Ask for the prediction of a new prompt."""
        prompt, sampling = request.prompt_token_ids, request.sampling_params
        if self.predictor is None or is_dummy(request.request_id):
            return
        if prompt is None or sampling is None:
            return
        known_tokens = sampling.min_tokens + 1 if sampling.min_tokens else None
        if sampling.ignore_eos:
            known_tokens = sampling.max_tokens
        self.entries[request.request_id] = _Awaited(self._clock() + SEQUENTIAL_WAIT_S)
        self.predictor.ask(Query(request.request_id, prompt, known_tokens))

    def keep(self, request_id: str, prediction: Prediction) -> None:
        """Keep the prediction with which a request came from another instance."""
        self.entries[request_id] = _Awaited(0.0, is_settled=True, prediction=prediction)

    def exchange(self, wait_s: float = 0.0) -> None:
        """Send new prompts to the predictor and take its replies; once per step. Sleep before, at
        most `wait_s`, until a reply may be there."""
        if self.predictor is None:
            return
        if wait_s:
            self.predictor.wait(wait_s)
        for request_id, prediction in self.predictor.poll():
            entry = self.entries.get(request_id)
            if entry is not None:
                entry.is_settled, entry.prediction = True, prediction

    def get(self, request_id: str, *, is_due: bool = False) -> Prediction | None:
        """Return the prediction of a request, if there is one. If it `is_due` (the first chunk is
        done; engine thread only) and missing, that is counted once; it may still come later."""
        entry = self.entries.get(request_id)
        if entry is None:
            return None
        if is_due and not entry.is_settled:
            self.exchange()
            self.missed += not entry.is_settled
            entry.is_settled = True
        return entry.prediction

    def holds(self, request_id: str) -> bool:
        """Whether a prompt must still wait for its prediction (sequential mode)."""
        entry = self.entries.get(request_id)
        return (
            self.is_sequential
            and entry is not None
            and not entry.is_settled
            and self._clock() < entry.deadline
        )

    def end(self, request_id: str) -> None:
        """Forget an ended request."""
        entry = self.entries.pop(request_id, None)
        if entry is not None and entry.deadline and self.predictor is not None:
            self.predictor.withdraw(request_id)

    def close(self) -> None:
        """Stop the predictor. Idempotent."""
        if self.predictor is not None:
            self.predictor.close()


def tells_length(request: Request, lengths: Lengths, predicted: Prediction | None) -> bool:
    """Whether an ended request tells how long its output was. An aborted one does not, nor one
    that the client's `max_tokens` cut shorter than expected; with `ignore_eos` that limit is
    the length."""
    if request.status is RequestStatus.FINISHED_STOPPED:
        return True
    if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
        return False
    sampling = request.sampling_params
    if sampling is not None and sampling.ignore_eos:
        return True
    return request.num_output_tokens >= lengths.total_tokens(predicted, 0, End.EXPECTED)


def lengths_folder() -> Path:
    """Return `${TETRI_CACHE}/lengths`, by default `~/.cache/vllm-tetri/lengths`."""
    if own := os.environ.get("TETRI_CACHE"):
        return Path(own) / "lengths"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "vllm-tetri" / "lengths"


class LengthsStore:
    """Keeps `lengths` in a JSON file from one start to the next, one file per model, predictor
    and granularity, in a folder that need not exist. Deleting it only costs what was learnt.
    Instances that share a file overwrite each other's: they see outputs of the same model."""

    def __init__(self, folder: Path, model: str, buckets: Buckets) -> None:
        key = hashlib.sha256(json.dumps([model, *astuple(buckets)]).encode()).hexdigest()
        self.path = folder / f"{key[:16]}.json"
        fresh = Lengths(buckets.granularity_tokens, buckets.num_buckets)
        self.lengths = self._load(fresh) or fresh
        self._saved_s = float("-inf")
        self._is_dirty = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tetri-lengths")

    def _load(self, fresh: Lengths) -> Lengths | None:
        try:
            lengths = Lengths.from_state(json.loads(self.path.read_bytes()))
            found = lengths.num_buckets, lengths.granularity_tokens
            if found != (fresh.num_buckets, fresh.granularity_tokens):
                raise ValueError("it has {} buckets of {} tokens".format(*found))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning(
                "%s is ignored: %s. It is written anew; output lengths are learnt again.",
                self.path, error,
            )  # fmt: skip
            return None
        return lengths

    def learn(self, request: Request, predicted: Prediction | None) -> None:
        """Learn the output length of an ended request, if it tells one."""
        if tells_length(request, self.lengths, predicted):
            self.lengths.observe(predicted, request.num_output_tokens)
            self._is_dirty = True
            if (now := time.monotonic()) - self._saved_s >= SAVE_PERIOD_S:
                self._saved_s = now
                self._save()

    def close(self) -> None:
        """Write what was learnt since. Idempotent."""
        if self._is_dirty:
            self._save()
        self._writer.shutdown()

    def _save(self) -> None:
        self._is_dirty = False
        self._writer.submit(self._write, json.dumps(self.lengths.state()))

    def _write(self, state: str) -> None:
        """Replace the file; another instance may read or write it at the same time."""
        own = self.path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(state + "\n")
            own.replace(self.path)
        except OSError as error:
            logger.warning("output lengths cannot be saved: %s. Check its folder.", error)
            with suppress(OSError):
                own.unlink(missing_ok=True)
