"""How many requests there may be: in all, at an instance, and of one client key."""

from __future__ import annotations

import time

from vllm_tetri.policy.fair_share import Squeeze, matters_from, may_begin, may_queue
from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.table import RequestTable
from vllm_tetri.types import InstanceId


class Shares:
    """Shares the room of a cluster between clients. Owner: the event loop.

    Args:
        table: What is in flight.
        most: Requests at a time.
        most_each: Requests at a time that one instance gets.
        num_parties: How many clients can be told apart.
    """

    def __init__(self, table: RequestTable, *, most: int, most_each: int, num_parties: int) -> None:
        self._table = table
        self._most = most
        self._most_each = most_each
        self._num_parties = num_parties
        self._matters_from = matters_from(most_each, num_parties=num_parties)
        self._squeezes: dict[InstanceId, Squeeze] = {}

    def check_room(self, party: str) -> None:
        """Look whether a client may have another request.

        Raises:
            Refusal: 429, there are too many, or too many of this client.
        """
        own, taken = self._table.num_of(party), len(self._table)
        if may_begin(own, taken, self._most, num_parties=self._num_parties):
            return
        whose = f"{taken} requests" if taken >= self._most else f"{own} requests of this key"
        raise Refusal(429, f"{whose} are in flight; try again later", code="too_many_in_flight")

    def crowded(self, party: str) -> frozenset[InstanceId]:
        """Instances that have as many requests as they may, or as many of this client."""
        if len(self._table) < self._matters_from and not self._squeezes:
            return frozenset()
        now, own = time.monotonic(), self._table.workers(party)
        self._forget(now)
        found = []
        for name, taken in self._table.workers().items():
            instance = InstanceId(name)
            # Who has nothing there may ask, whatever the instance said to others.
            squeeze = self._squeezes.get(instance) if own[name] else None
            most = self._most_each if squeeze is None else squeeze.limit(self._most_each, now)
            if not may_begin(own[name], taken, most, num_parties=self._num_parties):
                found.append(instance)
        return frozenset(found)

    def crowding(self, party: str, instances: frozenset[InstanceId]) -> frozenset[InstanceId]:
        """Of instances where too much waits, those where a client has its share of it."""
        if not instances or self._num_parties <= 1:
            return instances
        found = []
        for instance in instances:
            parties = self._table.parties_at(instance)
            num_there = len(parties.keys() | {party})
            if not may_queue(parties[party], parties.total(), num_there):
                found.append(instance)
        return frozenset(found)

    def was_full(self, instance: InstanceId, *, is_counted: bool) -> None:
        """An instance had no room for a request, which may be counted there already."""
        if self._num_parties > 1:  # else there is nobody to share with
            now = time.monotonic()
            self._forget(now)
            taken = self._table.workers()[instance] - is_counted
            self._squeezes[instance] = Squeeze(taken, now)

    def _forget(self, now: float) -> None:
        for instance, squeeze in list(self._squeezes.items()):
            if squeeze.is_over(now):
                del self._squeezes[instance]
