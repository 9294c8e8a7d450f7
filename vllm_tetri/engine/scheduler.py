"""The scheduler that `--role` installs: vLLM's own, with a thin mixin.

Nothing of vLLM's `schedule` is copied. The mixin sets the chunk size, keeps an
engine that only waits for KV from spinning, and counts.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_tetri.engine.compat import AsyncScheduler, Scheduler, SchedulerOutput
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Role

# How long a step sleeps when its only work is KV that has not arrived. Bounds
# the delay of a new request; the arrival itself wakes it at once.
ARRIVAL_WAIT_S = 0.002


class TetriScheduler(Scheduler):
    """Synchronous variant; `make_scheduler` picks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.connector, TetriConnector)
        self._instance = self.connector.instance
        self._instance.bind_scheduler(self)
        if self._instance.config.role is Role.PREFILL:
            self.max_num_scheduled_tokens = self._chunk_budget(self._instance.config.chunk_size)
        self._step_started = 0.0

    def _chunk_budget(self, chunk_size: int) -> int:
        limit = self.scheduler_config.max_num_batched_tokens
        if chunk_size > limit:
            raise ConfigError(
                f"--tetri-chunk-size {chunk_size} exceeds --max-num-batched-tokens {limit}; "
                "raise the latter or lower the former"
            )
        return chunk_size

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.running and 0 < len(self.waiting) <= self._instance.inbox.num_waiting:
            self._instance.inbox.wait(ARRIVAL_WAIT_S)
        output = super().schedule(throttle_prefills)
        self._instance.preemptions += len(output.preempted_req_ids or ())
        self._step_started = time.monotonic()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._instance.step_s = time.monotonic() - self._step_started
        return super().update_from_output(scheduler_output, *args, **kwargs)


class TetriAsyncScheduler(TetriScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""


def make_scheduler(**kwargs: Any) -> Scheduler:
    """Factory that `--scheduler-cls` names (vLLM: `SchedulerConfig.get_scheduler_cls`)."""
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return TetriAsyncScheduler(**kwargs) if is_async else TetriScheduler(**kwargs)
