"""What answers turned out to be, remembered from one start to the next.

One JSON file per model, predictor and granularity, in the `lengths` folder of the
cache. Deleting it only costs what was learnt. Instances that share a file overwrite
each other's: they see answers of the same model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

from vllm_tetri.engine.cache import replace_file
from vllm_tetri.engine.compat import Request, RequestStatus
from vllm_tetri.engine.prediction import Buckets
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import Prediction

SAVE_PERIOD_S = 30.0
_CLOSE_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose answers they are.

    Attributes:
        model: Name or folder of the model that writes them.
        buckets: What is predicted of them, and by whom.
    """

    model: str
    buckets: Buckets

    @property
    def file_name(self) -> str:
        words = [self.model, *astuple(self.buckets)]
        key = hashlib.sha256(json.dumps(words).encode()).hexdigest()
        return f"{key[:16]}.json"


def tells_length(request: Request, lengths: Lengths, predicted: Prediction | None) -> bool:
    """Whether an ended request tells how long its answer was.

    It does not when it was aborted, nor when the client's `max_tokens` cut it shorter
    than it was expected to be. With `ignore_eos` that limit is the length.
    """
    if request.status is RequestStatus.FINISHED_STOPPED:
        return True
    if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
        return False
    sampling = request.sampling_params
    if sampling is not None and sampling.ignore_eos:
        return True
    return request.num_output_tokens >= lengths.total_tokens(predicted, 0, End.EXPECTED)


class LengthsStore:
    """Keeps a `Lengths` on disk. A thread of its own writes; the engine thread only
    takes the picture that is written, at most once per period.

    Args:
        folder: Where the files are; need not exist.
    """

    def __init__(self, folder: Path, subject: Subject, *, period_s: float = SAVE_PERIOD_S) -> None:
        self.path = folder / subject.file_name
        self._period_s = period_s
        num, granularity = subject.buckets.num_buckets, subject.buckets.granularity_tokens
        self._every_bucket = [Prediction(bucket, num, granularity) for bucket in range(num)]
        self.lengths = self._load() or Lengths(granularity, num)
        self._has_learnt = self.lengths.state() != Lengths(granularity, num).state()
        self._saved_s = float("-inf")
        self._is_dirty = False
        self._picture: dict[str, object] | None = None
        self._given = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def _load(self) -> Lengths | None:
        try:
            lengths = Lengths.from_state(json.loads(self.path.read_bytes()))
            if lengths.num_buckets != len(self._every_bucket):
                raise ValueError(f"it has {lengths.num_buckets} buckets")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is ignored: %s", self.path, error)
            return None
        return lengths

    def changed(self, now: float) -> None:
        """The lengths learnt something (engine thread)."""
        self._is_dirty = self._has_learnt = True
        if now - self._saved_s >= self._period_s:
            self._saved_s = now
            self._hand_over()

    def bucket_tokens(self) -> tuple[int, ...]:
        """Expected tokens of an answer, by predicted bucket, at the end without a
        prediction; empty before anything was learnt (any thread)."""
        if not self._has_learnt:
            return ()
        total = self.lengths.total_tokens
        return tuple(total(each, 0, End.EXPECTED) for each in (*self._every_bucket, None))

    def close(self) -> None:
        """Write what was learnt since. Idempotent."""
        if self._is_dirty:
            self._hand_over()
        self._is_closed = True
        self._given.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _hand_over(self) -> None:
        self._is_dirty = False
        self._picture = self.lengths.state()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tetri-lengths", daemon=True)
            self._thread.start()
        self._given.set()

    def _run(self) -> None:
        while True:
            self._given.wait()
            self._given.clear()
            is_last = self._is_closed
            picture, self._picture = self._picture, None
            if picture is not None:
                self._write(picture)
            if is_last:
                return

    def _write(self, picture: dict[str, object]) -> None:
        try:
            replace_file(self.path, json.dumps(picture).encode() + b"\n")
        except OSError as error:
            logger.warning("the lengths of answers cannot be remembered: %s", error)
