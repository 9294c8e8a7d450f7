"""Whole or split, and where: decided for every request by what it would cost. Pure.

Of all pairs of a site for the prompt and one for the answer, mostly the same one, the pair
is taken for which least is waited: by the request (time to first token, then the answer)
and by the others there (`policy.site`). Waiting for the first token counts more the
shorter it is against the whole, so that both grow little in proportion. A hand-over costs
what hand-overs cost; on top, splitting must be better by a margin that shrinks as step times
become known, so that requests do not flap between choices that are as good. Where objectives
are given, places that are expected to keep them come before those that are not.

The paper always splits; its loss on heavy prompts with light answers (HPLD) comes from
that. Mooncake prefills short prompts inline, Splitwise mixes in a pool when it must.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from random import Random

from vllm_tetri.policy.site import Ask, Site
from vllm_tetri.types import InstanceId, Role

# What relative growth of the time to the first token counts, if that of the whole time
# counts 1. Simulated between 0.1 and 1; less makes first tokens late, more makes answers slow.
_FIRST_TOKEN_PART = 0.3
_MOST_WEIGHT = 50.0
_LEAST_S = 1e-6
# By so much of its cost must a hand-over be better: what steps cost is a guess, or known.
_MARGIN_GUESSED, _MARGIN_KNOWN = 0.25, 0.05
# With more sites than this, looks at those that were best for the last view, and at some
# at random.
_ALL = 8
_PROBES = 2
# Beyond its objective a second counts so much more.
_LATE_WEIGHT = 20.0


@dataclass(frozen=True, slots=True)
class Objective:
    """What clients were promised, in seconds; infinite where nothing was.

    Attributes:
        ttft_s: Until the first token.
        tpot_s: Per token behind it, in the mean.
    """

    ttft_s: float = inf
    tpot_s: float = inf


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes, and why.

    Attributes:
        prompt: Instance that computes its prompt.
        answer: Instance that writes its answer, as far as is known now.
        ttft_s: Expected.
        tpot_s: Expected.
        cost_s: What is waited for it, all together.
        reason: For the decision log; never parsed.
        waits: Whether its first token waits for others there.
        shares: Whether its answer shares steps with others there.
        confidence: How well the steps of both are known.
    """

    prompt: InstanceId
    answer: InstanceId
    ttft_s: float
    tpot_s: float
    cost_s: float
    reason: str
    waits: bool = True
    shares: bool = True
    confidence: float = 1.0

    @property
    def is_split(self) -> bool:
        return self.prompt != self.answer


NO_OBJECTIVE = Objective()


class Candidates:
    """The sites worth looking at for requests of one model, chosen once per view.

    Prompts may go anywhere. Answers go to prefill instances only if there is nobody else:
    that these are free of decodes is what makes them quick.

    Args:
        usual: What requests are like; orders the sites where there are many.
        rng: Source of probes.
        spares_prefill: Whether prefill instances are kept free of answers.
        spares_decode: Whether decode instances are kept free of prompts.
        is_alone: Whether nobody else decides by the same view.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        usual: Ask,
        rng: Random,
        *,
        spares_prefill: bool = True,
        spares_decode: bool = False,
        is_alone: bool = True,
    ) -> None:
        self._rng = rng
        self._is_alone = is_alone
        self._all = sites
        self._prompts = [
            site for site in sites if site.role is not Role.DECODE or not spares_decode
        ]
        self._answers = [
            site for site in sites if site.role is not Role.PREFILL or not spares_prefill
        ]
        self._answer_price_s = lambda site: _written(site, usual)[1]
        # Only the first ones need an order; who is not alone draws, and does without.
        if is_alone and len(self._prompts) > _ALL:
            self._prompts.sort(key=lambda site: site.ttft_s(usual.prompt_tokens))
        if is_alone and len(self._answers) > _ALL:
            self._answers.sort(key=self._answer_price_s)

    def prompts(self, taken: Collection[InstanceId]) -> list[Site]:
        """Where a prompt may go."""
        return self._some_of(self._prompts, taken)

    def answers(self, taken: Collection[InstanceId]) -> list[Site]:
        """Where an answer may go."""
        return self._some_of(self._answers, taken)

    def all_answers(self, taken: Collection[InstanceId]) -> list[Site]:
        """Everywhere an answer may go, the best for the last view first; slow among many."""
        found = [site for site in self._answers if site.id not in taken]
        found = found or [site for site in self._all if site.id not in taken]
        return sorted(found, key=self._answer_price_s)

    def _some_of(self, sites: Sequence[Site], taken: Collection[InstanceId]) -> list[Site]:
        for each in (sites, self._all):
            found = some_of(each, taken, self._rng, is_alone=self._is_alone)
            if found:
                return found
        return []


def some_of(
    ordered: Sequence[Site], taken: Collection[InstanceId], rng: Random, *, is_alone: bool
) -> list[Site]:
    """Of few sites all, of many the first ones and some at random. Who decides by the same
    view as others takes only random ones: the first would be the first for all of them."""
    if len(ordered) <= _ALL:
        return [site for site in ordered if site.id not in taken]
    found: list[Site] = []
    if is_alone:
        found = list(islice((site for site in ordered if site.id not in taken), _PROBES))
    for _ in range(2 * _PROBES - len(found)):
        site = ordered[int(rng.random() * len(ordered))]
        if site.id not in taken and site not in found:
            found.append(site)
    return found or [site for site in ordered if site.id not in taken][:1]


def choose_place(
    candidates: Candidates,
    ask: Ask,
    *,
    may_split: bool,
    prefers_split: bool = False,
    objective: Objective = NO_OBJECTIVE,
    taken: Collection[InstanceId] = (),
) -> Place | None:
    """Where a request goes, or None if nobody can take it. Microseconds, however many
    instances there are.

    Args:
        may_split: Whether two instances may share it.
        prefers_split: Whether they do wherever two can, whatever it costs.
        taken: Instances that cannot have it.
    """
    prompts, answers = candidates.prompts(taken), candidates.answers(taken)
    if not answers:
        return None
    written = [_written(site, ask, objective) for site in answers]
    everyone = {*prompts, *answers}
    ttfts = {site.id: site.ttft_s(ask.prompt_tokens) for site in everyone}
    weight = _first_token_weight(min(ttfts.values()), min(written)[0] * ask.answer_tokens)
    costs = {
        site.id: _prompt_cost(site, ask, ttfts[site.id], weight, objective) for site in everyone
    }
    wholes = [costs[site.id] + each[1] for site, each in zip(answers, written, strict=True)]
    whole_s = min(wholes)
    index = wholes.index(whole_s)
    whole, tpot_s, against = answers[index], written[index][0], f"of {len(ttfts)}"
    if may_split and ttfts.keys() != {whole.id}:
        prompt, index, pair_s = _best_pair(prompts, answers, costs, written, ask)
        is_better = pair_s < whole_s * (1 - _margin(whole))
        if prompt is not None and (is_better or prefers_split):
            answer, tpot_s = answers[index], written[index][0]
            against = f"whole on {whole.id} {whole_s:.3g}"
            return _place(prompt, answer, ttfts[prompt.id], tpot_s, pair_s, against)
        if prompt is not None:
            against = f"split over {prompt.id} and {answers[index].id} {pair_s:.3g}"
    return _place(whole, whole, ttfts[whole.id], tpot_s, whole_s, against)


def choose_answer(
    sites: Iterable[Site], ask: Ask, *, at: Site | None
) -> tuple[InstanceId, str] | None:
    """Where the answer goes now that part of the prompt is computed: the choice is made
    again with what is known by now, the predicted length above all.

    Args:
        sites: Those that have room for it.
        at: Where the prompt is, if it may stay there.

    Returns:
        The instance and the reason; None if there is nobody.
    """
    best, best_s = None, inf
    for site in sites:
        if at is None or site.id != at.id:
            answer_s = _written(site, ask)[1]
            if answer_s < best_s:
                best, best_s = site, answer_s
    if at is not None:
        stay_s = _written(at, ask)[1]
        moved_s = best_s + at.transfer_s(ask.prompt_tokens)  # a second leg is needed anyway
        if best is None or moved_s >= stay_s * (1 - _margin(at)):
            return at.id, f"stays: {stay_s:.3g} s, elsewhere {moved_s:.3g}"
        return best.id, f"goes: {moved_s:.3g} s, here {stay_s:.3g}"
    return None if best is None else (best.id, f"costs {best_s:.3g} s")


def _best_pair(
    prompts: list[Site],
    answers: list[Site],
    costs: dict[InstanceId, float],
    written: list[tuple[float, float]],
    ask: Ask,
) -> tuple[Site | None, int, float]:
    """Two sites between which KV may travel: the first, the other's place in `answers`, and
    what they cost together."""
    best, best_index, least_s = None, 0, inf
    order = sorted(range(len(answers)), key=lambda index: written[index][1])
    for prompt in prompts:
        prompt_s = costs[prompt.id] + prompt.hand_over_s(ask.prompt_tokens)
        if ask.prompt_tokens > prompt.free_tokens:
            prompt_s += _room_s(prompt, ask.prompt_tokens, prompt.tpot_s(ask.prompt_tokens))
        for index in order:
            answer = answers[index]
            if answer is not prompt and answer.key == prompt.key:
                if prompt_s + written[index][1] < least_s:
                    best, best_index, least_s = prompt, index, prompt_s + written[index][1]
                break
    return best, best_index, least_s


def _first_token_weight(ttft_s: float, answer_s: float) -> float:
    """What a second before the first token counts, if one of the answer counts 1: both
    waits count in proportion to what they would be at best."""
    ttft_s = max(ttft_s, _LEAST_S)
    return 1 + min(_MOST_WEIGHT, _FIRST_TOKEN_PART * (ttft_s + answer_s) / ttft_s)


def _prompt_cost(site: Site, ask: Ask, ttft_s: float, weight: float, objective: Objective) -> float:
    cost_s = weight * ttft_s + site.prompt_harm_s(ask.prompt_tokens)
    if ttft_s > objective.ttft_s:
        cost_s += _LATE_WEIGHT * (ttft_s - objective.ttft_s)
    return cost_s


def _written(site: Site, ask: Ask, objective: Objective = NO_OBJECTIVE) -> tuple[float, float]:
    """An answer's seconds per token, and what it costs."""
    tokens = ask.answer_tokens
    tpot_s = site.tpot_s(ask.prompt_tokens + tokens / 2)
    cost_s = tokens * tpot_s + site.answer_harm_s(ask)
    if tpot_s > objective.tpot_s:
        cost_s += _LATE_WEIGHT * tokens * (tpot_s - objective.tpot_s)
    return tpot_s, cost_s + _room_s(site, ask.prompt_tokens + tokens, tpot_s)


def _room_s(site: Site, tokens: float, tpot_s: float) -> float:
    """Until others there have ended whose KV is in the way of so many tokens."""
    missing_tokens = tokens - site.free_tokens
    return min(site.left_tokens, missing_tokens) * tpot_s if missing_tokens > 0 else 0.0


def _margin(site: Site) -> float:
    return _MARGIN_KNOWN + (1 - site.cost.confidence) * (_MARGIN_GUESSED - _MARGIN_KNOWN)


def _place(
    prompt: Site, answer: Site, ttft_s: float, tpot_s: float, cost_s: float, against: str
) -> Place:
    word = "whole" if prompt is answer else "split"
    reason = (
        f"{word}: costs {cost_s:.3g} s, {against}; first token in {ttft_s:.3g} s, "
        f"then {tpot_s * 1e3:.3g} ms each"
    )
    return Place(
        prompt.id, answer.id, ttft_s, tpot_s, cost_s, reason,
        waits=prompt.queued_tokens > 0 or prompt.decodes > 0,
        shares=answer.decodes > 0 or answer.prompt_share > 0,
        confidence=min(prompt.cost.confidence, answer.cost.confidence),
    )  # fmt: skip
