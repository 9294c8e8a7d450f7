"""Leaving the cluster, or a role, in good order: what an engine still has, and how its
server ends.

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
from vllm_tetri.policy.flipping import DRAINS, Work
from vllm_tetri.transport.native import ReceiverStats
from vllm_tetri.types import Role


def unfinished(
    scheduler: Scheduler, outbox: Outbox, arena: ReceiverStats, role: Role = Role.BOTH
) -> str:
    """What is left to do of a role's work, in words; empty when there is nothing."""
    requests = sum(
        not is_own(each.request_id) and not each.is_finished()
        for each in list(scheduler.requests.values())
    )
    counts = {
        Work.REQUESTS: requests,
        Work.HAND_OVERS: len(outbox),
        Work.TRANSFERS: arena.slots,
    }
    works = DRAINS[role]
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count and what in works)


def end_server() -> None:
    """End `vllm serve` as an operator would, with SIGTERM and so with status 0.

    vLLM runs the engine as a child of the process that serves HTTP, or of the one that
    started several of those; either takes the engine down with it.
    """
    server = multiprocessing.parent_process()
    os.kill(os.getpid() if server is None or server.pid is None else server.pid, signal.SIGTERM)
