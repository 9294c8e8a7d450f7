"""The numbers of an `InstanceLoad`, read from a live scheduler.

Called from the agent thread: it only reads, and copies a container in one C
call (atomic under the GIL) before it iterates.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from vllm_tetri.engine.admission import Answers
from vllm_tetri.engine.audit import Counts
from vllm_tetri.engine.compat import Request, Scheduler
from vllm_tetri.engine.own import is_own
from vllm_tetri.policy.lengths import HEAVY_TOKENS, End
from vllm_tetri.transport.native import ReceiverStats
from vllm_tetri.types import InstanceLoad

if TYPE_CHECKING:
    from vllm_tetri.engine.instance import Instance


def read_load(
    scheduler: Scheduler,
    instance: Instance,
    *,
    arena: ReceiverStats,
    dropped_messages: int,
    cpu_s: float,
    leftovers: tuple[str, ...],
) -> InstanceLoad:
    """A consistent enough picture for placement; counters are exact at rest."""
    # What the instance sends to itself is nobody's load.
    requests = [each for each in list(scheduler.requests.values()) if not is_own(each.request_id)]
    running = [each for each in list(scheduler.running) if not is_own(each.request_id)]
    pool = scheduler.kv_cache_manager.block_pool
    gate = instance.gate  # the engine may exchange it meanwhile
    outbox, inbox, injections = instance.outbox, instance.inbox, instance.injections
    decodes = [each for each in requests if each.request_id not in outbox]
    lengths = [
        (each.num_output_tokens, expected_tokens(each, instance.answers)) for each in decodes
    ]
    heavy = sum(total > HEAVY_TOKENS for _, total in lengths)
    blocks_total = pool.num_gpu_blocks - 1  # one is vLLM's null block
    return InstanceLoad(
        running=len(running),
        waiting=scheduler.get_request_counts()[1] - scheduler.waiting.num_own,
        held=arena.slots,
        queued_prefill_tokens=sum(
            remaining_prompt_tokens(each)
            for each in requests
            if each.request_id not in inbox and each.request_id not in instance.swap
        ),
        blocks_used=blocks_total - pool.get_num_free_blocks(),
        blocks_total=blocks_total,
        arena_used_bytes=arena.arena_used_bytes,
        arena_total_bytes=arena.arena_total_bytes,
        heavy=heavy,
        light=len(decodes) - heavy,
        remaining_tokens=sum(total - produced for produced, total in lengths),
        reserved_blocks=gate.reserved_blocks if gate is not None and running else 0,
        step_s=instance.step_s,
        prefills_done=outbox.prefills_done,
        decodes_done=instance.decodes_done,
        chunks_done=outbox.chunks_done,
        prompt_tokens_done=instance.steps.prompt_tokens_done,
        answer_tokens_done=instance.steps.answer_tokens_done,
        prefill_tokens_per_s=instance.steps.prefill_tokens_per_s,
        decode_base_s=instance.steps.decode_base_s,
        decode_request_s=instance.steps.decode_request_s,
        cost=instance.steps.cost,
        context_tokens=sum(each.num_computed_tokens for each in decodes),
        chunk_tokens=instance.chunk_tokens,
        handover_s=outbox.handovers.base_s,
        handover_token_s=outbox.handovers.token_s,
        kv_bytes_sent=outbox.sent_bytes,
        kv_bytes_received=inbox.loaded_bytes,
        kv_loads_failed=inbox.loads_failed,
        injected=injections.num_injected if injections else 0,
        recomputed=sum(injections.refused.values()) if injections else 0,
        dropped_messages=dropped_messages,
        preemptions=instance.preemptions,
        swapped_out=instance.swap.swapped_out,
        swapped_in=instance.swap.swapped_in,
        preemptions_recomputed=instance.swap.recomputed,
        flips=instance.num_flips,
        cpu_s=cpu_s,
        threads=threading.active_count(),
        predictions_made=instance.predictions.tally.made,
        predictions_missed=instance.predictions.missed,
        predictions_refused=instance.predictions.tally.refused,
        predictions_failed=instance.predictions.tally.failed,
        bucket_tokens=instance.bucket_tokens(),
        leftovers=leftovers,
    )


def count(scheduler: Scheduler, instance: Instance, arena: ReceiverStats) -> Counts:
    """What the audit looks at: nothing else while there is a request. One that comes or
    ends meanwhile may be seen by halves, but not by two calls."""
    unfinished = _num_unfinished(scheduler)
    if unfinished:
        return Counts(unfinished=unfinished)
    outbox, inbox = instance.outbox, instance.inbox
    injections, gate = instance.injections, instance.gate
    pool, waiting = scheduler.kv_cache_manager.block_pool, scheduler.waiting
    counts = Counts(
        finished=_num_finished(scheduler),
        blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        hand_overs=len(outbox),
        arrivals=len(inbox),
        swapped=len(instance.swap),
        taken_slots=arena.slots - arena.filling - arena.unclaimed - arena.quarantined,
        unclaimed_slots=arena.unclaimed,
        quarantined_bytes=arena.quarantined_bytes,
        injections=injections.num_open if injections is not None else 0,
        answers=instance.answers.num_predicted,
        predictions=instance.predictions.num_asked,
        queued=len(waiting) - waiting.num_own + waiting.prompts.num_started,
        undecided=instance.num_undecided,
        promised=gate.num_known if gate is not None else 0,
    )
    return replace(counts, unfinished=_num_unfinished(scheduler))


def _num_unfinished(scheduler: Scheduler) -> int:
    # Its own ones come with steps that others wait for, so they count too.
    return sum(not each.is_finished() for each in list(scheduler.requests.values()))


def _num_finished(scheduler: Scheduler) -> int:
    return sum(each.is_finished() for each in list(scheduler.requests.values()))


def remaining_prompt_tokens(request: Request) -> int:
    """Prompt tokens that no step has computed yet."""
    return max(0, request.num_prompt_tokens - request.num_computed_tokens)


def expected_tokens(request: Request, answers: Answers) -> int:
    """Tokens of its whole answer, more than it has."""
    return answers.total_tokens(request, End.EXPECTED, produced_tokens=request.num_output_tokens)


class CpuClock:
    """CPU seconds of this engine process and of the API server above it."""

    def __init__(self) -> None:
        own = psutil.Process()
        parent = own.parent()
        self._processes = [own] if parent is None else [own, parent]

    def read_s(self) -> float:
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total
