"""Dummy requests, and `--tetri-chunk-size auto`, which times some of them at start.

Dummy requests are prompts that an instance sends to itself, to time steps or to pad a chunk.
They pass vLLM's scheduler and model runner like any other request; their outputs are removed
before they reach the API server.

The knee is the smallest chunk that reaches nine tenths of the best throughput seen (paper
section 3.3.3). Nothing of the model runner is called: prompts of doubling sizes pass vLLM's
scheduler and whatever executor there is, one per step, before the instance joins its cluster.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator

from vllm_tetri.engine.compat import (
    EngineCoreOutputs,
    Request,
    SamplingParams,
    Scheduler,
    get_hash_fn_by_name,
    get_request_block_hasher,
)

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
KNEE_PART = 0.9
# Every size runs this often. The first run warms up, the best of all counts: whatever else
# runs on the machine only adds.
_RUNS = 3
# Doubling the chunk without gaining this much, twice, means that the curve is flat.
_FLAT_GAIN = 0.03
# A step that takes longer is not doubled: slow machines have to get done, too.
_LONGEST_STEP_S = 1.5
DEADLINE_S = 30.0
# Clients cannot guess it, so a client's request is never taken for a dummy one.
DUMMY_PREFIX = f"tetri-dummy-{secrets.token_hex(8)}-"


def is_dummy(request_id: str) -> bool:
    """Whether a request comes from the instance itself."""
    return request_id.startswith(DUMMY_PREFIX)


class DummyRequests:
    """Makes dummy requests for one scheduler, with random prompts that no client's prompt
    hits in the prefix cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.vllm_config
        self._vocabulary = max(2, config.model_config.get_vocab_size())
        self._hasher = None
        if config.cache_config.enable_prefix_caching:
            self._hasher = get_request_block_hasher(
                scheduler.hash_block_size,
                get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo),
            )
        self._numbers = itertools.count()

    def make(self, num_tokens: int) -> Request:
        """Return a prompt of `num_tokens` that generates one token."""
        return Request(
            f"{DUMMY_PREFIX}{next(self._numbers)}",
            random.choices(range(self._vocabulary), k=num_tokens),
            SamplingParams(
                max_tokens=1, ignore_eos=True, temperature=0, skip_reading_prefix_cache=True
            ),
            None,
            block_hasher=self._hasher,
        )


def remove_dummy_outputs(outputs: dict[int, EngineCoreOutputs]) -> list[str]:
    """Remove dummy requests from a step's outputs; return their ids."""
    found = []
    for each in outputs.values():
        found += [one.request_id for one in each.outputs if is_dummy(one.request_id)]
        each.outputs = [one for one in each.outputs if not is_dummy(one.request_id)]
    return found


def fitting_chunk(chunk_tokens: int, *, batched_tokens: int, window_tokens: int) -> int:
    """Return a chunk size from the command line, lowered to what a step can hold."""
    most = min(batched_tokens, window_tokens)
    if chunk_tokens > most:
        logger.warning(
            "The chunk of %d tokens (--tetri-chunk-size) is lowered to %d: a step holds at most %d "
            "(--max-num-batched-tokens), the model's window %d.",
            chunk_tokens, most, batched_tokens, window_tokens,
        )  # fmt: skip
    return min(chunk_tokens, most)


class ChunkProbe:
    """Runs the dummy prompts of one engine. Owner: the engine thread.

    Args:
        most_tokens: The longest prompt that one step can hold.

    Attributes:
        chunk_tokens: The knee of what was measured so far.
        is_over: Whether the probe is done and nothing of it is left in the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        most_tokens: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._dummies = DummyRequests(scheduler)
        self._most_tokens = most_tokens
        self._clock = clock
        self._sizes = self._prompt_sizes()
        self._seconds: dict[int, float] = {}  # best time of a step, by prompt tokens
        self._running, self._tokens, self._begun_s = "", 0, 0.0
        self.chunk_tokens = min(LEAST_TOKENS, most_tokens)
        self.is_over = False

    def before_step(self) -> None:
        """Add the next dummy prompt once the previous one has ended."""
        if self.is_over or self._running in self._scheduler.requests:
            return
        tokens = next(self._sizes, None)
        if tokens is None:
            self._finish()
            return
        request = self._dummies.make(tokens)
        self._running, self._tokens, self._begun_s = request.request_id, tokens, self._clock()
        self._scheduler.max_num_scheduled_tokens = tokens
        self._scheduler.add_request(request)

    def after_step(self, ended: list[str]) -> None:
        """Take the time of a step.

        Args:
            ended: Dummy requests that the step ended.
        """
        if self._running in ended:
            seconds = self._clock() - self._begun_s
            self._seconds[self._tokens] = min(seconds, self._seconds.get(self._tokens, seconds))

    def _prompt_sizes(self) -> Iterator[int]:
        """Yield the tokens of one prompt after the other, until enough is known."""
        deadline = self._clock() + DEADLINE_S
        logger.info(
            "--tetri-chunk-size auto: timing prompts of up to %d tokens; takes a few seconds, "
            "at most %.0f. The instance joins its cluster afterwards.",
            self._most_tokens, DEADLINE_S,
        )  # fmt: skip
        tokens, is_enough = self.chunk_tokens, False
        while not is_enough:
            for _ in range(_RUNS):
                if self._clock() > deadline:
                    return
                yield tokens
            speeds = list(self._speeds().values())[-3:]
            is_flat = len(speeds) == 3 and max(speeds[1:]) < (1 + _FLAT_GAIN) * speeds[0]
            is_enough = (
                is_flat or tokens >= self._most_tokens or self._seconds[tokens] > _LONGEST_STEP_S
            )
            tokens = min(2 * tokens, self._most_tokens)

    def _speeds(self) -> dict[int, float]:
        return {tokens: tokens / seconds for tokens, seconds in self._seconds.items()}

    def _finish(self) -> None:
        self.is_over, speeds = True, self._speeds()
        enough = KNEE_PART * max(speeds.values(), default=0.0)
        fast = [tokens for tokens, speed in speeds.items() if speed >= enough]
        self.chunk_tokens = min(fast, default=self.chunk_tokens)
        logger.info(
            "--tetri-chunk-size auto: %d tokens; prompt tokens/s by chunk: %s",
            self.chunk_tokens,
            ", ".join(f"{tokens}: {speed:.0f}" for tokens, speed in speeds.items()),
        )
