"""Which prefix blocks lie where."""

from __future__ import annotations

from random import Random

import pytest

from vllm_tetri.policy.residency import Chain, Residency, names_of
from vllm_tetri.types import InstanceId

A, B = InstanceId("a"), InstanceId("b")


def test_the_start_of_a_chain_that_lies_at_an_instance() -> None:
    residency = Residency()
    residency.update(A, [1, 2, 3], [], is_all=False)
    chain = Chain([1, 2, 3, 4, 5], 16)
    assert residency.held_tokens(A, chain) == 48
    assert residency.held_tokens(B, chain) == 0
    residency.update(A, [4], [1], is_all=False)
    assert residency.held_tokens(A, chain) == 0
    residency.update(A, [1], [], is_all=True)
    assert residency.held_tokens(A, chain) == 16
    assert residency.count(A) == 1
    residency.retain([B])
    assert residency.count(A) == residency.held_tokens(A, chain) == 0


@pytest.mark.parametrize(
    ("held", "tokens"),
    [([3, 4], 4), ([3, 4, 5], 5), ([4], 0), ([1], 1), ([1, 2, 4], 2), ([2, 3, 5], 3), ([], 0)],
)
def test_of_windows_the_last_blocks_of_a_prefix_have_to_be_there(
    held: list[int], tokens: int
) -> None:
    residency, chain = Residency(), Chain([1, 2, 3, 4, 5], 1)
    residency.update(A, held, [], is_all=True, tail_blocks=2)
    assert residency.held_tokens(A, chain) == tokens
    residency.update(A, [10, 11], [], is_all=True, tail_blocks=2)
    assert residency.held_tokens(A, Chain(range(1000), 1)) == 12
    assert residency.held_tokens(A, Chain(range(9000), 1)) == 0  # not looked at


def test_it_follows_what_is_reported() -> None:
    rng, residency, model = Random(0), Residency(), dict[InstanceId, set[int]]()
    for _ in range(2000):
        name = rng.choice([A, B])
        held = model.setdefault(name, set())
        added = {rng.randrange(60) for _ in range(4)}
        removed = {each for each in held if rng.random() < 0.1} - added
        is_all = rng.random() < 0.05
        residency.update(name, added, removed, is_all=is_all)
        model[name] = added if is_all else (held - removed) | added
        assert residency.count(name) == len(model[name])
        length = next(at for at in range(61) if at not in model[name])
        chain = Chain(range(length), 8)  # vLLM evicts ends first, so what is held has no holes
        assert residency.held_tokens(name, chain) == 8 * length


def test_names_are_numbers_of_eight_bytes() -> None:
    assert list(names_of(bytes(7) + b"\x01" + bytes(6) + b"\x01\x02")) == [1, 258]
    with pytest.raises(ValueError, match="bytes"):
        names_of(bytes(9))


def test_marks_of_a_chain_are_dense_at_its_end() -> None:
    chain = Chain(range(1000, 2000), 16)
    marks = chain.marks(32)
    tokens = [each for each, _ in marks]
    assert 20 < len(marks) <= 32
    assert tokens[:16] == [16 * each for each in range(1000, 984, -1)]
    assert tokens == sorted(tokens, reverse=True)
    assert min(tokens) < 16 * 500  # each of these is twice as far from the end as the one before
    assert all(chain.names[each // 16 - 1] == name for each, name in marks)
    assert Chain([], 16).marks() == []
