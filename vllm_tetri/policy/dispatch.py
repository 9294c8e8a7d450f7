"""Pick the decode instance that takes over a prefilled request (paper section 3.3.4).

Every prefill instance decides alone, on loads that are a report period old.

- An instance has *room* (the paper's α) if its free blocks, less those it keeps for
  running requests, hold the prompt and the predicted answer, and its arena the KV.
- Two of those are drawn at random, and the one with fewer decodes of the request's own kind,
  heavy or light, takes it; equals are told apart by the tokens that all decodes are expected
  to write yet, then by free blocks. That evens out heavy decodes, which is what the paper is
  after. Its own measure, the lowest heavy:light ratio, does not see how many there are:
  10:10 looks better than 5:4, so requests pile up where light ones are. It is
  `power-of-two-ratio`.
- Nobody has room: the choice is the one with the most free arena, and it says so. The
  caller may hold the request for a report period first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import inf
from random import Random

from vllm_tetri.policy.peers import Need, OwnDispatches, Peer, Peers, free_blocks, free_bytes
from vllm_tetri.types import InstanceId

_DRAWS = 8  # for one probe; with fewer hits, all that may have room are looked at


class DispatchPolicy(StrEnum):
    """Who among those with room gets a request."""

    POWER_OF_TWO = "power-of-two"
    POWER_OF_TWO_RATIO = "power-of-two-ratio"  # the paper's measure
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"  # fewest decodes
    IMBALANCE = "imbalance"  # heavy decodes always to the same: the paper's Figure 19


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where a request's KV goes.

    Attributes:
        reason: For the decision log; never parsed.
        has_room: Whether the instance can hold the whole request as far as is known.
            False: nobody can.
    """

    instance: InstanceId
    kv_endpoint: str
    reason: str
    has_room: bool = True


def choose_decode(
    peers: Peers,
    *,
    need: Need,
    refused: Collection[InstanceId] = (),
    own: OwnDispatches,
    policy: DispatchPolicy = DispatchPolicy.POWER_OF_TWO,
    rng: Random,
) -> Dispatch | None:
    """The decode instance for one request. Takes microseconds however many there are,
    `least-loaded` excepted.

    Args:
        peers: Who could take it.
        refused: Instances that already said no to this request.
        own: What was sent to whom since.
        rng: Source of the probes.

    Returns:
        The choice, to be noted in `own` if it is followed; None when nobody is there who
        could take the KV at all.
    """
    search = _Search(peers, need, refused, own, rng)
    if not search.among:
        return None
    roomy = _CHOICES[policy](search)
    if roomy:
        best = roomy[0]
        reason = f"{policy.value}: {best.heavy}:{best.light} heavy:light"
        return Dispatch(best.id, best.kv_endpoint, reason)
    best = search.freest()
    reason = f"none of {len(search.among)} has room: most free arena"
    return Dispatch(best.id, best.kv_endpoint, reason, has_room=False)


def roomy(peer: Peer, peers: Peers, need: Need, own: OwnDispatches) -> Peer | None:
    """The peer with our own dispatches on top, if it has room even then."""
    peer = own.on_top(peer, peers.block_size)
    has_blocks = peer.free_blocks >= -(-need.total_tokens // peers.block_size)
    return peer if has_blocks and peer.free_bytes >= need.num_bytes else None


class _Search:
    """Looking for room for one request."""

    def __init__(
        self,
        peers: Peers,
        need: Need,
        refused: Collection[InstanceId],
        own: OwnDispatches,
        rng: Random,
    ) -> None:
        self.need = need
        self.own = own
        self.rng = rng
        self._peers = peers
        self._refused = refused
        self._num_blocks = -(-need.total_tokens // peers.block_size)
        self.among = peers.others
        if all(peer.id in refused for peer in peers.others):
            self.among = [peer for peer in peers.me if peer.id not in refused]

    def roomy(self, peer: Peer) -> Peer | None:
        """The peer with our own dispatches on top, if it has room even then."""
        if peer.id in self._refused:
            return None
        return roomy(peer, self._peers, self.need, self.own)

    def drawn(self, num: int) -> list[Peer]:
        """So many with room, at random; fewer only if there are not so many."""
        maybe, start = self._maybe_roomy()
        if len(maybe) - start > num * _DRAWS:
            found: dict[InstanceId, Peer] = {}
            for _ in range(num * _DRAWS):
                peer = self.roomy(maybe[self.rng.randrange(start, len(maybe))])
                if peer is not None:
                    found[peer.id] = peer
                    if len(found) == num:
                        return list(found.values())
        able = list(self.all_roomy(maybe[start:]))
        return self.rng.sample(able, k=min(num, len(able)))

    def all_roomy(self, among: Sequence[Peer]) -> Iterator[Peer]:
        """Those with room."""
        blocks, bytes_ = self._num_blocks, self.need.num_bytes
        maybe = [each for each in among if each.free_blocks >= blocks and each.free_bytes >= bytes_]
        return (peer for each in maybe if (peer := self.roomy(each)) is not None)

    def first_roomy(self, place: int) -> list[Peer]:
        """The first with room in order of names, from a place on and around."""
        place %= len(self.among)
        for each in chain(self.among[place:], self.among[:place]):
            peer = self.roomy(each)
            if peer is not None:
                return [peer]
        return []

    def freest(self) -> Peer:
        """The one with the most free arena, whether that is enough or not."""
        if self.among is not self._peers.others:
            return self.among[0]
        best: Peer | None = None
        for each in reversed(self._peers.by_bytes):
            if best is not None and each.free_bytes <= best.free_bytes:
                break  # our own dispatches only take from it
            if each.id not in self._refused:
                peer = self.own.on_top(each, self._peers.block_size)
                best = peer if best is None or peer.free_bytes > best.free_bytes else best
        assert best is not None, "somebody did not refuse"
        return best

    def _maybe_roomy(self) -> tuple[list[Peer], int]:
        """All with room and as few others as is easily known: a list, and where in it
        they start."""
        if self.among is not self._peers.others:
            return self.among, 0
        by_blocks, by_bytes = self._peers.by_blocks, self._peers.by_bytes
        blocks_at = bisect_left(by_blocks, self._num_blocks, key=free_blocks)
        bytes_at = bisect_left(by_bytes, self.need.num_bytes, key=free_bytes)
        return (by_blocks, blocks_at) if blocks_at >= bytes_at else (by_bytes, bytes_at)


def _of_two(search: _Search) -> list[Peer]:
    is_heavy = search.need.is_heavy

    def decodes(peer: Peer) -> tuple[int, int, int]:
        own = peer.heavy if is_heavy else peer.light
        return own, peer.remaining_tokens, -peer.free_blocks

    return sorted(search.drawn(2), key=decodes)


def _of_two_by_ratio(search: _Search) -> list[Peer]:
    is_heavy = search.need.is_heavy

    def interference(peer: Peer) -> tuple[float, int, int, int]:
        heavy, light = peer.heavy + is_heavy, peer.light + (not is_heavy)
        ratio = heavy / light if light else inf
        return ratio, heavy, light, -peer.free_blocks

    return sorted(search.drawn(2), key=interference)


def _least_loaded(search: _Search) -> list[Peer]:
    def decodes(peer: Peer) -> tuple[int, int]:
        return peer.heavy + peer.light, -peer.free_blocks

    return sorted(search.all_roomy(search.among), key=decodes)


def _imbalance(search: _Search) -> list[Peer]:
    return search.first_roomy(0) if search.need.is_heavy else search.drawn(1)


_CHOICES: dict[DispatchPolicy, Callable[[_Search], list[Peer]]] = {
    DispatchPolicy.POWER_OF_TWO: _of_two,
    DispatchPolicy.POWER_OF_TWO_RATIO: _of_two_by_ratio,
    DispatchPolicy.RANDOM: lambda search: search.drawn(1),
    DispatchPolicy.ROUND_ROBIN: lambda search: search.first_roomy(search.own.num_sent),
    DispatchPolicy.LEAST_LOADED: _least_loaded,
    DispatchPolicy.IMBALANCE: _imbalance,
}
"""Per policy those with room that it looked at, the choice first."""
