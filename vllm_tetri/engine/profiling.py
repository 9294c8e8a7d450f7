"""An engine measures its own steps before it takes any request.

Nothing of the model runner is called: trials are requests of our own that pass
vLLM's scheduler and whatever executor there is, and a step's time is the time
from one step's end to the next one's, which is what a client sees between two
tokens. Context need not be computed: the connector says that it was loaded.

Whatever else runs on the machine only adds, and the API server starts at the
same moment. So an engine that is kept from its core waits for calm, within
reason; time without a core does not count, and of several rounds the best time
of each trial does.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.compat import EngineCoreOutputs, Request, RequestStatus, Scheduler
from vllm_tetri.engine.conditions import conditions_of, is_cpu
from vllm_tetri.engine.fit import fit
from vllm_tetri.engine.own import OwnRequests, is_own, take_own_outputs
from vllm_tetri.engine.profile import Profile, ProfileStore, profile_folder, summary
from vllm_tetri.engine.trials import Room, Rounds, Trial, plan
from vllm_tetri.policy.cost import CurvePoint, StepCost

if TYPE_CHECKING:
    from vllm_tetri.engine.instance import Instance

logger = logging.getLogger(__name__)

# A new round is started until this much time has passed; the first one runs to its end
# unless that takes until the deadline.
_ENOUGH_S = 4.0
_ROUNDS = 4
# A trial that lacked a core for more than this part of its time is repeated after a
# pause, until all pauses together are this long.
_CALM_PART = 0.05
_PAUSE_S = 0.25
_PATIENCE_S = 8.0
DEADLINE_S = 30.0
# Of the calling thread: nanoseconds that it ran, nanoseconds that it waited for a core.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
# GPU kernels compute tiles of this many rows; AMX and the like on CPUs 16.
_TILE_TOKENS, _CPU_TILE_TOKENS = 128, 16
_DEFAULT_CHUNK_TOKENS, _DEFAULT_CPU_CHUNK_TOKENS = 512, 256


def needs_profile(config: TetriConfig) -> bool:
    """Whether anything in the configuration depends on what steps cost, in whatever role
    the instance will have."""
    return config.chunk_size == "auto" or config.tbt_slo_s is not None


class Profiling:
    """Runs the trials of one engine. Owner: the engine thread.

    Attributes:
        is_over: Whether `profile` is valid and nothing of the trials is left.
        profile: What was measured now or remembered from an earlier start.
    """

    profile: Profile

    def __init__(self, scheduler: Scheduler, instance: Instance) -> None:
        config = scheduler.vllm_config
        with_decodes = instance.config.tbt_slo_s is not None
        self._scheduler = scheduler
        self._own = OwnRequests(scheduler)
        self._tile_tokens = _CPU_TILE_TOKENS if is_cpu() else _TILE_TOKENS
        self._room = _room_of(scheduler)
        self._rounds = Rounds(plan(self._room, with_decodes=with_decodes))
        self._store = ProfileStore(
            profile_folder(), conditions_of(config, "steps" if with_decodes else "chunks")
        )
        self._trial: Trial | None = None
        self._requests: list[Request] = []
        self._loaded: dict[str, int] = {}
        self._times: list[float] = []
        self._last_s = 0.0
        self._trial_started = 0.0, 0.0  # by the wall clock, and undisturbed
        self._paused_s = 0.0
        self._started_s = 0.0
        self.is_over = False
        remembered = self._store.load()
        if remembered is not None:
            self.profile, self.is_over = remembered, True
            logger.info("profile from %s: %s", self._store.path, summary(remembered))

    def loaded_tokens(self, request_id: str) -> int | None:
        """Context that a request of a trial counts as loaded; None: it is none of them."""
        return self._loaded.get(request_id)

    # -- steps ------------------------------------------------------------------

    def before_step(self) -> None:
        """Before vLLM schedules: go on with the trial, or start the next one."""
        if self.is_over:
            return
        if self._started_s == 0.0:
            self._begin()
        if self._trial is not None and self._is_running() and not self._is_late():
            return
        again = self._end_trial()
        trial = None if self._is_late() else again or self._next_trial()
        if trial is None:
            self._finish()
        else:
            self._start_trial(trial)

    def after_step(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """After vLLM processed a step: take its time and our requests' outputs."""
        now = undisturbed_s()
        num_own = sum(is_own(each.request_id) for one in outputs.values() for each in one.outputs)
        take_own_outputs(outputs)
        trial = self._trial
        if trial is None or num_own == 0:
            return
        # A step that lacks a request is not what was meant to be measured.
        if num_own == trial.decodes + bool(trial.prefill):
            self._times.append(now - self._last_s)
        self._last_s = now

    # -- trials -----------------------------------------------------------------

    def _begin(self) -> None:
        self._started_s = time.monotonic()
        logger.info(
            "measuring what steps of this model cost on this device; takes about ten seconds, at "
            "most %d, and is remembered in %s",
            DEADLINE_S, self._store.path,
        )  # fmt: skip

    def _next_trial(self) -> Trial | None:
        trial = self._rounds.next()
        measured_s = self._elapsed_s() - self._paused_s
        if trial is None and measured_s < _ENOUGH_S and self._rounds.num_done < _ROUNDS:
            self._rounds.start_over()
            trial = self._rounds.next()
        return trial

    def _start_trial(self, trial: Trial) -> None:
        make = self._own.make
        self._trial, self._times = trial, []
        decodes = [
            (make(trial.decode_context + 1, max_tokens=trial.num_steps), trial.decode_context)
            for _ in range(trial.decodes)
        ]
        prompts = [
            (make(trial.prefill_context + trial.prefill), trial.prefill_context)
            for _ in range(trial.num_steps if trial.prefill else 0)
        ]
        self._requests = [request for request, _ in (*decodes, *prompts)]
        for request, loaded_tokens in (*decodes, *prompts):
            if loaded_tokens:
                # vLLM asks no connector about a request that skips the prefix cache.
                request.skip_reading_prefix_cache = False
                self._loaded[request.request_id] = loaded_tokens
            self._scheduler.add_request(request)
        self._scheduler.max_num_scheduled_tokens = trial.tokens
        self._last_s = undisturbed_s()
        self._trial_started = time.monotonic(), self._last_s

    def _end_trial(self) -> Trial | None:
        """Take the result; the trial itself when it is to be repeated."""
        trial, times = self._trial, self._times
        if trial is None:
            return None
        left = [each.request_id for each in self._requests if self._is_known(each)]
        if left:
            self._scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)
        # In its first step a trial's requests enter the model runner.
        times = times[1:] or times
        self._trial = None
        self._requests = []
        self._loaded = {}
        if self._paused_s < _PATIENCE_S and self._was_disturbed():
            self._paused_s += _PAUSE_S
            time.sleep(_PAUSE_S)
            return trial
        if times:
            self._rounds.record(trial, min(times))
        return None

    def _was_disturbed(self) -> bool:
        began_s, began_undisturbed_s = self._trial_started
        wall_s = time.monotonic() - began_s
        return wall_s - (undisturbed_s() - began_undisturbed_s) > _CALM_PART * wall_s

    def _is_known(self, request: Request) -> bool:
        return request.request_id in self._scheduler.requests

    def _is_running(self) -> bool:
        return any(map(self._is_known, self._requests))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _is_late(self) -> bool:
        return self._elapsed_s() > DEADLINE_S

    # -- the end ----------------------------------------------------------------

    def _finish(self) -> None:
        took_s = self._elapsed_s()
        # Nothing of ours may ever be hit: its KV is not that of its tokens.
        self._scheduler.reset_prefix_cache()
        steps = self._rounds.steps
        if any(not trial.decodes and not trial.prefill_context for trial in steps):
            self.profile = fit(
                steps,
                block_tokens=self._room.block,
                tile_tokens=self._tile_tokens,
                took_s=took_s,
            )
            logger.info("profile after %.1f s: %s", took_s, summary(self.profile))
            self._store.save(self.profile)
        else:
            self.profile = self._default(took_s)
            logger.warning(
                "no step could be measured in %.0f s; a chunk has %d tokens",
                took_s, self.profile.chunk_tokens,
            )  # fmt: skip
        self.is_over = True

    def _default(self, took_s: float) -> Profile:
        """Without a single measured step: the chunk of other models, and one step
        as long as the whole time."""
        usual = _DEFAULT_CPU_CHUNK_TOKENS if is_cpu() else _DEFAULT_CHUNK_TOKENS
        chunk = max(1, min(usual, self._room.step, self._room.window - 1))
        curve = (CurvePoint(chunk, max(took_s, 1.0)),)
        return Profile(curve, (), chunk, self._tile_tokens, StepCost(curve), took_s)


def undisturbed_s() -> float:
    """A clock that stands still while this thread is kept from running (Linux)."""
    try:
        waited_ns = int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        waited_ns = 0
    return time.monotonic() - waited_ns / 1e9


def _room_of(scheduler: Scheduler) -> Room:
    """What trials may take. A chunk is no limit: what is found is remembered for any."""
    config = scheduler.vllm_config
    block = config.cache_config.block_size
    return Room(
        step=config.scheduler_config.max_num_batched_tokens,
        requests=scheduler.max_num_active_reqs,
        window=config.model_config.max_model_len,
        kv=(scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1) * block,
        block=block,
    )
