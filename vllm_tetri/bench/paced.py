"""vLLM's executor for instances that keep the pace of an imagined device.

Named on the command line: `--distributed-executor-backend
vllm_tetri.bench.paced.PacedExecutor`, with the pace in `--additional-config`. The
model runs, so KV is real and is handed over; only the time is not the device's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm_tetri.bench.pace import CONFIG_KEY, CountsFile, Pace, Timeline
from vllm_tetri.engine.compat import SchedulerOutput
from vllm_tetri.engine.executor import CalmExecutor


class PacedExecutor(CalmExecutor):
    """Computes a step, then sleeps until it has taken as long as its `Pace` says."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._pace = Pace(**self.vllm_config.additional_config[CONFIG_KEY])
        self._timeline = Timeline(self._pace)
        self._counts = CountsFile(Path(self._pace.counts))
        self._due: float | None = None
        self._requests, self._paced_s = 0, 0.0  # of the step

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._due = None
        if tokens := scheduler_output.total_num_scheduled_tokens:
            context = context_tokens(scheduler_output)
            self._due = self._timeline.begin(time.monotonic(), tokens, context)
            self._requests = len(scheduler_output.num_scheduled_tokens)
            self._paced_s = self._pace.step_s(tokens, context)
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = super().sample_tokens(grammar_output, non_block)
        if self._due is not None:
            time.sleep(max(0.0, self._due - time.monotonic()))
            late_s = self._timeline.end(time.monotonic())
            self._counts.add(requests=self._requests, paced_s=self._paced_s, late_s=late_s)
        return output


def context_tokens(output: SchedulerOutput) -> int:
    """Tokens whose KV the requests of a step had before it."""
    known: list[int] = output.scheduled_cached_reqs.num_computed_tokens
    new: list[int] = [request.num_computed_tokens for request in output.scheduled_new_reqs]
    return sum(known) + sum(new)
