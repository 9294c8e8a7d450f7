"""From a prompt that is being computed here to the instance that will decode it.

Owner: the engine thread. `policy.dispatch` decides; this gathers what it needs to know:
the newest view, what was sent since, and how long the answer is expected to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from random import Random

from vllm_tetri.config import TetriConfig
from vllm_tetri.control.views import Picture
from vllm_tetri.engine.compat import Request
from vllm_tetri.policy.adaptive import Candidates, choose_answer
from vllm_tetri.policy.dispatch import Dispatch, choose_decode, roomy
from vllm_tetri.policy.lengths import HEAVY_TOKENS, End, Lengths, reported_tokens
from vllm_tetri.policy.peers import Need, OwnDispatches, Peers
from vllm_tetri.policy.reach import Reach
from vllm_tetri.policy.site import Ask, Site
from vllm_tetri.policy.sites import Sites
from vllm_tetri.types import ClusterView, InstanceId, InstanceInfo, Prediction, Role

# Orders instances where there are many; the request itself decides among the first.
_USUAL = Ask(512, 128)


class Dispatcher:
    """Chooses decode instances.

    Args:
        look: The newest picture of the cluster; the same object until there is a newer one.
        me: This instance.
        lengths: What answers turned out to be here; used until decode instances report.
        predict: The prediction of a request that must be there by now, if any.
    """

    def __init__(
        self,
        *,
        config: TetriConfig,
        look: Callable[[], Picture],
        me: InstanceInfo,
        lengths: Lengths,
        predict: Callable[[Request], Prediction | None],
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._look = look
        self._me = me
        self._lengths = lengths
        self._predict = predict
        self._rng = rng
        self._clock = clock
        self._seen: Picture | None = None
        self._peers = Peers(ClusterView(), me, 0.0)
        self._bucket_tokens: list[float] = []
        self._own = OwnDispatches()
        self._reach = Reach()
        self._sites = Sites()
        self._priced_view: Picture | None = None
        self._candidates = Candidates([], _USUAL, rng)
        self._held: dict[str, float] = {}  # since when, by request

    def act_as(self, me: InstanceInfo) -> None:
        """This instance has another role now."""
        self._me, self._seen = me, None

    def choose(
        self, request: Request, num_bytes: int, refused: frozenset[InstanceId], may_wait: bool
    ) -> Dispatch | None:
        """Where a request's KV goes, or None.

        Args:
            num_bytes: Of its KV in the receive arena.
            refused: Instances that already said no to it.
            may_wait: There will be another call for it. If nobody has room, that is what
                the first ones come to, for one report period (paper section 3.3.4 leaves
                it open).
        """
        now = self._clock()
        self._take_look()
        need = self.need(request, num_bytes)
        unreachable = self._unreachable(now)
        dispatch = self._decode(need, refused | unreachable)
        if dispatch is None and unreachable:
            dispatch = self._decode(need, refused)
        if dispatch is None:
            return None
        if not dispatch.has_room and may_wait:
            since = self._held.setdefault(request.request_id, now)
            if now - since < self._config.report_period_s:
                return None
        self._own.add(dispatch.instance, need, now)
        self._reach.tries(dispatch.kv_endpoint, now)
        return dispatch

    def _decode(self, need: Need, refused: frozenset[InstanceId]) -> Dispatch | None:
        return choose_decode(
            self._peers,
            need=need,
            refused=refused,
            own=self._own,
            policy=self._config.dispatch_policy,
            rng=self._rng,
        )

    def note_sent(self, endpoint: str, *, was_reached: bool) -> None:
        """What became of a transfer: done, or nobody answered."""
        if was_reached:
            self._reach.succeeded(endpoint)
        else:
            self._reach.failed(endpoint, self._clock())

    def _unreachable(self, now: float) -> frozenset[InstanceId]:
        avoided = self._reach.avoided(now)
        if not avoided:
            return frozenset()
        able = self._peers.able.items()
        return frozenset(name for name, peer in able if peer.kv_endpoint in avoided)

    def choose_anywhere(
        self, request: Request, num_bytes: int, refused: frozenset[InstanceId], may_wait: bool
    ) -> Dispatch | None:
        """The same for a request that any instance may decode, this one included: where
        least is waited."""
        now = self._clock()
        self._take_look()
        candidates = self._priced()
        need = self.need(request, num_bytes)
        expected_tokens = self._expected_tokens(self._predict(request))
        ask = Ask(need.num_tokens, max(1, min(expected_tokens, self._most_tokens(request))))
        without = refused | self._unreachable(now)
        able = [site for site in candidates.answers(without) if self._has_room(site, need)]
        if not able:
            others = candidates.all_answers(without)
            able = list(islice((site for site in others if self._has_room(site, need)), 1))
        here = next((site for site in able if site.id == self._me.id), None)
        if here is None and self._me.role is not Role.PREFILL and self._me.id not in refused:
            here = self._sites.by_id.get(self._me.id)
            here = here if here is not None and self._has_room(here, need) else None
        chosen = choose_answer(able, ask, at=here)
        if chosen is None:
            return self._without_room(request, num_bytes, refused, may_wait)
        instance, reason = chosen
        self._own.add(instance, need, now)
        self._sites.send(None, instance, ask, now)
        endpoint = self._peers.able[instance].kv_endpoint
        self._reach.tries(endpoint, now)
        return Dispatch(instance, endpoint, f"adaptive: {reason}")

    def _without_room(
        self, request: Request, num_bytes: int, refused: frozenset[InstanceId], may_wait: bool
    ) -> Dispatch | None:
        """Nobody has room, or nobody is known. In the end the prompt can stay where it is:
        this instance knows itself."""
        me = self._me
        if may_wait or me.id in refused or not me.kv_endpoint:
            return self.choose(request, num_bytes, refused, may_wait)
        return Dispatch(me.id, me.kv_endpoint, "adaptive: nobody has room, so it stays", False)

    def _priced(self) -> Candidates:
        """Sites of the newest view; only made where requests are priced."""
        if self._priced_view is not self._seen:
            picture = self._priced_view = self._seen
            assert picture is not None, "a look was taken"
            self._sites.renew(picture.view, picture.at_s)
            known = (self._sites.by_id.get(name) for name in self._peers.able)
            able = [site for site in known if site is not None]
            self._candidates = Candidates(able, _USUAL, self._rng, is_alone=False)
        return self._candidates

    def _has_room(self, site: Site, need: Need) -> bool:
        peer = self._peers.able.get(site.id)
        return peer is not None and roomy(peer, self._peers, need, self._own) is not None

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._held.pop(request_id, None)

    @property
    def num_held(self) -> int:
        """Requests that wait for somebody to have room (any thread)."""
        return len(self._held)

    def need(self, request: Request, num_bytes: int) -> Need:
        """What a request will take where it is decoded."""
        prompt_tokens = request.num_prompt_tokens
        prediction = self._predict(request)
        expected_tokens = self._expected_tokens(prediction)
        answer_tokens = expected_tokens
        end = self._config.reserve_end
        if prediction is not None and end is not End.EXPECTED:
            answer_tokens = self._lengths.total_tokens(prediction, 0, end)
        most_tokens = self._most_tokens(request)
        return Need(
            num_tokens=prompt_tokens,
            num_bytes=num_bytes,
            total_tokens=prompt_tokens + min(answer_tokens, most_tokens),
            is_heavy=min(expected_tokens, most_tokens) > HEAVY_TOKENS,
        )

    def _most_tokens(self, request: Request) -> int:
        """What the client and the window allow; the prefill leg's own limit is 1."""
        left_tokens = max(0, self._me.max_model_len - request.num_prompt_tokens)
        sampling = request.sampling_params
        if sampling is None or sampling.max_tokens is None:
            return left_tokens
        return min(left_tokens, sampling.max_tokens)

    def _expected_tokens(self, prediction: Prediction | None) -> int:
        """As decode instances have seen it; as this one has, as long as they have not."""
        known = self._bucket_tokens
        if prediction is None:
            return round(known[-1]) if known else self._lengths.total_tokens(None, 0, End.EXPECTED)
        if prediction.num_buckets == len(known) - 1:
            return round(known[prediction.bucket])
        return self._lengths.total_tokens(prediction, 0, End.EXPECTED)

    def _take_look(self) -> None:
        picture = self._look()
        if picture is self._seen:
            return
        self._seen = picture
        self._peers = Peers(picture.view, self._me, picture.at_s)
        self._own.drop_reported(self._peers)
        self._bucket_tokens = reported_tokens(picture.view, self._lengths.num_buckets)
