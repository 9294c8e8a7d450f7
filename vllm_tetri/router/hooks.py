"""What one request needs from the global scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_tetri.policy.route import Full, Route
from vllm_tetri.router.answers import NoRoom
from vllm_tetri.router.call import Call
from vllm_tetri.router.fault_metrics import FaultMetrics
from vllm_tetri.router.quarantine import Quarantine
from vllm_tetri.types import InstanceId, InstanceInfo, TransferId


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a job needs from the global scheduler.

    Attributes:
        route: Picks instances for (call, splittable, failed ones, full ones, whether the
            request is new).
        info: What an instance said of itself, if it is in use.
        submitted: Told when prompt tokens go to an instance.
        prefilled: Told how many were computed that were sent at a monotonic time.
        busy: Told when an instance had no room.
        no_room: The answer when all of these are full.
        cancel: Tells (prefill, decodes or all of them) to drop a transfer.
        fell_back: Told why work of one leg is done again.
        first_token: Told how a first token from prefill reached the client.
        faults: Counts what instances that fail do to requests.
        quarantine: Told of instances that failed a request; knows which one it was.
        resumes_anywhere: Whether a stream that broke may go on where its text may differ.
    """

    route: Callable[
        [Call, bool, frozenset[InstanceId], frozenset[InstanceId], bool], Route | Full | None
    ]
    info: Callable[[InstanceId], InstanceInfo | None]
    submitted: Callable[[InstanceId, int], None]
    prefilled: Callable[[InstanceId, int, float], None]
    busy: Callable[[InstanceId], None]
    no_room: Callable[[Full], NoRoom]
    cancel: Callable[[TransferId, InstanceId, frozenset[InstanceId]], None]
    fell_back: Callable[[str], None]
    first_token: Callable[[str], None]
    faults: FaultMetrics
    quarantine: Quarantine
    resumes_anywhere: bool
