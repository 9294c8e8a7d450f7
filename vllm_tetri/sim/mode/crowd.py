"""What many instances make of the same pictures, without each looking at all of it.

In adaptive mode every instance prices all others. What they know of them differs only by what
each sent somewhere since the last reports, a handful of requests. So a picture is priced once
for all, and each one has its own version of those few sites. Unlike real instances, which look
at a picture when they dispatch, all of them thereby know what part of its time each instance
spent with prompts between any two pictures.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from copy import copy
from random import Random

from vllm_tetri.policy.adaptive import answer_price_s, some_of
from vllm_tetri.policy.site import Ask, Site
from vllm_tetri.policy.sites import GRACE_S, MAX_SENT, Sites
from vllm_tetri.sim.mode.dispatcher import Expected
from vllm_tetri.sim.views import MODEL, Picture
from vllm_tetri.types import InstanceId, Role

_Priced = tuple[float, int, Site]
"""What an answer costs there, its place among all, and the site."""


class Crowd:
    """What all know. Some of them decode.

    Args:
        rng: Source of probes.
        usual_prompt_tokens: What requests are like.
    """

    def __init__(self, rng: Random, usual_prompt_tokens: int) -> None:
        self.rng = rng
        self.expected = Expected()
        self.usual = Ask(usual_prompt_tokens, 1)
        self.order: list[_Priced] = []
        self.by_id: dict[InstanceId, _Priced] = {}
        self._usual_prompt_tokens = usual_prompt_tokens
        self._sites = Sites()
        self._seen: Picture | None = None

    def take(self, picture: Picture) -> None:
        """Look at the newest picture, if it is new."""
        if picture is self._seen:
            return
        self._seen = picture
        self._sites.renew(picture.view, picture.at_s)
        self.expected.look(picture)
        self.usual = Ask(self._usual_prompt_tokens, self.expected.tokens(None))
        sites = self._sites.by_model.get(MODEL, [])
        self.order = sorted(
            (answer_price_s(site, self.usual), place, site)
            for place, site in enumerate(sites)
            if site.role is not Role.PREFILL
        )
        self.by_id = {priced[2].id: priced for priced in self.order}


class Member:
    """One of them."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._seen: Picture | None = None
        self._sent: deque[tuple[float, InstanceId, Ask]] = deque(maxlen=MAX_SENT)
        self._order: list[_Priced] = []
        self._own: dict[InstanceId, _Priced] = {}  # by whom it sent something to

    def sites(self, picture: Picture) -> list[Site]:
        """Where an answer may go: those worth looking at."""
        self._crowd.take(picture)
        if picture is not self._seen:
            self._seen = picture
            self._look(picture)
        ordered = [priced[2] for priced in self._order]
        return some_of(ordered, (), self._crowd.rng, is_alone=False)

    def site(self, instance: InstanceId) -> Site | None:
        """One of them, if it may decode."""
        shared = self._crowd.by_id.get(instance)
        own = self._own.get(instance, shared)
        return None if own is None else own[2]

    def send(self, instance: InstanceId, ask: Ask, now: float) -> None:
        """An answer goes there, to one of `sites`."""
        self._sent.append((now, instance, ask))
        self._version(instance).add_answer(ask)

    def _look(self, picture: Picture) -> None:
        """Order sites by what all know, and by what was sent and is not reported."""
        while self._sent and self._sent[0][0] < picture.at_s - GRACE_S:
            self._sent.popleft()
        self._order, self._own = self._crowd.order, {}
        for _, instance, ask in self._sent:
            self._version(instance).add_answer(ask)
        for _, place, site in self._own.values():
            del self._order[self._place(site.id)]
            insort(self._order, (answer_price_s(site, self._crowd.usual), place, site))

    def _version(self, instance: InstanceId) -> Site:
        """Its own version of a site, in the place of the one that all share."""
        own = self._own.get(instance)
        if own is None:
            price_s, place, site = self._crowd.by_id[instance]
            if not self._own:
                self._order = self._order.copy()
            own = self._own[instance] = (price_s, place, copy(site))
            self._order[self._place(instance)] = own
        return own[2]

    def _place(self, instance: InstanceId) -> int:
        """Of a site whose price is still that of all."""
        return bisect_left(self._order, self._crowd.by_id[instance][:2], key=_price_and_place)


def _price_and_place(priced: _Priced) -> tuple[float, int]:
    return priced[:2]
