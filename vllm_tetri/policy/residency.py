"""Which prefix blocks of KV lie at which instance, as instances report it. Pure.

A block is named by 8 bytes of vLLM's block hash, which is chained over all tokens before it, so
that one name stands for a whole prefix. Equal prompts have equal names at all instances. A name
that collides, or a report that is late, makes a placement worse and no output wrong.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_tetri.types import InstanceId

_MAX_LOOKED_AT = 1024


def names_of(packed: bytes) -> array[int]:
    """Return the names in bytes as `engine.residency` packs them, 8 for each."""
    names = array("Q")
    names.frombytes(packed)
    names.byteswap()
    return names


class Chain(NamedTuple):
    """Names of the blocks of one request, prompt and output, from its first token on."""

    names: Sequence[int]
    block_tokens: int

    def marks(self, most: int = 32) -> list[tuple[int, int]]:
        """Return pairs of a number of tokens and the name of the block that ends there, the longest
        first: each block of the end, then ever fewer."""
        count, step, found = len(self.names), 1, list[tuple[int, int]]()
        while count > 0 and len(found) < most:
            found.append((count * self.block_tokens, self.names[count - 1]))
            count -= step
            step += len(found) > most // 2 and step
        return found


class Residency:
    """The names that each instance has reported, and not taken back."""

    def __init__(self) -> None:
        self._names: dict[InstanceId, set[int]] = {}
        self._tails: dict[InstanceId, int] = {}

    def update(
        self,
        instance: InstanceId,
        added: Collection[int],
        removed: Collection[int],
        *,
        is_all: bool,
        tail_blocks: int = 0,
    ) -> None:
        """Record what came and went, or with `is_all` everything that is there. Of a prefix all
        blocks have to be there, or the last `tail_blocks`."""
        names = set() if is_all else self._names.get(instance, set())
        names.difference_update(removed)
        names.update(added)
        self._names[instance], self._tails[instance] = names, tail_blocks

    def retain(self, instances: Collection[InstanceId]) -> None:
        """Forget all but these instances."""
        for gone in self._names.keys() - set(instances):
            del self._names[gone], self._tails[gone]

    def count(self, instance: InstanceId) -> int:
        """Return how many blocks an instance has reported."""
        return len(self._names.get(instance, ()))

    def held_tokens(self, instance: InstanceId, chain: Chain) -> int:
        """Return how many tokens of a chain's start lie at an instance. vLLM evicts the end of a
        prefix before its start, so a search by halves finds the border."""
        names = self._names.get(instance)
        if not names or not chain.names:
            return 0
        if tail_blocks := self._tails[instance]:
            return _end_of_run(chain.names, names, tail_blocks) * chain.block_tokens
        if chain.names[0] not in names:
            return 0
        if chain.names[-1] in names:
            return len(chain.names) * chain.block_tokens
        held = bisect_left(chain.names, True, key=lambda name: name not in names)
        return held * chain.block_tokens


def _end_of_run(names: Sequence[int], held: Collection[int], least: int) -> int:
    """Return where the last run of at least so many names ends, or one from the first name on; 0
    if that is far from the end: to look takes 0.1 µs a name."""
    run, last = 0, len(names) - 1
    for at in range(last, max(-1, last - _MAX_LOOKED_AT), -1):
        run = run + 1 if names[at] in held else 0
        if run == least or (run and at == 0):
            return at + run
    return 0
