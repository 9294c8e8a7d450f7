"""The load report of an instance, and a check for leaks at rest.

Runs on the agent's thread: it only reads, and copies a container in one C call (atomic
under the GIL) before it iterates.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import stat
import threading
import time
from pathlib import Path
from socket import AF_INET, AF_INET6, socket
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from vllm_tetri.control.agent import Agent
from vllm_tetri.engine.blocks import Pins
from vllm_tetri.engine.compat import KVCacheConfig, Request
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.engine.moves import MoveSide
from vllm_tetri.engine.pacing import StepBudget
from vllm_tetri.engine.pool import Pool
from vllm_tetri.engine.prediction import LengthsStore, Predictions
from vllm_tetri.engine.queue import PrefillQueue
from vllm_tetri.engine.receive import ReceiveSide
from vllm_tetri.engine.residency import CacheLog
from vllm_tetri.engine.send import SendSide
from vllm_tetri.engine.transfers import Sending
from vllm_tetri.policy.admission import DecodeGate
from vllm_tetri.policy.role import DRAINS, Work
from vllm_tetri.policy.step_cost import context_sum
from vllm_tetri.transport.native import Receiver
from vllm_tetri.types import InstanceLoad, Role

logger = logging.getLogger(__name__)

# A leak has to be there in two reports: one alone may be taken in the middle of a step.
LEAK_PATIENCE_S = 0.1
# What another process has a part in may take a round trip longer to go.
SHARED_LEAK_PATIENCE_S = 1.0
_UNCLAIMED = "received KV transfers without a request"
_QUARANTINED = "arena bytes whose writer does not respond"
SHARED_LEAKS = (_UNCLAIMED, _QUARANTINED)


def release_port(url: str) -> None:
    """Let go of the API server's socket, which a forked engine has open, too. vLLM's server looks
    for another process with its port when it ends, and ends with status 1 instead of 0 if that is
    its own engine that has just become a zombie (`launcher.serve_http`)."""
    port, nowhere = urlsplit(url).port, os.open(os.devnull, os.O_RDWR)
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        with contextlib.suppress(OSError), socket(fileno=os.dup(number)) as each:
            if each.family in (AF_INET, AF_INET6) and each.getsockname()[1] == port:
                # The number stays taken: an object that was inherited may close it.
                os.dup2(nowhere, number)
    os.close(nowhere)


class SchedulerState(Sending, Protocol):
    """What `engine.scheduler` owns and the rest of the engine reads."""

    running: list[Request]
    waiting: PrefillQueue
    kv_cache_config: KVCacheConfig
    hash_block_size: int
    pins: Pins
    gate: DecodeGate  # the admission policy of decodes
    budget: StepBudget
    preemptions: int  # how often a request lost its blocks
    decodes_done: int  # requests decoded here that ended

    def get_request_counts(self) -> tuple[int, int]: ...
    def record_decoded(self, request: Request) -> None: ...


class LoadReader:
    """What an instance consists of, as `engine.endpoint` makes it, and the numbers that the agent's
    thread reads there."""

    scheduler: SchedulerState  # set by the scheduler, before `start` sets the next ones
    cache: CacheLog  # of the prefix cache; set by the scheduler as well
    receiver: Receiver
    agent: Agent
    dispatcher: Dispatcher
    sends: SendSide
    moves: MoveSide
    pool: Pool
    receives: ReceiveSide
    predictions: Predictions
    lengths_store: LengthsStore

    def __init__(self) -> None:
        own = psutil.Process()
        self._processes = [own, *filter(None, [own.parent()])]  # the API server started it
        # 0: of no engine process, but a program of the user's.
        self._parent_pid = os.getppid() if multiprocessing.parent_process() is not None else 0
        self._leaking_since: dict[str, float] = {}
        self._leaks: tuple[str, ...] = ()  # as last logged

    def read_load(self) -> InstanceLoad:
        """Return the numbers of the next load report; counters are exact at rest."""
        self._end_without_parent()
        scheduler, store, arena = self.scheduler, self.lengths_store, self.receiver.stats()
        sends, receives, budget = self.sends, self.receives, scheduler.budget
        requests, running = list(scheduler.requests.values()), list(scheduler.running)
        decodes = [each for each in requests if each.request_id not in sends]
        outlooks = [store.outputs.outlook(each, each.num_output_tokens) for each in decodes]
        heavy = sum(part for _, part in outlooks)
        left_tokens = sum(tokens for tokens, _ in outlooks)
        left_tokens -= sum(each.num_output_tokens for each in decodes)
        fit = scheduler.clock.fit
        reserved_blocks = scheduler.gate.admission.reserved_blocks * len(scheduler.blocks.growing)
        return InstanceLoad(
            running=len(running),
            waiting=scheduler.get_request_counts()[1],
            held=arena.slots,
            **self._queued(requests),
            blocks_used=self._used_blocks(),
            blocks_total=scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            arena_used_bytes=arena.arena_used_bytes,
            arena_total_bytes=arena.arena_total_bytes,
            heavy=heavy,
            light=len(decodes) - heavy,
            remaining_tokens=left_tokens,
            reserved_blocks=reserved_blocks if running else 0,
            step_s=scheduler.clock.step_s,
            prefills_done=sends.prefills_done,
            decodes_done=scheduler.decodes_done,
            chunks_done=sends.chunks_done,
            prompt_tokens_done=fit.prompt_tokens_done,
            output_tokens_done=fit.output_tokens_done,
            cost=fit.cost,
            context_tokens=sum(max(each.num_computed_tokens, each.num_tokens) for each in decodes),
            chunk_tokens=budget.chunk_tokens,
            next_chunk_tokens=budget.next_chunk_tokens(running, len(scheduler.waiting.lane)),
            handover_s=sends.handovers.base_s,
            handover_token_s=sends.handovers.token_s,
            kv_bytes_sent=sends.sent_bytes,
            kv_bytes_received=receives.loaded_bytes,
            kv_loads_failed=receives.loads_failed,
            kv_bytes_kept=sends.kept_bytes,
            kv_gone=receives.num_gone,
            fetched_tokens=receives.fetched_tokens,
            fetches_failed=receives.fetches_failed,
            **self.pool.numbers(),
            continued=scheduler.continuations.num_continued,
            recomputed=sum(scheduler.continuations.refused.values()),
            dropped_messages=self.agent.dropped_messages,
            preemptions=scheduler.preemptions,
            flips=self.agent.num_flips,
            cpu_s=self._cpu_s(),
            threads=threading.active_count(),
            **self.predictions.numbers(),
            length_coverage=store.lengths.coverage,
            usual_tokens=store.lengths.usual_tokens(),
            leftovers=self._lasting_leaks(time.monotonic()),
        )

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _queued(self, requests: list[Request]) -> dict[str, Any]:
        lane, arriving = self.scheduler.waiting.lane, self.receives.arriving_tokens
        tokens, context = lane.unfinished_tokens, lane.unfinished_context
        for each in requests:
            if each.request_id not in lane:
                known_tokens = max(each.num_computed_tokens, arriving(each.request_id))
                missing_tokens = max(0, each.num_prompt_tokens - known_tokens)
                tokens += missing_tokens
                context += context_sum(missing_tokens, each.num_prompt_tokens)
        return {"queued_prefill_tokens": tokens, "queued_context": context}

    def _end_without_parent(self) -> None:
        """End this process in order if `vllm serve` was killed, which started it: no request can
        come any more, and the router would go on sending them."""
        if self._parent_pid and self._parent_pid != os.getppid():
            self._parent_pid = 0
            logger.error("The process that started this engine is gone, so it ends.")
            os.kill(os.getpid(), signal.SIGTERM)

    def _used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block

    def unfinished(self, role: Role) -> str:
        """Return the work of a role that is left, in words; empty when there is none."""
        requests = sum(not each.is_finished() for each in list(self.scheduler.requests.values()))
        counts = {
            Work.REQUESTS: requests,
            Work.HAND_OVERS: len(self.sends) + len(self.moves),
            Work.TRANSFERS: self.receiver.stats().slots,
        }
        left = [work for work in counts if counts[work] and work in DRAINS[role]]
        return ", ".join(f"{counts[work]} {work}" for work in left)

    # -- leaks ------------------------------------------------------------------

    def leaks(self) -> dict[str, int]:
        """Return what is held although no request is left; nothing while there is one. KV under
        way keeps blocks or a slot: both end with their transfer and are no leaks."""
        scheduler = self.scheduler
        requests = list(scheduler.requests.values())
        if not all(each.is_finished() for each in requests):
            return {}
        finished = len(requests)
        num_receives = len(self.receives)
        num_loading = sum(not self.receives.knows(each) for each in list(self.pool.loading))
        used = len(self.sends) + len(self.moves) + num_receives + num_loading  # what uses blocks
        arena, waiting = self.receiver.stats(), scheduler.waiting
        own_slots = arena.slots - arena.filling - arena.unclaimed - arena.quarantined
        found = {
            "finished requests whose blocks nothing uses": finished - used,
            "transfers without a request": used - finished,
            "KV blocks": 0 if finished else self._used_blocks(),
            "places of the pool": 0 if self.pool.loading else self.pool.index.num_pinned,
            "arena slots": own_slots - num_receives,
            "outputs that are to go on here": len(self.moves.arrivals),
            "continued requests": len(scheduler.continuations.entries),
            "predictions": len(self.predictions.entries),
            "queued prompts": len(waiting) + len(waiting.lane.started),
            "prompts without a decode instance": len(self.dispatcher.policy.held),
            "requests known to admission": max(
                len(scheduler.gate.ends), len(scheduler.gate.places)
            ),
            _UNCLAIMED: arena.unclaimed,
            _QUARANTINED: arena.quarantined_bytes,
        }
        return {what: number for what, number in found.items() if number > 0}

    def _lasting_leaks(self, now: float) -> tuple[str, ...]:
        """Return the leaks that last, those of before while requests are here; log changes."""
        if not self.scheduler.requests:
            self.receives.tidy()
        found, since = self.leaks(), self._leaking_since
        self._leaking_since = {what: since.get(what, now) for what in found}
        lasting = tuple(
            f"{number} {what}"
            for what, number in found.items()
            if now - self._leaking_since[what]
            >= (SHARED_LEAK_PATIENCE_S if what in SHARED_LEAKS else LEAK_PATIENCE_S)
        )
        is_known = bool(lasting) or not (found or self.scheduler.requests)
        if lasting == self._leaks or not is_known:
            return self._leaks
        self._leaks = lasting
        if lasting:
            logger.warning(
                "leak: no request is left, but this instance still holds %s. It continues to "
                "serve; restart it if the numbers grow, and report the log.",
                ", ".join(lasting),
            )
        else:
            logger.info("leak: all of it is released now")
        return lasting
