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
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_tetri.config import TetriConfig, option_of
from vllm_tetri.engine.compat import COMPLETE, Request, RequestStatus
from vllm_tetri.engine.states import middle_layer
from vllm_tetri.engine.step import WorkerReport
from vllm_tetri.errors import ConfigError
from vllm_tetri.handover import DecodeParams
from vllm_tetri.messages import LengthMap, OutputEnded
from vllm_tetri.policy.lengths import Lengths, OutputLengths
from vllm_tetri.predictor.base import Oracle, Predictor, Query, Tally
from vllm_tetri.predictor.learning import HeadPredictor, replace_file
from vllm_tetri.types import Prediction, Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

HEAD, HISTOGRAM, ORACLE = "head", "histogram", "oracle"
# Sequential mode: a prompt without a reply of the predictor starts after this, unpredicted.
SEQUENTIAL_WAIT_S = 1.0
SAVE_PERIOD_S = 30.0


def name_of(config: TetriConfig) -> str:
    """Return what names the configured predictor in caches; ConfigError if there is none."""
    if config.predictor in (HEAD, HISTOGRAM, ORACLE):
        return config.predictor
    folder = Path(config.predictor).absolute()
    return code_in(folder).check(folder)


def route_of(request: Request) -> str:
    """Return what requests have in common whose outputs are alike: the endpoint, by the names that
    vLLM gives its requests, and the LoRA adapter."""
    kind = request.request_id.partition("-")[0]
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return f"{kind if kind.isalpha() else ''}/{adapter}"


def code_in(folder: Path) -> Any:
    """Load `predictor.py` of a predictor's folder: `check(folder)` returns what names it in caches,
    or raises ConfigError, `make(folder, tokenizer, cores)` starts it, on these cores if there are
    any. ConfigError if there is none, or it fails."""
    path = folder / "predictor.py"
    try:
        code: Any = SimpleNamespace(**run_path(str(path)))
        if not (callable(code.check) and callable(code.make)):
            raise TypeError("check and make are no functions")
    except Exception as error:  # whatever the file does
        raise ConfigError(
            f"{option_of('predictor')} {folder}: {path} cannot be loaded: {error}. It defines "
            "check and make (docs/predictor.md)"
        ) from error
    return code


def make_predictor(config: TetriConfig, vllm_config: VllmConfig, role: Role) -> Predictor | None:
    """Start the configured predictor; a process only where prompts are computed."""
    if config.predictor == HISTOGRAM:
        return None
    if config.predictor == ORACLE:
        return Oracle()
    if config.predictor == HEAD:
        model, layer = vllm_config.model_config, middle_layer(vllm_config)
        name = HEAD if layer is None else f"{HEAD} {layer}"  # maps of other states are of no use
        return HeadPredictor(state_path(model.model, name), model.get_hidden_size())
    if role is Role.DECODE:
        return None
    allowed: set[int] = set()
    with suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
    spare = tuple(sorted(allowed - os.sched_getaffinity(0)))  # its engine is not bound to them
    folder = Path(config.predictor).absolute()
    return code_in(folder).make(folder, vllm_config.model_config.tokenizer, spare)


@dataclass(slots=True)
class _Awaited:
    deadline: float
    is_settled: bool = False  # it has its reply, or was missed
    prediction: Prediction | None = None
    origin: DecodeParams | None = None  # with which it came from the instance with its prompt


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
        if self.predictor is None:
            return
        if prompt is None or sampling is None:
            return
        known_tokens = sampling.min_tokens + 1 if sampling.min_tokens else None
        if sampling.ignore_eos:
            known_tokens = sampling.max_tokens
        self.entries[request.request_id] = _Awaited(self._clock() + SEQUENTIAL_WAIT_S)
        self.predictor.ask(Query(request.request_id, prompt, known_tokens))

    def keep(self, request_id: str, origin: DecodeParams) -> None:
        """Keep the prediction, if any, with which a request came from another instance."""
        predicted = origin.predicted
        if predicted is not None or self._head is not None:
            self.entries[request_id] = _Awaited(0.0, True, predicted, origin)

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
                if prediction is not None:  # policies are compiled: a tuple of plain numbers
                    prediction = Prediction(tuple(map(float, prediction.lengths)))
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
            and self._head is None  # which needs the prompt computed
            and entry is not None
            and not entry.is_settled
            and self._clock() < entry.deadline
        )

    # -- the length head --------------------------------------------------------

    @property
    def _head(self) -> HeadPredictor | None:
        return self.predictor if isinstance(self.predictor, HeadPredictor) else None

    def reads(self, scheduled: Mapping[str, int], requests: dict[str, Request]) -> list[str]:
        """Return the requests of a step whose hidden state is to be read after it. `scheduled` are
        its tokens by request, which `num_computed_tokens` does not count yet."""
        if (head := self._head) is None:
            return []
        found = []
        for name, tokens in scheduled.items():
            if name in head.unread:
                request = requests[name]
                left_tokens = request.num_prompt_tokens - request.num_computed_tokens - tokens
                if head.wants(name, left_tokens):
                    found.append(name)
        return found

    def take(self, model_runner_output: Any) -> None:
        """Predict from the hidden states that workers report."""
        output = model_runner_output.kv_connector_output
        report = output.kv_connector_worker_meta if output is not None else None
        if (head := self._head) is None or not isinstance(report, WorkerReport):
            return
        for request_id, state in report.states.items():
            head.take(request_id, state)

    def learn(self, request: Request) -> OutputEnded | None:
        """Learn from an output that ended here. Return what the instance is to be told that has its
        prompt. What the client fixed tells nothing of a model."""
        entry, sampling = self.entries.get(request.request_id), request.sampling_params
        if entry is None or sampling is None or sampling.ignore_eos or not has_length(request):
            return None
        if self._head is None:
            return None
        num_tokens = request.num_output_tokens
        is_cut = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        self._head.learn(request.request_id, num_tokens, is_cut=is_cut)
        if (origin := entry.origin) is None or not origin.prefill:
            return None
        return OutputEnded(origin.prefill, origin.transfer, num_tokens, is_cut)

    def numbers(self) -> dict[str, Any]:
        """Return what load reports say of predictions (any thread)."""
        tally = self.predictor.tally if self.predictor is not None else Tally()
        found = {f"predictions_{name}": number for name, number in asdict(tally).items()}
        found["predictions_missed"] = self.missed
        if (head := self._head) is not None:
            found["length_states"] = head.learner.num_samples
            found["length_error"] = head.comparison.error
            found["length_usual_error"] = head.comparison.usual_error
        return found

    def tell(self, ended: OutputEnded) -> None:
        """Learn from an output that ended elsewhere (any thread)."""
        if self._head is not None:
            self._head.learn(ended.transfer, ended.output_tokens, is_cut=ended.is_cut)

    def share(self) -> LengthMap | None:
        """Return what other instances are to know of lengths, if anything (any thread)."""
        if (head := self._head) is None or (packed := head.share(self._clock())) is None:
            return None
        return LengthMap(head.model, packed)

    def adopt(self, message: LengthMap) -> None:
        """Take what another instance has learnt, if it is of this model (any thread)."""
        if (head := self._head) is not None and message.model == head.model:
            try:
                head.adopt(message.packed, self._clock())
            except ValueError as error:
                logger.warning("lengths that another instance learnt are not used: %s", error)

    def end(self, request: Request, transfer: str = "") -> None:
        """Forget an ended request, whose output another instance writes if it has a transfer. With
        `ignore_eos` no length is learnt: the client fixed it, or the router for several choices."""
        request_id, sampling = request.request_id, request.sampling_params
        entry = self.entries.pop(request_id, None)
        if self._head is not None and transfer and sampling and not sampling.ignore_eos:
            self._head.park(request_id, transfer)
        elif entry is not None and self.predictor is not None:
            self.predictor.withdraw(request_id)

    def close(self) -> None:
        """Stop the predictor. Idempotent."""
        if self.predictor is not None:
            self.predictor.close()


def is_stopped(request: Request) -> bool:
    """Whether an ended request's output has the length that the model gave it. vLLM's API server
    finds stop strings, and then aborts the request, as it does if its client leaves: with stop
    strings that is taken for the former, which happens far more often."""
    sampling = request.sampling_params
    stops = sampling is not None and bool(sampling.stop) and request.num_output_tokens > 0
    is_aborted = request.status is RequestStatus.FINISHED_ABORTED
    return request.status is RequestStatus.FINISHED_STOPPED or (is_aborted and stops)


def has_length(request: Request) -> bool:
    """Whether an ended request has an output whose length may tell something: it was not given up,
    nor asked for one token, as copies of outputs are."""
    return request.max_tokens > 1 and (request.status in COMPLETE or is_stopped(request))


def tells_length(request: Request, outputs: OutputLengths) -> bool:
    """Whether an ended request tells how long its output was. One given up does not, nor one
    that the client's `max_tokens` cut shorter than expected, or that may have one token; with
    `ignore_eos` that limit is the length."""
    if is_stopped(request):
        return request.max_tokens > 1
    if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
        return False
    sampling = request.sampling_params
    if sampling is not None and sampling.ignore_eos:
        return True
    predicted, route = outputs.predict(request.request_id), outputs.route(request)
    return request.num_output_tokens >= outputs.lengths.outlook(predicted, 0, route)[0]


def state_path(model: str, predictor: str) -> Path:
    """Return the file that keeps what was learnt of a model's outputs, in `$TETRI_CACHE/lengths`,
    by default `vllm-tetri/lengths` in `$XDG_CACHE_HOME` or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    usual = (Path(cache) if cache else Path.home() / ".cache") / "vllm-tetri"
    key = hashlib.sha256(json.dumps([model, predictor]).encode()).hexdigest()
    return Path(os.environ.get("TETRI_CACHE") or usual) / "lengths" / f"{key[:16]}.json"


class LengthsStore:
    """Keeps `lengths` in a JSON file from one start to the next, one file per model and predictor,
    in a folder that need not exist. Deleting it only costs what was learnt. Instances that share a
    file overwrite each other's: they see outputs of the same model."""

    def __init__(
        self, path: Path, predict: Callable[[str], Prediction | None], window_tokens: int
    ) -> None:
        self.path = path
        self.lengths = self._load()
        self.outputs = OutputLengths(self.lengths, predict, window_tokens, route_of)
        self._saved_s = float("-inf")
        self._is_dirty = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tetri-lengths")

    def _load(self) -> Lengths:
        try:
            return Lengths.from_state(json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            logger.warning(
                "%s is ignored: %s. It is written anew; output lengths are learnt again.",
                self.path, error,
            )  # fmt: skip
        return Lengths()

    def learn(self, request: Request) -> None:
        """Learn the output length of an ended request, if it tells one."""
        is_cut = not tells_length(request, self.outputs)
        capped = RequestStatus.FINISHED_LENGTH_CAPPED
        if not is_cut or (request.status is capped and has_length(request)):
            predicted = self.outputs.predict(request.request_id)
            most_tokens, num_tokens = self.outputs.most_tokens(request), request.num_output_tokens
            self.lengths.observe(
                predicted, num_tokens, route_of(request), most_tokens, is_cut=is_cut
            )
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
        state = self.lengths.state()

        def write() -> None:
            replace_file(self.path, "output lengths", json.dumps(state).encode())

        self._writer.submit(write)
