"""Splitwise: a pool of machines for prompts, one for tokens, and a mixed one between them.

Both machines are chosen when a request arrives, each the one of its pool with the shortest
queue. If either queue is too long, a machine of the mixed pool does the whole request, or one
of the other pool moves there for it. It goes back when none of those is left on it. So KV
travels from the prompt pool to the token pool only, and nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_tetri.policy.route import Route
from vllm_tetri.policy.site import Site
from vllm_tetri.sim.mode.paired import PairedMode
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import Picture
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId, Role

# More full batches of prompts than these are too long a queue. The paper names no number.
_MOST_BATCHES = 2


class SplitwiseMode(PairedMode):
    """What Splitwise calls the cluster-level scheduler.

    Attributes:
        mixed: Machines of the mixed pool, and how many requests each has for that.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.mixed: dict[InstanceId, int] = {}
        self._guests: dict[int, InstanceId] = {}

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        priced = self.look(picture, ask)
        prompt = min(self._pool(Role.PREFILL), key=_prompt_queue)
        answer = min(self._pool(Role.DECODE), key=_answer_queue)
        mixed = None
        if not _is_short(prompt):
            mixed = self._mixed(Role.DECODE, key=_prompt_queue, is_able=_is_short)
        elif not _has_room(answer, ask):
            mixed = self._mixed(
                Role.PREFILL, key=_answer_queue, is_able=lambda site: _has_room(site, ask)
            )
        if mixed is None:
            return self.send(prompt, answer, priced, ask, now)
        self.mixed[mixed.id] = self.mixed.get(mixed.id, 0) + 1
        self._guests[ask.id] = mixed.id
        return self.send(mixed, mixed, priced, ask, now)

    def ended(self, ask: Ask, now: float) -> None:
        super().ended(ask, now)
        machine = self._guests.pop(ask.id, None)
        if machine is None:
            return
        self.mixed[machine] -= 1
        if not self.mixed[machine]:
            del self.mixed[machine]

    def _pool(self, role: Role) -> list[Site]:
        """Machines of a role that are not mixed now, or if all are, those."""
        own = [site for site in self.sites if site.role in (role, Role.BOTH)] or self.sites
        return [site for site in own if site.id not in self.mixed] or own

    def _mixed(
        self,
        other: Role,
        *,
        key: Callable[[Site], tuple[float, float]],
        is_able: Callable[[Site], bool],
    ) -> Site | None:
        """The best mixed machine that can help; else one of the other role that moves there."""
        mixed = [site for site in self.sites if site.id in self.mixed and is_able(site)]
        if mixed:
            return min(mixed, key=key)
        pure = [site for site in self._pool(other) if site.role is other and is_able(site)]
        return min(pure, key=key, default=None)


def _prompt_queue(site: Site) -> tuple[float, float]:
    """Length of a queue of prompts."""
    return site.queued_tokens, site.decodes


def _answer_queue(site: Site) -> tuple[float, float]:
    """Length of a queue of answers."""
    return site.decodes, site.queued_tokens


def _is_short(site: Site) -> bool:
    """Whether its queue of prompts is not too long."""
    return site.queued_tokens <= _MOST_BATCHES * site.chunk_tokens


def _has_room(site: Site, ask: Ask) -> bool:
    """Token machines begin to queue when they run out of memory."""
    return site.free_tokens >= ask.prompt_tokens
