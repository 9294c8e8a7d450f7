"""Where requests go in the modes that price places: adaptive, and whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from random import Random
from statistics import fmean

from vllm_tetri.policy.adaptive import Candidates, Objective, Place, choose_place
from vllm_tetri.policy.promise import Late, expected_late
from vllm_tetri.policy.route import Full, Route, Split, Whole
from vllm_tetri.policy.site import Ask
from vllm_tetri.policy.sites import Sites
from vllm_tetri.router.call import Call
from vllm_tetri.types import ClusterView, InstanceId, Mode

# Prompt tokens that may wait at an instance; vLLM's own bound exists on prefill instances
# only (`--max-num-queued-tokens`).
_MOST_QUEUED_TOKENS = 131_072
# A picture is looked at for so long: instances report every 100 ms. Renewing it takes 4 µs an
# instance, so that with many it is looked at for longer.
_FRESH_S = 0.02
_FRESH_EACH_S = 1e-4
_UNKNOWN_ANSWER_TOKENS = 200.0  # before any instance has seen an answer end
_USUAL_PROMPT_TOKENS = 512
_MOST_CHOICES = 16

_log = logging.getLogger(__name__)


class Placing:
    """Prices places for requests. Owner: the event loop.

    Args:
        view: The newest picture of the cluster.
        objective: What clients were promised.
        refuses_late: Whether requests that would miss it are refused.

    Attributes:
        mode: Whole, split, or decided for each; set by `use`.
        swamped: Instances where too many prompt tokens wait.
    """

    def __init__(
        self,
        view: Callable[[], ClusterView],
        *,
        objective: Objective,
        refuses_late: bool,
        rng: Random,
    ) -> None:
        self.mode = Mode.SPLIT
        self.objective = objective
        self.refuses_late = refuses_late
        self._view = view
        self._rng = rng
        self._sites = Sites()
        self._answer_tokens = _UNKNOWN_ANSWER_TOKENS
        self._candidates: dict[str, Candidates] = {}
        self.swamped: frozenset[InstanceId] = frozenset()

    def use(self, mode: Mode) -> None:
        """Place requests in another mode from now on."""
        self.mode = mode
        self._sites.at_s = float("-inf")  # look again

    def route(
        self,
        call: Call,
        *,
        is_splittable: bool,
        excluded: Collection[InstanceId],
        full: Collection[InstanceId],
        now: float,
    ) -> Route | Full | None:
        """Where a request goes, by what it would cost; as `policy.route.choose_route`.

        Args:
            excluded: Instances that already failed it.
            full: Instances that have no room for it.
        """
        taken = {*excluded, *full, *self.swamped}
        place = self._choose(call, taken, is_splittable, now)
        if place is None:
            names = [site.id for site in self._sites.by_model.get(call.model, ())]
            refused = tuple(name for name in names if name not in excluded)
            return Full(refused, "instances") if refused else None
        after_s = place.ttft_s if place.is_split else 0.0
        self._sites.send(place.prompt, place.answer, self._ask(call), now, after_s=after_s)
        _log.debug("request %s: %s", call.request_id, place.reason)
        if place.is_split:
            return Split(place.prompt, place.reason, anywhere=True)
        return Whole(place.prompt, place.reason)

    def sent(self, instance: InstanceId, call: Call, now: float) -> None:
        """A prompt goes to an instance that was chosen otherwise."""
        if self.refuses_late:  # else nobody asks before the next report
            self._sites.send(instance, None, self._ask(call), now)

    def late(self, call: Call, now: float) -> Late | None:
        """Why a request that has just come should be refused."""
        if not self.refuses_late:
            return None
        place = self._choose(call, (), call.is_splittable, now)
        answer_tokens = self._ask(call).answer_tokens
        return None if place is None else expected_late(place, self.objective, answer_tokens)

    def _choose(
        self, call: Call, taken: Collection[InstanceId], is_splittable: bool, now: float
    ) -> Place | None:
        self._look(now)
        candidates = self._candidates.get(call.model)
        if candidates is None:
            self._look(now, is_fresh=True)  # its first instance has just come
            candidates = self._candidates.get(call.model)
        if candidates is None:
            return None
        return choose_place(
            candidates,
            self._ask(call),
            may_split=is_splittable and self.mode is not Mode.WHOLE,
            prefers_split=self.mode is Mode.SPLIT,
            objective=self.objective,
            taken=taken,
        )

    def _ask(self, call: Call) -> Ask:
        tokens, sites = self._answer_tokens, self._sites.by_model.get(call.model)
        if call.most_tokens is not None:
            tokens = call.most_tokens if call.is_endless else min(tokens, call.most_tokens)
        if sites:
            tokens = min(tokens, sites[0].window_tokens)
        prompt_tokens = max(1, call.approx_tokens)  # a body may be empty, a prompt is not
        return Ask(prompt_tokens, tokens * min(call.num_choices, _MOST_CHOICES))

    def _look(self, now: float, *, is_fresh: bool = False) -> None:
        fresh_s = max(_FRESH_S, _FRESH_EACH_S * len(self._sites.by_id))
        if now - self._sites.at_s < fresh_s and not is_fresh:
            return
        view = self._view()
        self._sites.renew(view, now)
        seen = [each.load.bucket_tokens[-1] for each in view.instances if each.load.bucket_tokens]
        self._answer_tokens = fmean(seen) if seen else _UNKNOWN_ANSWER_TOKENS
        usual = Ask(_USUAL_PROMPT_TOKENS, self._answer_tokens)
        self._candidates = {}
        for model, sites in self._sites.by_model.items():
            self._candidates[model] = Candidates(
                sites,
                usual,
                self._rng,
                spares_prefill=self.mode is not Mode.WHOLE,
                spares_decode=self.mode is Mode.SPLIT,
            )
        self.swamped = frozenset(
            site.id
            for site in self._sites.by_id.values()
            if site.queued_tokens > _MOST_QUEUED_TOKENS
        )
