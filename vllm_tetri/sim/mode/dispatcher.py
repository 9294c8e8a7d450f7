"""A prefill instance's choice of who decodes, as `engine.dispatcher` makes it."""

from __future__ import annotations

from random import Random

from vllm_tetri.policy.dispatch import Dispatch, DispatchPolicy, choose_decode
from vllm_tetri.policy.lengths import HEAVY_TOKENS, End, Lengths
from vllm_tetri.policy.peers import Need, OwnDispatches, Peers
from vllm_tetri.sim.views import Picture
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS, Ask
from vllm_tetri.types import ClusterView, InstanceInfo, Prediction


class Expected:
    """How long answers will be, as instances have reported until now."""

    def __init__(self) -> None:
        self._lengths = Lengths(GRANULARITY_TOKENS, NUM_BUCKETS)  # as before any answer
        self._bucket_tokens: list[float] = []

    def look(self, picture: Picture) -> None:
        """There is a newer picture."""
        self._bucket_tokens = picture.bucket_tokens(NUM_BUCKETS)

    def tokens(self, predicted: Prediction | None) -> int:
        """Of an answer."""
        known = self._bucket_tokens
        if not known:
            return self._lengths.total_tokens(predicted, 0, End.EXPECTED)
        return round(known[-1] if predicted is None else known[predicted.bucket])


class Dispatcher:
    """Of one prefill instance."""

    def __init__(
        self, me: InstanceInfo, policy: DispatchPolicy, period_s: float, rng: Random
    ) -> None:
        self._me = me
        self._policy = policy
        self._period_s = period_s
        self._rng = rng
        self._seen: Picture | None = None
        self._peers = Peers(ClusterView(), me, 0.0)
        self._own = OwnDispatches()
        self._expected = Expected()
        self._held_s: dict[int, float] = {}

    def choose(self, picture: Picture, ask: Ask, now: float, *, may_wait: bool) -> Dispatch | None:
        """Where a request's KV goes; None to be asked again after the next chunk."""
        self._look(picture)
        need = self.need(ask)
        dispatch = choose_decode(
            self._peers, need=need, own=self._own, policy=self._policy, rng=self._rng
        )
        if dispatch is None:
            return None
        if not dispatch.has_room and may_wait:
            since_s = self._held_s.setdefault(ask.id, now)
            if now - since_s < self._period_s:
                return None
        self._held_s.pop(ask.id, None)
        self._own.add(dispatch.instance, need, now)
        return dispatch

    def need(self, ask: Ask) -> Need:
        """What a request will take where it is decoded."""
        answer_tokens, block_size = self._expected.tokens(ask.predicted), self._me.block_size
        return Need(
            num_tokens=ask.prompt_tokens,
            num_bytes=-(-ask.prompt_tokens // block_size) * block_size,
            total_tokens=ask.prompt_tokens + answer_tokens,
            is_heavy=answer_tokens > HEAVY_TOKENS,
        )

    def _look(self, picture: Picture) -> None:
        if picture is self._seen:
            return
        self._seen = picture
        self._peers = picture.peers(self._me)
        self._own.drop_reported(self._peers)
        self._expected.look(picture)
