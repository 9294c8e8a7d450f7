"""From a prompt that is computed here to the instance that will decode it.

Owner: the engine thread. `policy.dispatch` decides; this module gives it the newest snapshot
of the cluster, the time, and what vLLM knows of the request, and announces the choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine.compat import Request, RequestStatus
from vllm_tetri.engine.prediction import Predictions, route_of
from vllm_tetri.handover import PrefillParams
from vllm_tetri.messages import Dispatched, PrefillEnding
from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.cluster import Need
from vllm_tetri.policy.dispatch import DecodeDispatcher, Dispatch
from vllm_tetri.policy.lengths import Lengths
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import InstanceId, InstanceInfo


class Dispatcher:
    """Chooses decode instances for the prompts of `me` and announces them to the routers. `lengths`
    are those of the outputs that were generated here."""

    def __init__(
        self,
        config: TetriConfig,
        me: InstanceInfo,
        lengths: Lengths,
        predictions: Predictions,
        agent: Agent,
        *,
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.predictions = predictions
        self._agent = agent
        self._clock = clock
        self._tables = TableMaker()
        self._observed: Snapshot | None = None
        self.policy = DecodeDispatcher(
            me,
            load_policy("dispatch", config.dispatch_policy),
            lengths=lengths,
            end=config.reserve_end,
            patience_s=config.report_period_s,
            rng=rng,
        )

    def choose(
        self,
        request: Request,
        params: PrefillParams,
        num_bytes: int,
        refused: frozenset[InstanceId],
    ) -> Dispatch | None:
        """Return the decode instance of a prompt; None if no instance can take it, or none
        has capacity and the prompt is not done yet."""
        need, now = self.need(request, num_bytes), self._clock()
        return self.policy.choose(
            request.request_id,
            need,
            refused,
            now,
            may_wait=not request.is_finished(),
            anywhere=params.anywhere,
            adapter=request.lora_request.lora_name if request.lora_request else "",
            cached=params.held,
        )

    def need(self, request: Request, num_bytes: int) -> Need:
        """Return what a request will take where it is decoded, by the newest snapshot."""
        snapshot = self._agent.snapshot()
        if snapshot is not self._observed:
            self._observed = snapshot
            table = self._tables.make(snapshot.view, snapshot.at_s, spares=True)
            self.policy.observe(table)
        prompt_tokens = request.num_prompt_tokens
        max_tokens = max(0, self.policy.me.max_model_len - prompt_tokens)
        sampling = request.sampling_params
        if sampling is not None and sampling.max_tokens is not None:
            max_tokens = min(max_tokens, sampling.max_tokens)
        predicted = self.predictions.get(request.request_id, is_due=True)
        return self.policy.need(
            prompt_tokens, predicted, num_bytes=num_bytes, max_tokens=max_tokens,
            route=route_of(request),
        )  # fmt: skip

    def announce(
        self,
        request: Request,
        params: PrefillParams,
        dispatch: Dispatch,
        ending: PrefillEnding | None = None,
    ) -> None:
        """Tell the routers which instance was chosen, or that its decode request may begin."""
        predicted = self.predictions.get(request.request_id)
        self._agent.publish(
            Dispatched(params.request, params.transfer, dispatch.instance, predicted, ending)
        )

    def is_final(self, request: Request) -> bool:
        """Whether the first token would have ended the output on one instance, too."""
        is_full = request.num_tokens >= self.policy.me.max_model_len
        return is_full or is_short(request) or request.status is RequestStatus.FINISHED_STOPPED


def is_short(request: Request) -> bool:
    """Whether the client wants one token only."""
    return request.sampling_params is not None and request.sampling_params.max_tokens == 1
