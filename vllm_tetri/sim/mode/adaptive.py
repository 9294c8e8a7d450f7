"""The modes that price places: whole or split, decided for every request, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from vllm_tetri.policy.adaptive import Candidates, choose_answer, choose_place
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route, Split, Whole
from vllm_tetri.policy.site import Ask as PricedAsk
from vllm_tetri.policy.site import Site
from vllm_tetri.policy.sites import Sites
from vllm_tetri.sim.mode.crowd import Crowd, Member
from vllm_tetri.sim.mode.dispatcher import Expected
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import MODEL, Picture
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId, Role

_USUAL_PROMPT_TOKENS = 512


class AdaptiveMode:
    """As `router.placing` and `engine.dispatcher` do it.

    Attributes:
        most_alone: Up to so many instances that decode, each looks at all of a picture
            itself; more are a `Crowd`.
    """

    may_split = True
    most_alone = 32

    def __init__(self, setting: Setting) -> None:
        rng = Random(f"{setting.seed} adaptive")
        self._router = _Look(rng, spares_prefill=self.may_split)
        num_decode = sum(each.role is not Role.PREFILL for each in setting.instances)
        self._crowd = Crowd(rng) if num_decode > self.most_alone else None
        self._members: dict[InstanceId, Member] = {}
        self._dispatchers: dict[InstanceId, _Look] = {}
        for each in setting.instances:
            if self._crowd is not None:
                self._members[each.id] = Member(self._crowd)
            else:
                self._dispatchers[each.id] = _Look(rng, is_alone=False)

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        look = self._router
        look.take(picture)
        priced = PricedAsk(ask.prompt_tokens, look.expected.tokens(None))
        place = choose_place(look.candidates, priced, may_split=self.may_split)
        assert place is not None, "somebody is there"
        look.sites.send(
            place.prompt, place.answer, priced, now, after_s=place.ttft_s if place.is_split else 0.0
        )
        if place.is_split:
            return Split(place.prompt, place.reason, anywhere=True)
        return Whole(place.prompt, place.reason)

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        if self._crowd is not None:
            member = self._members[prefill]
            sites = member.sites(picture)
            chosen, priced = _choose(sites, self._crowd.expected, member.site(prefill), ask)
            member.send(chosen.instance, priced, now)
        else:
            look = self._dispatchers[prefill]
            look.take(picture)
            sites = look.candidates.answers(())
            here = look.sites.by_id.get(prefill)
            if here is not None and here.role is Role.PREFILL:
                here = None  # it decodes only if nobody else does
            here = here or next((site for site in sites if site.id == prefill), None)
            chosen, priced = _choose(sites, look.expected, here, ask)
            look.sites.send(None, chosen.instance, priced, now)
        return chosen

    def ended(self, ask: Ask, now: float) -> None:
        """Nothing to note."""


class WholeMode(AdaptiveMode):
    """The same without splitting."""

    may_split = False


def _choose(
    sites: Sequence[Site], expected: Expected, here: Site | None, ask: Ask
) -> tuple[Dispatch, PricedAsk]:
    """Where an answer goes, and what it is taken for."""
    priced = PricedAsk(ask.prompt_tokens, expected.tokens(ask.predicted))
    chosen = choose_answer(sites, priced, at=here)
    assert chosen is not None, "somebody is there"
    return Dispatch(chosen[0], "", chosen[1]), priced


class _Look:
    """What one who decides knows."""

    def __init__(self, rng: Random, *, spares_prefill: bool = True, is_alone: bool = True) -> None:
        self.sites = Sites()
        self.candidates = Candidates([], PricedAsk(1, 1), rng)
        self.expected = Expected()
        self._options = {"spares_prefill": spares_prefill, "is_alone": is_alone}
        self._rng = rng
        self._seen: Picture | None = None

    def take(self, picture: Picture) -> None:
        if picture is self._seen:
            return
        self._seen = picture
        self.sites.renew(picture.view, picture.at_s)
        self.expected.look(picture)
        usual = PricedAsk(_USUAL_PROMPT_TOKENS, self.expected.tokens(None))
        sites = self.sites.by_model.get(MODEL, [])
        self.candidates = Candidates(sites, usual, self._rng, **self._options)
