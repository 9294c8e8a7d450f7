"""Requests that continue from output tokens of another instance (`PriorOutput`).

The scheduler appends the tokens to the request before it is queued, so that lengths, limits
and stops count them. vLLM's V2 model runner then needs nothing else. The V1 runner only
learns a new request's prompt: there the list that it gets is a `ContinuedPrompt`, and the
runner's request state takes the end of it as output. The API server gets the tokens in front
of the first one sampled here.
"""

from __future__ import annotations

import base64
import logging
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_tetri.engine.compat import (
    CachedRequestState,
    EngineCoreOutput,
    LogprobsLists,
    NewRequestData,
    PrefillStats,
    Request,
    RequestStatus,
    Scheduler,
)
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import KEY, PriorOutput

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")  # tokens, log probabilities per token
_MARK = "_tetri_continues"
_NOT_BEGUN = RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class ContinuedPrompt(list[int]):
    """Token ids of a prompt whose last `num_prior` ones are output."""

    def __init__(self, token_ids: Iterable[int], num_prior: int) -> None:
        super().__init__(token_ids)
        self.num_prior = num_prior


class RewindableGenerator(torch.Generator):
    """A CPU generator that can be rewound to the end of its request's output.

    After a step that computes only a part of a prompt, vLLM's V1 runner drops the sampled
    token and rewinds the request's generator by its offset. torch's CPU generator has none:
    the attempt ends the engine (patches/0001 is the upstream fix). The sampler draws one number
    per output token (`TopKTopPSampler.forward_cpu`).
    """

    _state: weakref.ref[Any]
    _seed: int

    @classmethod
    def of(cls, generator: torch.Generator, state: Any) -> RewindableGenerator:
        """Return a generator with the same seed, rewound to the end of the output of a
        runner's request state."""
        made = cls(device="cpu")
        made._state = weakref.ref(state)
        made._seed = generator.initial_seed()
        made.set_offset(0)
        return made

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Rewind to the draw that follows the last output token; `offset` is ignored."""
        state = self._state()
        num_draws = len(state.output_token_ids) if state is not None else 0
        self.manual_seed(self._seed)
        for _ in range(num_draws):
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)


def teach_v1_runner() -> None:
    """Let request states of this process's V1 runner understand `ContinuedPrompt`, and let
    their seeded generators be rewound on CPU. Idempotent."""
    stock = CachedRequestState.__post_init__
    if getattr(stock, _MARK, False):
        return

    def __post_init__(self: Any) -> None:
        prior_output = self.prompt_token_ids
        if isinstance(prior_output, ContinuedPrompt):
            split = len(prior_output) - prior_output.num_prior
            self.prompt_token_ids = list(prior_output[:split])
            self.output_token_ids = list(prior_output[split:])
        stock(self)
        if self.generator is not None and self.generator.device.type == "cpu":
            # Starts where its output stands: one draw per token.
            self.generator = RewindableGenerator.of(self.generator, self)

    setattr(__post_init__, _MARK, True)
    CachedRequestState.__post_init__ = __post_init__


def encode_logprobs(logprobs: LogprobsLists) -> str:
    """Encode vLLM's arrays of some positions of one request as text, bit for bit."""
    ids = np.asarray(logprobs.logprob_token_ids, dtype="<i4")
    values = np.asarray(logprobs.logprobs, dtype="<f4")
    ranks = np.asarray(logprobs.sampled_token_ranks, dtype="<i4")
    parts = (_HEAD.pack(*ids.shape), ids.tobytes(), values.tobytes(), ranks.tobytes())
    return base64.b64encode(b"".join(parts)).decode()


def decode_logprobs(text: str, prior_output: list[int], vocabulary: int) -> LogprobsLists:
    """Decode what `encode_logprobs` returned for these tokens; ProtocolError if the text is
    something else, or holds impossible values."""
    try:
        raw = base64.b64decode(text, validate=True)
        rows, columns = _HEAD.unpack_from(raw)
        body, size = raw[_HEAD.size :], 4 * rows * columns
        if len(body) != 2 * size + 4 * rows:
            raise ValueError(f"{len(body)} bytes for {rows} x {columns}")
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"log probabilities of prior output: {error}") from error
    found = LogprobsLists(
        np.frombuffer(body[:size], dtype="<i4").reshape(rows, columns),
        np.frombuffer(body[size : 2 * size], dtype="<f4").reshape(rows, columns),
        np.frombuffer(body[2 * size :], dtype="<i4"),
    )
    ids, values, ranks, _ = found
    is_sane = (
        columns > 0
        and ids[:, 0].tolist() == prior_output
        and bool(((ids >= 0) & (ids < vocabulary)).all())
        and not bool(np.isnan(values).any())
        and bool((ranks >= 0).all())
    )
    if not is_sane:
        raise ProtocolError("log probabilities of prior output: they belong to other tokens")
    return found


def unseen_logprobs(token_ids: list[int]) -> LogprobsLists:
    """Return arrays for tokens of which the client has the real values: it is shown none."""
    ids = np.asarray(token_ids, dtype="<i4")[:, None]
    return LogprobsLists(ids, np.zeros(ids.shape, "<f4"), np.ones(len(ids), "<i4"))


def pass_on_logprobs(outputs: list[EngineCoreOutput]) -> None:
    """Add log probabilities to the prior output that a prefill instance hands over."""
    for output in outputs:
        params = output.kv_transfer_params
        prefilled = params.get(KEY) if params else None
        if prefilled and prefilled.get("prior_output") and output.new_logprobs is not None:
            prefilled["prior_output"]["logprobs"] = encode_logprobs(output.new_logprobs)


@dataclass(slots=True)
class _Entry:
    token_ids: list[int]
    logprobs: LogprobsLists | None
    cached_tokens: int | None  # of the prompt, for its client; None: as counted here


class Continuations:
    """Requests of a scheduler, whose own constructor is done, that began on another instance.
    Owner: the engine thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        config, self._is_v2_runner = scheduler.vllm_config, scheduler.use_v2_model_runner
        is_cpu = config.device_config.device_type == "cpu"
        # Whether requests can be continued: V1 does not if vLLM schedules ahead of results.
        self.is_supported = self._is_v2_runner or not config.scheduler_config.async_scheduling
        # The same for requests that sample with their own seed: how often that is drawn from
        # depends on the drafts, of which the first step after a hand-over has none.
        is_drawn_alike = not scheduler.num_spec_tokens and (self._is_v2_runner or is_cpu)
        self.is_seeded_supported = self.is_supported and is_drawn_alike
        self._vocabulary = config.model_config.get_vocab_size()
        self._window = scheduler.max_model_len
        self._manager = scheduler.structured_output_manager
        self.entries: dict[str, _Entry] = {}  # that have not ended
        self.unshown: dict[str, _Entry] = {}  # those whose prior output is not shown yet
        self.num_continued = 0
        self.refused: dict[str, int] = {}  # reason → requests that are recomputed instead

    def begin(
        self, request: Request, prior_output: PriorOutput, cached_tokens: int | None = None
    ) -> None:
        """Append prior output to a request that is not queued yet. A request that cannot be
        continued exactly computes its output again."""
        token_ids = list(prior_output.token_ids)
        try:
            text = prior_output.logprobs
            wanted = request.sampling_params and request.sampling_params.num_logprobs
            logprobs = decode_logprobs(text, token_ids, self._vocabulary) if text else None
            if prior_output.is_seen and wanted is not None:
                logprobs = unseen_logprobs(token_ids)
            reason = self._reason_against(request, token_ids, logprobs)
        except (ProtocolError, OverflowError):
            logprobs, reason = None, "bad_logprobs"
        if reason is not None:
            if reason not in self.refused:
                logger.info(
                    "this instance generates the first tokens of some requests again, since it "
                    "cannot continue after them: %s",
                    reason,
                )
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return
        if len(token_ids) > 1:
            # vLLM asserts that what a new request has in caches is no more than its prompt, when it
            # counts that; this one's was counted where it began.
            request.prefill_stats = None
        request.append_output_token_ids(token_ids)
        entry = _Entry(token_ids, logprobs, cached_tokens)
        self.entries[request.request_id] = self.unshown[request.request_id] = entry
        self.num_continued += 1

    def begin_late(self, request: Request, prior_output: PriorOutput) -> None:
        """Append prior output to a queued request, unless it has begun without."""
        if request.status in _NOT_BEGUN and not request.num_computed_tokens:
            self.begin(request, prior_output)
            if request.status is RequestStatus.WAITING:  # else its grammar is not there yet
                self.accept_grammar(request)

    def _reason_against(
        self, request: Request, token_ids: list[int], logprobs: LogprobsLists | None
    ) -> str | None:
        sampling = request.sampling_params
        if sampling is None or request.pooling_params is not None:
            return "no_sampling"
        num_rows = len(logprobs.sampled_token_ranks) if logprobs is not None else 0
        is_seeded = sampling.seed is not None and sampling.temperature > 0
        num_tokens = request.num_tokens + len(token_ids)
        reasons = {
            "async_on_v1": not self.is_supported,
            "prompt_logprobs": sampling.prompt_logprobs is not None,
            "logprobs_missing": sampling.num_logprobs is not None and num_rows != len(token_ids),
            "seed_on_v1_or_drafts": is_seeded and not self.is_seeded_supported,
            "unknown_tokens": max(token_ids) >= self._vocabulary,
            "nothing_left": len(token_ids) >= request.max_tokens or num_tokens >= self._window,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def accept_grammar(self, request: Request) -> None:
        """Advance a new grammar by the prior output, which was sampled under it."""
        entry = self.entries.get(request.request_id)
        if entry is not None and not self._manager.accept_tokens(request, entry.token_ids):
            logger.error(
                "request %s: its grammar refuses the output of another instance; its result may "
                "violate the grammar. Check that all instances have the same structured output "
                "backend.",
                request.request_id,
            )

    def prepare(self, new_requests: list[NewRequestData], requests: dict[str, Request]) -> None:
        """Mark for the V1 runner which end of a prompt is output, and give it all media: vLLM 0.32
        leaves computed ones out, and its runner ends when a preempted request needs them again."""
        if self._is_v2_runner:
            return
        for data in new_requests:
            request, entry = requests[data.req_id], self.entries.get(data.req_id)
            data.mm_features = request.mm_features
            if entry is not None:
                data.prompt_token_ids = ContinuedPrompt(request.all_token_ids, len(entry.token_ids))

    def show(self, outputs: list[EngineCoreOutput]) -> list[str]:
        """Put prior output in front of the first tokens sampled here; return the requests of which
        these are."""
        shown: list[str] = []
        if not self.unshown:
            return shown
        for output in outputs:
            entry = self.unshown.get(output.request_id)
            if entry is None or not output.new_token_ids:
                continue
            del self.unshown[output.request_id]
            shown.append(output.request_id)
            # Metrics count a prompt on its first instance.
            stats = output.prefill_stats = output.prefill_stats or PrefillStats()
            stats.num_prompt_tokens = 0
            if entry.cached_tokens is not None:
                stats.num_cached_tokens = entry.cached_tokens
            output.new_token_ids = [*entry.token_ids, *output.new_token_ids]
            if entry.logprobs is not None and output.new_logprobs is not None:
                output.new_logprobs = _joined(entry.logprobs, output.new_logprobs)
        return shown

    def forget(self, request_id: str) -> None:
        """Forget an ended request."""
        if self.entries:
            self.entries.pop(request_id, None)
            self.unshown.pop(request_id, None)


def pad_no_drafts(scheduler: Scheduler) -> None:
    """Let requests enter the batch of the V1 runner without drafts. vLLM pads them by drafts of id
    -1, which V1's sampler on CPU accepts at random, and which draw from a request's seed; but not
    where the number of drafts may depend on that of the requests."""
    number = scheduler.num_spec_tokens
    if number and not scheduler.use_v2_model_runner and scheduler.dynamic_sd_lookup is None:
        scheduler.dynamic_sd_lookup = [number] * (scheduler.max_num_active_reqs + 1)


def _joined(*both: LogprobsLists) -> LogprobsLists:
    """Join arrays, padded to the same number of columns (vLLM pads a batch to its widest)."""
    columns = max(each.logprobs.shape[1] for each in both)

    def joined(name: str, filler: float) -> np.ndarray:
        rows = [getattr(each, name) for each in both]
        missing = [((0, 0), (0, columns - each.shape[1])) for each in rows]
        padded = map(partial(np.pad, constant_values=filler), rows, missing)
        return np.concatenate(list(padded))

    return LogprobsLists(
        joined("logprob_token_ids", 0),
        joined("logprobs", -np.inf),
        np.concatenate([each.sampled_token_ranks for each in both]),
    )
