"""The modes that price places: whole or split, decided for every request, and whole."""

from __future__ import annotations

from random import Random

from vllm_tetri.policy.adaptive import Candidates, choose_answer, choose_place
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route, Split, Whole
from vllm_tetri.policy.site import Ask as PricedAsk
from vllm_tetri.policy.sites import Sites
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import MODEL, Picture
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId

_UNKNOWN_ANSWER_TOKENS = 200.0
_USUAL_PROMPT_TOKENS = 512


class AdaptiveMode:
    """As `router.placing` and `engine.dispatcher` do it."""

    may_split = True

    def __init__(self, setting: Setting) -> None:
        rng, period_s = Random(f"{setting.seed} adaptive"), setting.report_period_s
        self._router = _Look(period_s, rng, spares_prefill=self.may_split)
        self._dispatchers = {each.id: _Look(period_s, rng) for each in setting.instances}

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        look = self._router
        look.take(picture)
        priced = PricedAsk(ask.prompt_tokens, look.answer_tokens)
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
        look = self._dispatchers[prefill]
        look.take(picture)
        tokens = look.answer_tokens
        if ask.predicted is not None:
            tokens = look.expected_tokens(ask)
        priced = PricedAsk(ask.prompt_tokens, tokens)
        sites = look.candidates.answers(())
        here = next((site for site in sites if site.id == prefill), None)
        chosen = choose_answer(sites, priced, at=here)
        assert chosen is not None, "somebody is there"
        look.sites.send(None, chosen[0], priced, now)
        return Dispatch(chosen[0], "", chosen[1])

    def ended(self, ask: Ask, now: float) -> None:
        """Nothing to note."""


class WholeMode(AdaptiveMode):
    """The same without splitting."""

    may_split = False


class _Look:
    """What one who decides knows."""

    def __init__(self, period_s: float, rng: Random, *, spares_prefill: bool = True) -> None:
        self._spares_prefill = spares_prefill
        self.sites = Sites()
        self.candidates = Candidates([], PricedAsk(1, 1), rng)
        self.answer_tokens = _UNKNOWN_ANSWER_TOKENS
        self._bucket_tokens: tuple[int, ...] = ()
        self._period_s = period_s
        self._rng = rng
        self._seen: Picture | None = None

    def take(self, picture: Picture) -> None:
        if picture is self._seen:
            return
        self._seen = picture
        self.sites.renew(picture.view, picture.at_s)
        rows = [
            each.load.bucket_tokens for each in picture.view.instances if each.load.bucket_tokens
        ]
        if rows:
            columns = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            self._bucket_tokens = tuple(columns)
            self.answer_tokens = columns[-1]
        sites = self.sites.by_model.get(MODEL, [])
        usual = PricedAsk(_USUAL_PROMPT_TOKENS, self.answer_tokens)
        self.candidates = Candidates(sites, usual, self._rng, spares_prefill=self._spares_prefill)

    def expected_tokens(self, ask: Ask) -> float:
        """Of its answer, as predicted."""
        assert ask.predicted is not None
        if ask.predicted.bucket < len(self._bucket_tokens) - 1:
            return self._bucket_tokens[ask.predicted.bucket]
        return (ask.predicted.bucket + 0.5) * ask.predicted.granularity_tokens
