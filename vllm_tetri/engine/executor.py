"""vLLM's in-process executor for CPU roles, made quiet at rest.

torch starts one gloo thread per process group even for a single worker, and
each of them polls with a 10 ms time-out: a dozen groups cost over 1 % of a core
in an idle engine. Threads inherit the timer slack of the thread that creates
them, so the groups are created with a generous one: their time-outs coalesce,
while events on their sockets still wake them at once.
"""

from __future__ import annotations

import ctypes

from vllm_tetri.engine.compat import UniProcExecutor

_PR_SET_TIMERSLACK = 29
_DEFAULT_SLACK_NS = 0  # the kernel's word for "as it was"
_CALM_SLACK_NS = 500_000_000


class CalmExecutor(UniProcExecutor):
    """`UniProcExecutor` whose idle helper threads sleep."""

    def _init_executor(self) -> None:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_CALM_SLACK_NS))
        try:
            super()._init_executor()
        finally:
            prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_DEFAULT_SLACK_NS))
