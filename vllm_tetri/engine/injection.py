"""Tokens that another instance sampled become output of a request here.

The scheduler appends them to the request before it is queued, so that lengths,
limits and stops count them. vLLM's V2 model runner then gets everything right by
itself. The V1 runner is told of a new request's prompt only: there the list that
it gets is an `Injected`, and the runner's request state takes the end of it as
output. The API server sees the tokens in front of the first one sampled here.
"""

from __future__ import annotations

import base64
import logging
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tetri.engine.compat import (
    CachedRequestState,
    EngineCoreOutput,
    LogprobsLists,
    NewRequestData,
    Request,
)
from vllm_tetri.engine.seeds import RewindableGenerator
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import KEY, Given

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<HH")  # tokens, log probabilities per token
_MARK = "_tetri_injects"


class Injected(list[int]):
    """Token ids of a prompt, the last `num_given` of which are output already."""

    num_given = 0

    @classmethod
    def of(cls, token_ids: list[int], num_given: int) -> Injected:
        made = cls(token_ids)
        made.num_given = num_given
        return made


def make_runner_inject() -> None:
    """Let request states of this process's V1 runner understand `Injected`, and let
    their seeded generators be rewound on CPU (see `seeds`). Idempotent."""
    stock = CachedRequestState.__post_init__
    if getattr(stock, _MARK, False):
        return

    def __post_init__(self: Any) -> None:
        given = self.prompt_token_ids
        if isinstance(given, Injected):
            split = len(given) - given.num_given
            self.prompt_token_ids, self.output_token_ids = list(given[:split]), list(given[split:])
        stock(self)
        if self.generator is not None and self.generator.device.type == "cpu":
            # Starts where its output stands: one draw per token.
            self.generator = RewindableGenerator.of(self.generator, self)

    setattr(__post_init__, _MARK, True)
    CachedRequestState.__post_init__ = __post_init__


def encode_logprobs(logprobs: LogprobsLists) -> str:
    """vLLM's arrays of some positions of one request as text, exactly."""
    ids = np.asarray(logprobs.logprob_token_ids, dtype="<i4")
    values = np.asarray(logprobs.logprobs, dtype="<f4")
    ranks = np.asarray(logprobs.sampled_token_ranks, dtype="<i4")
    parts = (_HEAD.pack(*ids.shape), ids.tobytes(), values.tobytes(), ranks.tobytes())
    return base64.b64encode(b"".join(parts)).decode()


def decode_logprobs(text: str, given: list[int], vocabulary: int) -> LogprobsLists:
    """What `encode_logprobs` was given for these tokens.

    Raises:
        ProtocolError: The text is something else, or says what no sampler says.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        rows, columns = _HEAD.unpack_from(raw)
        body, size = raw[_HEAD.size :], 4 * rows * columns
        if len(body) != 2 * size + 4 * rows:
            raise ValueError(f"{len(body)} bytes for {rows} x {columns}")
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"log probabilities of given tokens: {error}") from error
    found = LogprobsLists(
        np.frombuffer(body[:size], dtype="<i4").reshape(rows, columns),
        np.frombuffer(body[size : 2 * size], dtype="<f4").reshape(rows, columns),
        np.frombuffer(body[2 * size :], dtype="<i4"),
    )
    ids, values, ranks, _ = found
    is_sane = (
        columns > 0
        and ids[:, 0].tolist() == given
        and bool(((ids >= 0) & (ids < vocabulary)).all())
        and not bool(np.isnan(values).any())
        and bool((ranks >= 0).all())
    )
    if not is_sane:
        raise ProtocolError("log probabilities of given tokens: not those of these tokens")
    return found


def pass_on_logprobs(outputs: list[EngineCoreOutput]) -> None:
    """Add the log probabilities of a prefill instance's tokens to what it gives away."""
    for output in outputs:
        params = output.kv_transfer_params
        prefilled = params.get(KEY) if params else None
        if prefilled and prefilled.get("given") and output.new_logprobs is not None:
            prefilled["given"]["logprobs"] = encode_logprobs(output.new_logprobs)


@dataclass(slots=True)
class _Entry:
    token_ids: list[int]
    logprobs: LogprobsLists | None
    is_shown: bool = False


class Injections:
    """Requests of one scheduler that began elsewhere. Owner: the engine thread.

    Args:
        is_v2_runner: Which model runner executes.
        is_async: Whether vLLM schedules ahead of results.
        is_cpu: Whether sampling happens on a CPU.
        vocabulary: Number of token ids.
        window: Longest prompt plus answer, in tokens.
    """

    def __init__(
        self, *, is_v2_runner: bool, is_async: bool, is_cpu: bool, vocabulary: int, window: int
    ) -> None:
        self._is_v2_runner = is_v2_runner
        self._is_async = is_async
        self._is_cpu = is_cpu
        self._vocabulary = vocabulary
        self._window = window
        self._entries: dict[str, _Entry] = {}
        self.num_injected = 0
        self.refused: dict[str, int] = {}  # reason → requests that are recomputed instead

    @property
    def is_supported(self) -> bool:
        """Whether plain requests can be continued here at all."""
        return self._is_v2_runner or not self._is_async

    @property
    def is_seeded_supported(self) -> bool:
        """The same for requests that sample with a seed of their own."""
        return self.is_supported and (self._is_v2_runner or self._is_cpu)

    def begin(self, request: Request, given: Given) -> None:
        """Make given tokens the request's output; call it before it is queued.

        What cannot be continued exactly is left to be computed again.
        """
        token_ids = list(given.token_ids)
        try:
            logprobs = (
                decode_logprobs(given.logprobs, token_ids, self._vocabulary)
                if given.logprobs
                else None
            )
        except ProtocolError:
            reason: str | None = "bad_logprobs"
        else:
            reason = self._reason_against(request, given, logprobs)
        if reason is not None:
            if reason not in self.refused:
                logger.info("the first token is computed again for some requests: %s", reason)
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return
        if len(token_ids) > 1:
            # vLLM does not expect a prefix hit beyond the prompt of a new request.
            request.skip_reading_prefix_cache = True
        request.append_output_token_ids(token_ids)
        self._entries[request.request_id] = _Entry(token_ids, logprobs)
        self.num_injected += 1

    def _reason_against(
        self, request: Request, given: Given, logprobs: LogprobsLists | None
    ) -> str | None:
        sampling = request.sampling_params
        if not self.is_supported:
            return "async_v1_runner"
        if sampling is None or request.pooling_params is not None:
            return "no_sampling"
        if sampling.prompt_logprobs is not None:
            return "prompt_logprobs"
        if sampling.num_logprobs is not None and (
            logprobs is None or len(logprobs.sampled_token_ranks) != len(given.token_ids)
        ):
            return "logprobs_missing"
        is_seeded = sampling.seed is not None and sampling.temperature > 0
        if is_seeded and not self.is_seeded_supported:
            return "seed_on_v1_runner"
        if max(given.token_ids) >= self._vocabulary:
            return "unknown_tokens"
        num_given = len(given.token_ids)
        if num_given >= request.max_tokens or request.num_tokens + num_given >= self._window:
            return "nothing_left"
        return None

    @property
    def num_open(self) -> int:
        """Requests that were given tokens and have not ended (any thread)."""
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def tokens(self, request_id: str) -> list[int]:
        """What a request was given; empty if nothing."""
        entry = self._entries.get(request_id)
        return entry.token_ids if entry is not None else []

    def prepare(self, new_requests: list[NewRequestData], requests: dict[str, Request]) -> None:
        """Tell the V1 runner which end of a prompt is output."""
        if self._is_v2_runner or not self._entries:
            return
        for data in new_requests:
            entry = self._entries.get(data.req_id)
            if entry is not None:
                token_ids = requests[data.req_id].all_token_ids
                data.prompt_token_ids = Injected.of(list(token_ids), len(entry.token_ids))

    def show(self, outputs: list[EngineCoreOutput]) -> None:
        """Put given tokens before the first ones sampled here."""
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None or entry.is_shown or not output.new_token_ids:
                continue
            entry.is_shown = True
            output.new_token_ids = [*entry.token_ids, *output.new_token_ids]
            if entry.logprobs is not None and output.new_logprobs is not None:
                output.new_logprobs = _joined(entry.logprobs, output.new_logprobs)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._entries.pop(request_id, None)


def _joined(first: LogprobsLists, then: LogprobsLists) -> LogprobsLists:
    """Both, padded to the same number of columns (vLLM pads a batch to its widest)."""
    columns = max(first.logprobs.shape[1], then.logprobs.shape[1])
    return LogprobsLists(
        np.concatenate([_wide(each.logprob_token_ids, columns, 0) for each in (first, then)]),
        np.concatenate([_wide(each.logprobs, columns, -np.inf) for each in (first, then)]),
        np.concatenate([first.sampled_token_ranks, then.sampled_token_ranks]),
    )


def _wide(rows: np.ndarray, columns: int, filler: float) -> np.ndarray:
    missing = columns - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=filler) if missing else rows
