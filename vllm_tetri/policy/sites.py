"""All instances that could be given requests, as views show them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from vllm_tetri.policy.site import Ask, Site
from vllm_tetri.policy.step_fit import GUESS
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    StepCoefficients,
)

_SHARE_S = 2.0  # memory of the part of its time that prompts take
_MOST_SHARE = 0.9
GRACE_S = 0.1
MAX_SENT = 4096
_MAX_IDENTITIES = 1024


@dataclass(frozen=True, slots=True)
class _Sent:
    at_s: float
    prompt_site: InstanceId | None
    answer_site: InstanceId | None
    ask: Ask
    answer_s: float


class Sites:
    """All instances that could be given requests, renewed with every view, and what was
    sent since they reported. Owner: one thread.

    Args:
        grace_s: What was sent counts for so long after a report as well: an engine sees a
            request some time after its bytes.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.at_s = float("-inf")
        self.by_model: dict[str, list[Site]] = {}
        self.by_id: dict[InstanceId, Site] = {}
        self._grace_s = grace_s
        self._shares: dict[InstanceId, _Share] = {}
        self._reported_s: dict[InstanceId, float] = {}
        # What an instance said of itself, and a small number for its identity.
        self._keys: dict[InstanceId, tuple[InstanceInfo, int]] = {}
        self._identities: dict[str, int] = {}
        self._sent: deque[_Sent] = deque(maxlen=MAX_SENT)
        self._devices: dict[str, list[Site]] = {}

    def renew(self, view: ClusterView, now: float) -> None:
        """Take over a newer view, whose ages are right at `now`."""
        if len(self._identities) > _MAX_IDENTITIES:  # of instances that are gone
            self._identities.clear()
            self._keys.clear()
        ready = [each for each in view.instances if each.state is InstanceState.READY]
        keys = {each.info.id: self._key(each.info) for each in ready}
        self._keys = {name: self._keys[name] for name in keys}
        # One that has not taken steps yet is as quick as another one of its kind.
        known = {keys[each.info.id]: each.load.cost for each in ready if each.load.cost.is_known}
        shares, self._shares, self._reported_s = self._shares, {}, {}
        self.at_s, self.by_model, self.by_id, self._devices = now, {}, {}, {}
        for each in ready:
            name = each.info.id
            key, cost = keys[name], each.load.cost
            cost = cost if cost.is_known else known.get(key, GUESS)
            self._reported_s[name] = reported_s = now - each.age_s
            share = _share(each, cost, shares.get(name), reported_s)
            self._shares[name] = share
            site = Site(each, cost, key, share.part)
            self.by_id[name] = site
            if site.device:
                self._devices.setdefault(site.device, []).append(site)
            for model in each.info.models:
                self.by_model.setdefault(model, []).append(site)
        self._send_again()
        for together in self._devices.values():
            _see_neighbours(together)

    def send(
        self,
        prompt_site: InstanceId | None,
        answer_site: InstanceId | None,
        ask: Ask,
        now: float,
        *,
        after_s: float = 0.0,
    ) -> None:
        """A request goes there; calls come in order of time. Without a site for its prompt
        that is computed already, without one for its answer nobody knows that yet.

        Args:
            after_s: Until the answer's site knows of it.
        """
        sent = _Sent(now, prompt_site, answer_site, ask, now + after_s)
        self._sent.append(sent)
        self._count(sent, is_prompt_known=False, is_answer_known=False)
        for name in {prompt_site, answer_site}:
            site = self.by_id.get(name) if name else None
            if site is not None and site.device:
                _see_neighbours(self._devices[site.device])

    def _key(self, info: InstanceInfo) -> int:
        known = self._keys.get(info.id)
        if known is not None and known[0] is info:
            return known[1]
        identity = str(sorted(info.identity.items()))
        key = self._identities.setdefault(identity, len(self._identities))
        self._keys[info.id] = info, key
        return key

    def _send_again(self) -> None:
        """Count what loads do not show yet."""
        oldest_s = min(self._reported_s.values(), default=0.0) - self._grace_s
        while self._sent and self._sent[0].answer_s < oldest_s:
            self._sent.popleft()
        for sent in self._sent:
            self._count(
                sent,
                is_prompt_known=self._is_known(sent.prompt_site, sent.at_s),
                is_answer_known=self._is_known(sent.answer_site, sent.answer_s),
            )

    def _is_known(self, name: InstanceId | None, sent_s: float) -> bool:
        reported_s = self._reported_s.get(name) if name else None
        return reported_s is None or sent_s < reported_s - self._grace_s

    def _count(self, sent: _Sent, *, is_prompt_known: bool, is_answer_known: bool) -> None:
        site = self.by_id.get(sent.prompt_site) if sent.prompt_site else None
        if site is not None and not is_prompt_known:
            site.queued_tokens += sent.ask.prompt_tokens
        site = self.by_id.get(sent.answer_site) if sent.answer_site else None
        if site is not None and not is_answer_known:
            site.add_answer(sent.ask)


class _Share(NamedTuple):
    """What is known of the part of an instance's time that prompts take: its last report,
    and weighted sums over the last seconds."""

    seq: int
    tokens_done: int
    reported_s: float
    taken_s: float = 0.0
    passed_s: float = 0.0

    @property
    def part(self) -> float:
        return min(_MOST_SHARE, self.taken_s / self.passed_s) if self.passed_s > 0 else 0.0


def _share(
    one: InstanceView, cost: StepCoefficients, before: _Share | None, reported_s: float
) -> _Share:
    done = one.load.prompt_tokens_done
    if before is None or one.seq < before.seq or done < before.tokens_done:  # it is new
        return _Share(one.seq, done, reported_s)
    passed_s = reported_s - before.reported_s
    if one.seq == before.seq or passed_s <= 0:
        return before
    kept = exp(-passed_s / _SHARE_S)
    taken_s = kept * before.taken_s + (done - before.tokens_done) * cost.prompt_s
    return _Share(one.seq, done, reported_s, taken_s, kept * before.passed_s + passed_s)


def _see_neighbours(together: Sequence[Site]) -> None:
    """Tell the sites of a device what happens there beside each."""
    decodes = sum(site.decodes for site in together)
    busy = sum(site.decodes > 0 or site.queued_tokens > 0 for site in together)
    for site in together:
        is_busy = site.decodes > 0 or site.queued_tokens > 0
        site.others = decodes - site.decodes
        site.busy_others = busy - is_busy
