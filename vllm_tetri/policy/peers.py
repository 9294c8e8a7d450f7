"""Who could decode a request, as a prefill instance sees it.

Views are a report period old, so what this instance sent somewhere since that one's last
report counts as there: two requests do not both take the last room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    Role,
)

_MAX_OWN = 4096  # dispatches to one instance that are remembered


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs where it is decoded.

    Attributes:
        num_tokens: Of its prompt: the KV that moves.
        num_bytes: What that takes in the receive arena.
        total_tokens: Prompt and predicted answer.
        is_heavy: Whether a long answer is predicted (paper section 5.1.1).

    Raises:
        ValueError: There is nothing to hand over, or the answer is shorter than nothing.
    """

    num_tokens: int
    num_bytes: int
    total_tokens: int
    is_heavy: bool

    def __post_init__(self) -> None:
        if not (1 <= self.num_tokens <= self.total_tokens and self.num_bytes >= 0):
            raise ValueError(f"nothing to hand over: {self}")


@dataclass(slots=True)
class Peer:
    """A decode instance as a view shows it."""

    id: InstanceId
    kv_endpoint: str
    free_blocks: int
    free_bytes: int
    heavy: int
    light: int
    remaining_tokens: int  # of the answers that it writes
    reported_s: float


class Peers:
    """Those who could take over a request, out of one view; to be kept until the next.

    Args:
        view: The newest picture of the cluster; may be stale.
        me: The prefill instance that asks. It is its own last choice, and only when its
            role is `both`.
        now: When the ages in `view` were right.

    Attributes:
        able: All to whom KV may travel, whatever their role, this instance included.
        others: Of those the other ones that decode.
    """

    def __init__(self, view: ClusterView, me: InstanceInfo, now: float) -> None:
        reachable = [each for each in view.instances if _is_reachable(each, me)]
        self.able = {each.info.id: _peer(each, now) for each in reachable}
        able = [self.able[each.info.id] for each in reachable if each.info.role is not Role.PREFILL]
        self.block_size = max(1, me.block_size)  # part of what able ones have in common
        self.others = sorted([peer for peer in able if peer.id != me.id], key=_id)
        self.me = [peer for peer in able if peer.id == me.id and me.role is Role.BOTH]
        self.by_blocks = sorted(self.others, key=free_blocks)
        self.by_bytes = sorted(self.others, key=free_bytes)
        self.reported_s = {peer.id: peer.reported_s for peer in self.able.values()}


@dataclass(slots=True)
class _Sent:
    """Sums over what was sent to one instance."""

    entries: deque[tuple[float, Need]]
    tokens: int = 0
    answer_tokens: int = 0
    bytes: int = 0
    heavy: int = 0
    light: int = 0

    def count(self, need: Need, sign: int) -> None:
        self.tokens += sign * need.total_tokens
        self.answer_tokens += sign * (need.total_tokens - need.num_tokens)
        self.bytes += sign * need.num_bytes
        self.heavy += sign * need.is_heavy
        self.light += sign * (not need.is_heavy)


class OwnDispatches:
    """What one prefill instance sent to others since their last reports.

    Owner: whoever dispatches. A dispatch also counts for `grace_s` after it, whatever
    was reported since: the other one sees KV at once but knows the request only when its
    prompt is done.
    """

    def __init__(self, grace_s: float = 0.5) -> None:
        self.num_sent = 0
        self._grace_s = grace_s
        self._sent: dict[InstanceId, _Sent] = {}

    def add(self, instance: InstanceId, need: Need, now: float) -> None:
        """Note a dispatch at time `now`; calls come in order of time."""
        self.num_sent += 1
        sent = self._sent.setdefault(instance, _Sent(deque()))
        if len(sent.entries) >= _MAX_OWN:
            sent.count(sent.entries.popleft()[1], -1)
        sent.entries.append((now, need))
        sent.count(need, 1)

    def drop_reported(self, peers: Peers) -> None:
        """Forget what the loads of a new view show, and instances that are gone."""
        for instance in list(self._sent):
            until_s = peers.reported_s.get(instance, inf) - self._grace_s
            sent = self._sent[instance]
            while sent.entries and sent.entries[0][0] < until_s:
                sent.count(sent.entries.popleft()[1], -1)
            if not sent.entries:
                del self._sent[instance]

    def on_top(self, peer: Peer, block_size: int) -> Peer:
        """The instance with what was sent to it counted as there."""
        sent = self._sent.get(peer.id)
        if sent is None:
            return peer
        return Peer(
            peer.id,
            peer.kv_endpoint,
            peer.free_blocks - -(-sent.tokens // block_size),
            peer.free_bytes - sent.bytes,
            peer.heavy + sent.heavy,
            peer.light + sent.light,
            peer.remaining_tokens + sent.answer_tokens,
            peer.reported_s,
        )

    def instances(self) -> Collection[InstanceId]:
        """Those to whom something was sent that their loads may not show."""
        return self._sent.keys()


def _is_reachable(one: InstanceView, me: InstanceInfo) -> bool:
    return (
        one.state is InstanceState.READY
        and bool(one.info.kv_endpoint)
        and one.info.identity == me.identity
    )


def _peer(one: InstanceView, now: float) -> Peer:
    load = one.load
    return Peer(
        one.info.id,
        one.info.kv_endpoint,
        load.blocks_total - load.blocks_used - load.reserved_blocks,
        load.arena_total_bytes - load.arena_used_bytes,
        load.heavy,
        load.light,
        load.remaining_tokens,
        now - one.age_s,
    )


_id = attrgetter("id")
free_blocks = attrgetter("free_blocks")
free_bytes = attrgetter("free_bytes")
