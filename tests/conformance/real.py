"""Real schedulers, connectors and the router's choice, played in virtual time.

Everything decides as it does in a cluster, and KV really travels. Only what a step takes and
when things come is set: the former by `base_s` of an instance, the latter by the script.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conformance.engines import StockEngine, TetriEngine
from tests.eventually import eventually
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine import scheduler as engine_scheduler
from vllm_tetri.handover import DecodeParams, Prefilled, PrefillParams, from_params, to_params
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.policy.route import Split, Whole
from vllm_tetri.router import placement
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import COMPLETIONS, ApiRequest
from vllm_tetri.router.table import RequestTable, Shares
from vllm_tetri.sim.config import ClusterConfig, InstanceConfig
from vllm_tetri.sim.log import Decision, DecodeChosen, Log, Routed, Step
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.transport.native import Receiver, SlotState
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
    RequestId,
    TransferId,
)

At = Callable[[float, Callable[[float], None]], None]
"""Calls at a time, with it."""

_ARRIVES_S = 20.0
_EMPTY_STEPS = 3  # an engine makes up for one that came to nothing


class Clock:
    """What the schedulers take for `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Played:
    """One engine: it is idle or in a step."""

    def __init__(
        self,
        place: InstanceConfig,
        engine: Any,
        at: At,
        log: Log,
        stepped: Callable[[Played, float], None],
    ) -> None:
        self.place, self.engine = place, engine
        self._at, self._log, self._stepped = at, log, stepped
        self._incoming: deque[Callable[[], None]] = deque()
        self._step: Any = None
        self._num_steps = 0
        self._lost: list[int] = []  # since the last step
        self._away: set[str] = set()  # lost their blocks and wait
        self._again: set[str] = set()  # compute what they lost
        preempt = engine.scheduler._preempt_request

        def tell(request: Any, *args: Any, **options: Any) -> None:
            self._lost.append(int(request.request_id))
            self._away.add(request.request_id)
            preempt(request, *args, **options)

        engine.scheduler._preempt_request = tell

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def submit(self, now: float, enter: Callable[[], None]) -> None:
        """A request comes; the engine takes it between two steps."""
        self._incoming.append(enter)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Begin a step if there is something to compute."""
        if self._step is not None:
            return
        while self._incoming:
            self._incoming.popleft()()
        for _ in range(_EMPTY_STEPS):
            if not self.engine.scheduler.has_requests() and not self.engine.is_sending:
                return
            output, results = self.engine.begin()
            if output.total_num_scheduled_tokens:
                self._tell(output)
                self._step = (output, results)
                self._at(now + self.place.engine.cost.step_s(0, 0, 0, 0), self._end)
                return
            self.engine.update(output, results)

    def _end(self, now: float) -> None:
        step, self._step = self._step, None
        self.engine.update(*step)
        self._stepped(self, now)
        self.wake(now)

    def _tell(self, output: Any) -> None:
        self._num_steps += 1
        prompts, decodes = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            if self._is_decode(name, tokens):
                decodes.append(int(name))
            else:
                prompts.append((int(name), tokens))
        lost, self._lost = tuple(self._lost), []
        self._log(Step(self.place.id, self._num_steps, tuple(prompts), tuple(decodes), lost))

    def _is_decode(self, name: str, tokens: int) -> bool:
        """Whether only its next token is missing, and not what it had once."""
        request = self.engine.scheduler.requests[name]
        was_away = name in self._away
        self._away.discard(name)
        is_last = request.num_computed_tokens >= request.num_tokens
        if name in self._again:
            if is_last:
                self._again.discard(name)
            return False
        is_decode = tokens == 1 and is_last and request.num_output_tokens > 0
        if was_away and not is_decode and not is_last:
            self._again.add(name)
        return is_decode


class Play:
    """A cluster of them, one script long."""

    def __init__(
        self,
        setting: ClusterConfig,
        specs: Sequence[RequestSpec],
        folder: Path,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.decisions: list[Decision] = []
        self.loads: list[dict[InstanceId, InstanceLoad]] = []  # as they were reported
        self._setting, self._asks = setting, specs
        self._by_name = {str(spec.id): spec for spec in specs}
        self._folder = folder
        self._loop, self._clock = Loop(), Clock()
        for module in (engine_scheduler, placement):
            patch.setattr(module, "time", self._clock)
        patch.setattr(engine_scheduler, "ARRIVAL_WAIT_S", 0.0)
        patch.setenv("TETRI_CACHE", str(folder / "cache"))
        self._played = {place.id: self._play(place) for place in setting.instances}
        self._view, self._view_s = ClusterView(), 0.0
        self._opened: set[TransferId] = set()  # transfers of which their receivers know
        shares = Shares(RequestTable(), limit=1 << 20, limit_each=1 << 20, num_clients=1)
        self._placer = Placer(
            self._seen,
            shares,
            objective=NO_OBJECTIVE,
            refuses_late=False,
            max_queue_delay_s=0.0,
        )

    def _play(self, place: InstanceConfig) -> Played:
        kind = TetriEngine if place.engine.kind.can_hand_over else StockEngine
        engine: Any = kind(self._folder, self._setting, place, self._by_name)
        if isinstance(engine, TetriEngine):
            dispatcher = engine.endpoint.dispatcher
            dispatcher._policy._rng = Random(f"{self._setting.seed} {place.id}")
            dispatcher._clock = self._clock.monotonic
            dispatcher.announce = self._announced
            engine.endpoint.sends._send_first_tokens = _nothing
        return Played(place, engine, self._at, self.decisions.append, self._stepped)

    def run(self) -> None:
        """From the first arrival to the last token."""
        try:
            self._at(0.0, self._report)
            for spec in self._asks:
                self._at(spec.arrival_s, partial(self._arrive, spec))
            self._loop.run()
            for each in self._played.values():
                assert not each.engine.scheduler.requests, f"{each.place.id} keeps requests"
        finally:
            for each in self._played.values():
                each.engine.close()

    def _at(self, time_s: float, call: Callable[[float], None]) -> None:
        def on_time(now: float) -> None:
            self._clock.now = now
            call(now)

        self._loop.at(time_s, on_time)

    # -- the router ------------------------------------------------------------------

    def _seen(self) -> ClusterView:
        age_s = self._clock.now - self._view_s
        views = tuple(
            InstanceView(each.info, each.state, each.load, age_s, each.seq)
            for each in self._view.instances
        )
        return ClusterView("test", self._view.seq, views)

    def _arrive(self, spec: RequestSpec, now: float) -> None:
        name, tokens = str(spec.id), prompt_of(spec)
        if isinstance(next(iter(self._played.values())).engine, StockEngine):
            (only,) = self._played.values()
            self.decisions.append(Routed(spec.id, only.place.id, False))
            only.submit(now, partial(only.engine.enter, name, tokens))
            return
        (model,) = {each.info.models[0] for each in self._view.instances}
        request = ApiRequest(
            path=COMPLETIONS,
            body={},
            raw=b"",
            model=model,
            is_splittable=True,
            approx_tokens=spec.prompt_tokens,
            headers={},
            request_id=name,
        )
        none: frozenset[InstanceId] = frozenset()
        route = self._placer.place(
            request, may_split=True, excluded=none, at_limit=none, is_new=True
        )
        assert isinstance(route, Split | Whole)
        first = route.prefill if isinstance(route, Split) else route.instance
        self.decisions.append(Routed(spec.id, first, isinstance(route, Split)))
        kv_params = PrefillParams(TransferId(f"t{name}"), RequestId(name))
        params = to_params(kv_params) if isinstance(route, Split) else None
        played = self._played[first]
        played.submit(now, partial(played.engine.enter, name, tokens, params))

    def _report(self, now: float) -> None:
        engines = {name: each.engine for name, each in self._played.items()}
        if any(isinstance(engine, StockEngine) for engine in engines.values()):
            return
        self._settle()
        loads = {name: engine.endpoint.read_load() for name, engine in engines.items()}
        self.loads.append(loads)
        views = tuple(
            InstanceView(engine.info, InstanceState.READY, loads[name], 0.0, len(self.loads))
            for name, engine in engines.items()
        )
        self._view, self._view_s = ClusterView("test", len(self.loads), views), now
        period_s, snapshot = self._setting.report_period_s, Snapshot(self._view, now)
        if not now:
            self._broadcast(snapshot, now)
        else:
            self._at(now + period_s / 2, partial(self._broadcast, snapshot))
        if not now or len(self._loop) > 1:  # the broadcast is one of them
            self._at(now + period_s, self._report)

    def _settle(self) -> None:
        """What a step opened or called off is so at its receiver, too: that takes no virtual
        time and some real time, and arenas look emptier, or fuller, until then."""
        for played in self._played.values():
            for entry in played.engine.endpoint.sends._sends.values():
                if entry.is_open and not entry.freeing and entry.name not in self._opened:
                    eventually(partial(self._receiver(entry.dispatch.instance).find, entry.name))
                    self._opened.add(entry.name)
        for name in self._played:
            eventually(partial(self._is_settled, name))

    def _is_settled(self, name: InstanceId) -> bool:
        return not self._receiver(name).stats().quarantined

    def _receiver(self, name: InstanceId) -> Receiver:
        receiver: Receiver = self._played[name].engine.endpoint.receiver
        return receiver

    def _broadcast(self, snapshot: Snapshot, now: float) -> None:
        for each in self._played.values():
            each.engine.endpoint.agent.snapshot = lambda: snapshot

    # -- between instances --------------------------------------------------------------

    def _announced(
        self, request: Any, kv_params: PrefillParams, dispatch: Any, opening: Any = None
    ) -> None:
        if opening is None:
            self.decisions.append(DecodeChosen(int(kv_params.request), dispatch.instance))

    def _stepped(self, played: Played, now: float) -> None:
        """Hand over what a step has finished: the decode request comes at once, the KV and the
        first token after the time that the script says."""
        if not isinstance(played.engine, TetriEngine):
            return
        finished, played.engine.finished = played.engine.finished, {}
        for name, params in finished.items():
            response = from_params(params)
            if isinstance(response, Prefilled) and response.is_final:
                self._cancel(TransferId(f"t{name}"))
            elif isinstance(response, Prefilled):
                decode, tokens = self._played[response.decode], prompt_of(self._by_name[name])
                kv_params = DecodeParams(
                    response.transfer, response.digest, predicted=response.predicted, is_early=True
                )
                decode.submit(now, partial(decode.engine.enter, name, tokens, to_params(kv_params)))
                hand_over = partial(self._hand_over, played, name, response)
                self._at(now + self._setting.handover_base_s, hand_over)

    def _cancel(self, transfer: TransferId) -> None:
        """Cancel the KV of a request at instances, as the router does."""
        for each in self._played.values():
            each.engine.endpoint.cancel(transfer)

    def _hand_over(self, prefill: Played, name: str, response: Prefilled, now: float) -> None:
        decode = self._played[response.decode]
        receiver = self._receiver(response.decode)
        deadline = time.monotonic() + _ARRIVES_S
        while (slot := receiver.find(response.transfer)) is None or slot.state is SlotState.FILLING:
            assert time.monotonic() < deadline, f"KV of {name} does not arrive"
            time.sleep(0.0005)
        self._opened.add(response.transfer)
        while prefill.is_idle and name in prefill.engine.endpoint.sends:
            assert time.monotonic() < deadline, f"blocks of {name} are not freed"
            prefill.wake(now)
        decode.engine.endpoint.receives._outputs[response.transfer] = response.prior_output
        decode.wake(now)


def _nothing(*args: Any) -> None:
    """The script says when the first token comes."""


def prompt_of(spec: RequestSpec) -> list[int]:
    """Its tokens."""
    return Random(spec.id).choices(range(10, 120), k=spec.prompt_tokens)
