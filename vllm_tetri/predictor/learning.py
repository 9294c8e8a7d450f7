"""A `Predictor` that learns while it serves: `head` on the states that the engine has read.

Nothing waits for it. A prompt's state is read when its first chunk is computed, and again at its
end; to predict is a product of two vectors on the engine's thread. A thread of its own solves for
the map anew as outputs end, for a bounded share of the time. Of each output that ends its error is
compared with that of the histogram, and it predicts while its own is the smaller one.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import choice, uniform
from statistics import fmean
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from vllm_tetri.predictor.base import Query, Tally
from vllm_tetri.predictor.head import Floats, Learner, Weights
from vllm_tetri.types import Prediction

_MOST_PARKED = 4096  # prompts whose outputs other instances write, and outputs not learnt yet
SHARE = 0.05  # of the time
_LEAST_PAUSE_S = 0.5
_SAVE_PERIOD_S = _SHARE_PERIOD_S = 30.0
_JUDGED_OUTPUTS = 32  # before any prediction is given
_MEMORY_OUTPUTS = 256
_BETTER = 0.97  # of the histogram's error, to begin with

_log = logging.getLogger(__name__)
_unwritable = set[Path]()  # of which was warned
T = TypeVar("T")


def replace_file(path: Path, what: str, content: bytes) -> None:
    """Replace a file, which others may read or write at the same time. If it cannot be written,
    that is one warning until it can."""
    own = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(content)
        own.replace(path)
        _unwritable.discard(path)
    except OSError as error:
        if path not in _unwritable:
            _log.warning("%s cannot be saved: %s. Check its folder.", what, error)
        _unwritable.add(path)
        with suppress(OSError):
            own.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _State:
    values: Floats
    expected_tokens: float = 0.0  # by the head; 0 if it did not know yet
    usual_tokens: float = 0.0  # as of any output


class Comparison:
    """Whether the head's errors are below the histogram's, over recent outputs."""

    def __init__(self) -> None:
        self.is_good = False
        self.num_outputs = 0
        self.error = self.usual_error = 0.0  # means, in tokens

    def judge(self, states: list[_State], num_tokens: int, *, is_cut: bool) -> None:
        """Learn from an output; of one that was cut only what is too short is known to be wrong."""
        errors = [
            [
                max(0.0, num_tokens - expected) if is_cut else abs(num_tokens - expected)
                for expected in (each.expected_tokens, each.usual_tokens)
            ]
            for each in states
            if each.expected_tokens
        ]
        if errors:
            self.add(*map(fmean, zip(*errors, strict=True)))

    def add(self, error: float, usual_error: float) -> None:
        """Learn from one output: both errors, in tokens."""
        self.num_outputs += 1
        part = 1 / min(self.num_outputs, _MEMORY_OUTPUTS)
        self.error += part * (error - self.error)
        self.usual_error += part * (usual_error - self.usual_error)
        if self.num_outputs >= _JUDGED_OUTPUTS:
            limit = self.usual_error * (1.0 if self.is_good else _BETTER)
            self.is_good = self.error < limit


def _keep(kept: OrderedDict[str, T], name: str, value: T) -> None:
    kept[name] = value
    if len(kept) > _MOST_PARKED:
        kept.popitem(last=False)


class HeadPredictor:
    """Predicts from hidden states. Used by the engine thread, but for `learn`; the trainer's owns
    the learner and the comparison, of which others read single values."""

    def __init__(self, path: Path, width: int) -> None:
        self.tally, self.comparison = Tally(), Comparison()
        self.unread: dict[str, bool] = {}  # prompts to compute, and whether nothing of them is
        self._states: dict[str, list[_State]] = {}  # of prompts that are here
        self._parked: OrderedDict[str, list[_State]] = OrderedDict()  # by transfer
        # Prompts that were parked before their state was read: a GPU's comes a step later.
        self._late: OrderedDict[str, str] = OrderedDict()
        self._found: list[tuple[str, Prediction | None]] = []
        self.learner = Learner(width)
        self._given: Weights | None = None  # by another instance of the model
        self._shared_s = 0.0  # when weights were last sent or given
        # States of outputs that ended, their tokens, and whether they were cut; not learnt yet.
        self._ended: deque[tuple[list[_State], int, bool]] = deque(maxlen=_MOST_PARKED)
        self._has_warned = False
        self._stop = threading.Event()
        self._path = path.with_suffix(".head")
        self.model = path.stem  # names model and predictor among instances
        self._load()
        self._trainer = threading.Thread(target=self._train, name="tetri-head", daemon=True)
        self._trainer.start()

    @property
    def weights(self) -> Weights | None:
        """Return the own map, unless another one has seen twice as many outputs."""
        own, given = self.learner.weights, self._given
        return own if given is None or (own and 2 * own.num_samples > given.num_samples) else given

    # -- Predictor ----------------------------------------------------------------

    def ask(self, query: Query) -> None:
        self._states[query.name], self.unread[query.name] = [], True

    def withdraw(self, name: str) -> None:
        self._states.pop(name, None)
        self.unread.pop(name, None)

    def poll(self) -> list[tuple[str, Prediction | None]]:
        found, self._found = self._found, []
        return found

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        self._stop.set()
        self._trainer.join(timeout=3.0)

    # -- states and outputs ---------------------------------------------------------

    def wants(self, name: str, left_tokens: int) -> bool:
        """Whether the state of one that is `unread` is to be read after a step that leaves so many
        tokens of it: the first one, and the last one."""
        if left_tokens <= 0:
            del self.unread[name]
            return left_tokens == 0
        is_first, self.unread[name] = self.unread[name], False
        return is_first

    def take(self, name: str, values: Floats) -> None:
        """Take a state that was read, and predict from it."""
        states = self._states.get(name)
        if (transfer := self._late.pop(name, None)) is not None:
            states = []
            _keep(self._parked, transfer, states)
        if states is None:
            return
        if not np.isfinite(values).all():
            self._refuse(name)
            return
        state, prediction, weights = _State(values), None, self.weights
        if weights is not None:
            found = weights.predict(values)
            state = _State(values, found.median_tokens, weights.usual_tokens)
            if self.comparison.is_good:
                prediction = found
                self.tally.made += not states
        states.append(state)
        self._found.append((name, prediction))

    def _refuse(self, name: str) -> None:
        self.tally.failed += 1
        self._found.append((name, None))
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the hidden state of request %s is not finite, so the output lengths of such "
                "requests are expected by the histogram. Check the model's weights and dtype.", name
            )  # fmt: skip

    def park(self, name: str, transfer: str) -> None:
        """Keep the states of a prompt whose output another instance writes, until `learn`."""
        states, is_unread = self._states.get(name), self.unread.get(name, False)
        self.withdraw(name)
        if states:
            _keep(self._parked, transfer, states)
        elif states is not None and not is_unread:
            _keep(self._late, name, transfer)

    def learn(self, name: str, num_tokens: int, *, is_cut: bool) -> None:
        """Learn from an output that ended, of a request or of a transfer that was parked (any
        thread). It would have been longer if it `is_cut`."""
        if states := self._states.pop(name, []) or self._parked.pop(name, []):
            self._ended.append((states, num_tokens, is_cut))

    def share(self, now: float) -> bytes | None:
        """Return the map that other instances are to have, if none was told of as good ones
        lately. Instances wait for different times, so that one of them speaks (any thread)."""
        weights = self.learner.weights
        if weights is None or weights is not self.weights or now < self._shared_s:
            return None
        self._shared_s = now + _SHARE_PERIOD_S * uniform(1, 2)
        return weights.pack()

    def adopt(self, packed: bytes, now: float) -> None:
        """Use what another instance has learnt while it has seen more outputs (any thread).
        ValueError if that is no map of states like those here."""
        weights = Weights.unpack(packed, self.learner.width)
        own = self.learner.weights
        if own is None or weights.num_samples >= 0.9 * own.num_samples:
            self._shared_s = now + _SHARE_PERIOD_S * uniform(1, 2)
        if self._given is None or 2 * weights.num_samples > self._given.num_samples:
            self._given = weights

    # -- the trainer's thread -------------------------------------------------------

    def _train(self) -> None:
        # Threads of numpy's BLAS spin while they wait, on the cores of the engine.
        pools = ThreadpoolController()
        paths = [each["filepath"] for each in pools.info() if "numpy" in each["filepath"]]
        pools.select(filepath=paths).limit(limits=1)
        saved_s, saved = time.monotonic(), self.weights
        while True:
            is_closed, began = self._stop.is_set(), time.monotonic()
            while self._ended:
                states, num_tokens, is_cut = self._ended.popleft()
                self.comparison.judge(states, num_tokens, is_cut=is_cut)
                # A map that knows another state of the same prompt knows the output.
                self.learner.add(choice(states).values, num_tokens, is_cut=is_cut)
            try:
                self.learner.refresh()
            except np.linalg.LinAlgError as error:  # comes again when more outputs are new
                _log.warning(
                    "lengths are predicted by what was learnt before, until more outputs are new: "
                    "the newest could not be learnt from (%s)", error
                )  # fmt: skip
            is_due = is_closed or time.monotonic() - saved_s >= _SAVE_PERIOD_S
            if is_due and (weights := self.weights) is not saved and weights is not None:
                saved_s, saved = time.monotonic(), weights
                replace_file(self._path, "what the length head learnt", weights.pack())
            if is_closed:
                return
            busy_s = time.monotonic() - began
            self._stop.wait(max(_LEAST_PAUSE_S, busy_s * (1 / SHARE - 1)))

    def _load(self) -> None:
        try:
            self._given = Weights.unpack(self._path.read_bytes(), self.learner.width)
        except FileNotFoundError:
            pass  # the first start with this model
        except (OSError, ValueError) as error:
            _log.warning("%s is ignored: %s. Lengths are learnt again.", self._path, error)
