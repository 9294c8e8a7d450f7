"""What requests cost where: instances as a view shows them, priced by their own steps. Pure.

Everything is counted in seconds that somebody waits, the request itself or another one:

- A prompt at a site waits for what is queued there and is computed in chunks, each beside a
  step of the site's decodes. Those wait for it in turn.
- An answer at a site takes one step per token, longer the more decodes and prompts there
  are. The others' steps become longer by what it adds.
- Sites on one device (cores or a GPU that several instances share) slow each other down:
  whoever waits on one waits on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from vllm_tetri.policy.step_fit import GUESS
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    Role,
    StepCoefficients,
)

_SHARE_S = 2.0  # memory of the part of its time that prompts take
_MOST_SHARE = 0.9
_DEFAULT_CHUNK_TOKENS = 512
_MAX_SENT = 4096
_MAX_IDENTITIES = 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be placed.

    Attributes:
        prompt_tokens: To be computed, at least 1.
        answer_tokens: Expected to be written, at least 1.
    """

    prompt_tokens: int
    answer_tokens: float


class Site:
    """One instance. Numbers change as requests are sent there; see `Sites`.

    Attributes:
        role: What it prefers.
        key: Equal where KV may travel; a small number.
        decodes: Requests that write answers there, or will.
        others: The same on other sites of its device.
        left_tokens: What an answer there has left, in the mean.
        prompt_share: Part of its time that prompts take.
        free_tokens: KV that its pool has room for.
        window_tokens: Longest prompt and answer together.
    """

    __slots__ = (
        "busy_others",
        "chunk_tokens",
        "cost",
        "decodes",
        "device",
        "free_tokens",
        "handover_s",
        "handover_token_s",
        "id",
        "key",
        "left_tokens",
        "others",
        "prompt_share",
        "queued_tokens",
        "request_s",
        "role",
        "window_tokens",
    )

    def __init__(self, one: InstanceView, cost: StepCoefficients, key: int, share: float) -> None:
        load, info = one.load, one.info
        self.id: InstanceId = info.id
        self.role: Role = info.role
        self.device = info.device
        self.key = key
        self.cost = cost
        self.chunk_tokens = load.chunk_tokens or _DEFAULT_CHUNK_TOKENS
        self.queued_tokens: float = load.queued_prefill_tokens
        self.decodes: float = load.heavy + load.light
        self.left_tokens = load.remaining_tokens / max(1.0, self.decodes)
        context = load.context_tokens / max(1.0, self.decodes)
        self.request_s = cost.request_s + context * cost.token_s  # a decode of usual context
        self.prompt_share = share
        self.window_tokens = info.max_model_len
        self.free_tokens: float = info.block_size * (
            load.blocks_total - load.blocks_used - load.reserved_blocks
        )
        self.handover_s = load.handover_s
        self.handover_token_s = load.handover_token_s
        self.others = self.busy_others = 0.0

    # -- a prompt here ----------------------------------------------------------------

    def token_s(self, prompt_tokens: float) -> float:
        """Each token of a prompt of so many, decodes and the step's base aside."""
        return self.cost.prompt_s + prompt_tokens / 2 * self.cost.context_s

    def ttft_s(self, prompt_tokens: float) -> float:
        """Until the first token of a prompt that comes now."""
        tokens = self.queued_tokens + prompt_tokens
        beside_s = self.cost.base_s + self.decodes * self.request_s
        steps = -(-tokens // self.chunk_tokens)
        if self.decodes:
            steps += 0.5  # what is left of the one that runs
        alone_s = tokens * self.token_s(prompt_tokens) + steps * beside_s
        return alone_s * (1 + self.busy_others)

    def prompt_harm_s(self, prompt_tokens: float) -> float:
        """What those who decode here and beside it wait for a prompt, all together."""
        if not (self.decodes or self.others):
            return 0.0
        steps = prompt_tokens / self.chunk_tokens
        present = min(1.0, self.left_tokens / max(1.0, steps)) if self.decodes else 1.0
        waiting = self.decodes * present + self.others
        return waiting * prompt_tokens * self.token_s(prompt_tokens)

    # -- an answer here ---------------------------------------------------------------

    def tpot_s(self, context_tokens: float) -> float:
        """Of one more answer behind so many tokens, prompts beside it counted in."""
        own_s = self.cost.request_s + context_tokens * self.cost.token_s
        step_s = self.cost.base_s + self.decodes * self.request_s + own_s
        return step_s * (1 + self.busy_others) / (1 - self.prompt_share)

    def answer_harm_s(self, ask: Ask) -> float:
        """What those who decode here and beside it wait for one more answer."""
        if not (self.decodes or self.others):
            return 0.0
        context = ask.prompt_tokens + ask.answer_tokens / 2
        own_s = self.cost.request_s + context * self.cost.token_s
        harm_s = 0.0
        if self.decodes:
            harm_s = self.decodes * min(ask.answer_tokens, self.left_tokens) * own_s
        if self.others:
            own_s += 0.0 if self.decodes else self.cost.base_s
            harm_s += self.others * ask.answer_tokens * own_s
        return harm_s / (1 - self.prompt_share)

    def hand_over_s(self, prompt_tokens: float) -> float:
        """Until a prompt that is done here goes on somewhere else."""
        return self.handover_s + self.transfer_s(prompt_tokens)

    def transfer_s(self, prompt_tokens: float) -> float:
        """What of that its KV takes."""
        last_tokens = min(prompt_tokens, self.chunk_tokens)  # the rest left before
        return last_tokens * self.handover_token_s


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

    def __init__(self, grace_s: float = 0.1) -> None:
        self.at_s = float("-inf")
        self.by_model: dict[str, list[Site]] = {}
        self.by_id: dict[InstanceId, Site] = {}
        self._grace_s = grace_s
        self._shares: dict[InstanceId, _Share] = {}
        self._reported_s: dict[InstanceId, float] = {}
        # What an instance said of itself, and a small number for its identity.
        self._keys: dict[InstanceId, tuple[InstanceInfo, int]] = {}
        self._identities: dict[str, int] = {}
        self._sent: deque[_Sent] = deque(maxlen=_MAX_SENT)
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
            total_tokens = site.left_tokens * site.decodes + sent.ask.answer_tokens
            site.decodes += 1
            site.left_tokens = total_tokens / site.decodes
            site.free_tokens -= sent.ask.prompt_tokens + sent.ask.answer_tokens


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
