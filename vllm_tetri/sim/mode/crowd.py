"""What many instances make of the same pictures, without each looking at all of it.

In adaptive mode every instance prices all others. What they know of them differs only by what
each sent somewhere since the last reports, a handful of requests. So a picture is read once
for all, and each one has its own version of those few sites. Unlike real instances, which look
at a picture when they dispatch, all of them thereby know what part of its time each instance
spent with prompts between any two pictures.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from random import Random

from vllm_tetri.policy.adaptive import some_of
from vllm_tetri.policy.site import Ask, Site
from vllm_tetri.policy.sites import GRACE_S, MAX_SENT, Sites
from vllm_tetri.sim.mode.dispatcher import Expected
from vllm_tetri.sim.views import MODEL, Picture
from vllm_tetri.types import InstanceId, Role


class Crowd:
    """What all know. Some of them decode.

    Args:
        rng: Source of probes.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.expected = Expected()
        self.sites: dict[InstanceId, Site] = {}  # that may decode
        self.ordered: list[Site] = []
        self._known = Sites()
        self._seen: Picture | None = None

    def take(self, picture: Picture) -> None:
        """Look at the newest picture, if it is new."""
        if picture is self._seen:
            return
        self._seen = picture
        self._known.renew(picture.view, picture.at_s)
        self.expected.look(picture)
        sites = self._known.by_model.get(MODEL, [])
        self.ordered = [site for site in sites if site.role is not Role.PREFILL]
        self.sites = {site.id: site for site in self.ordered}


class Member:
    """One of them."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._seen: Picture | None = None
        self._sent: deque[tuple[float, InstanceId, Ask]] = deque(maxlen=MAX_SENT)
        self._own: dict[InstanceId, Site] = {}  # by whom it sent something to

    def sites(self, picture: Picture) -> list[Site]:
        """Where an answer may go: those worth looking at."""
        self._crowd.take(picture)
        if picture is not self._seen:
            self._seen = picture
            self._look(picture)
        probes = some_of(self._crowd.ordered, (), self._crowd.rng, is_alone=False)
        return [self._own.get(site.id, site) for site in probes]

    def site(self, instance: InstanceId) -> Site | None:
        """One of them, if it may decode."""
        return self._own.get(instance) or self._crowd.sites.get(instance)

    def send(self, instance: InstanceId, ask: Ask, now: float) -> None:
        """An answer goes there, to one of those."""
        self._sent.append((now, instance, ask))
        self._version(instance).add_answer(ask)

    def _look(self, picture: Picture) -> None:
        """What was sent and is not reported comes on top of what all know."""
        while self._sent and self._sent[0][0] < picture.at_s - GRACE_S:
            self._sent.popleft()
        self._own = {}
        for _, instance, ask in self._sent:
            self._version(instance).add_answer(ask)

    def _version(self, instance: InstanceId) -> Site:
        own = self._own.get(instance)
        if own is None:
            own = self._own[instance] = copy(self._crowd.sites[instance])
        return own
