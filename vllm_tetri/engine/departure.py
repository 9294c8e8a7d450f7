"""Leaving the cluster in good order: what an engine still has, and how its server ends.

Called from the agent thread: it only reads, and copies a container in one C call
(atomic under the GIL) before it iterates.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from vllm_tetri.engine.compat import Scheduler
from vllm_tetri.engine.outbox import Outbox
from vllm_tetri.engine.own import is_own
from vllm_tetri.transport.native import ReceiverStats


def unfinished(scheduler: Scheduler, outbox: Outbox, arena: ReceiverStats) -> str:
    """What is left to do, in words; empty when the engine may end."""
    requests = sum(
        not is_own(each.request_id) and not each.is_finished()
        for each in list(scheduler.requests.values())
    )
    counts = (
        (requests, "unfinished requests"),
        (len(outbox), "hand-overs to other instances"),
        (arena.slots, "transfers in the arena"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def end_server() -> None:
    """End `vllm serve` as an operator would, with SIGTERM and so with status 0.

    vLLM runs the engine as a child of the process that serves HTTP, or of the one that
    started several of those; either takes the engine down with it.
    """
    server = multiprocessing.parent_process()
    os.kill(os.getpid() if server is None or server.pid is None else server.pid, signal.SIGTERM)
