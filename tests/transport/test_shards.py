"""KV between instances with other numbers of ranks: every byte goes where its head is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.transport.conftest import Backend, ended
from tests.transport.fake_device import FakeDevice
from vllm_tetri.transport.blocks import BlockMover, DeviceMover, mover_for
from vllm_tetri.transport.native import Arena, Layout, TransferState
from vllm_tetri.transport.shards import Shards, head_pages

BLOCKS, HEADS, TOKENS = 7, 4, 16
CONTENTS = (32, 48, 32)  # bytes that one head has of one token, by layer
SOURCE, TARGET = [3, 1, 6], [2, 5, 0]
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (8, 1), (1, 8), (8, 2)]
SIZES += [(2, 8), (4, 8), (8, 8)]  # eight ranks have four heads: replicas
# Dimensions by stride, the longest first, and whether a block has all layers one after another.
LAYOUTS = {"LBHNC": ((0, 1, 2, 3), False), "LBNHC": ((0, 2, 1, 3), False),
           "BLHNC": ((0, 1, 2, 3), True), "BLNHC": ((0, 2, 1, 3), True)}  # fmt: skip


def model() -> list[torch.Tensor]:
    """The KV of all heads by layer, as [block, head, token, content]."""
    dice = torch.Generator().manual_seed(7)
    shapes = [(BLOCKS, HEADS, TOKENS, content) for content in CONTENTS]
    return [torch.randint(256, each, dtype=torch.uint8, generator=dice) for each in shapes]


def caches(layout: str, heads: int, rows: int = 1) -> list[torch.Tensor]:
    """A rank's empty tensors, of blocks that have several rows each."""
    order, is_interleaved = LAYOUTS[layout]
    made, sizes = [], [heads * TOKENS * content for content in CONTENTS]
    memory = torch.zeros((BLOCKS, sum(sizes)), dtype=torch.uint8)
    for content, page in zip(CONTENTS, memory.split(sizes, dim=1), strict=True):
        shape = (BLOCKS * rows, heads, TOKENS // rows, content)
        inner = [shape[dim] for dim in order]
        if is_interleaved:
            tensor = page.unflatten(1, inner[1:])
        else:
            tensor = torch.zeros(inner, dtype=torch.uint8)
        made.append(tensor.permute(*np.argsort(order).tolist()))
    return made


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """The content of blocks, each of one or more rows, as [block, head, token, content]."""
    rows = tensor.shape[0] // BLOCKS
    return tensor.unflatten(0, (BLOCKS, rows)).transpose(1, 2).flatten(2, 3)


class Instance:
    """Ranks of one tensor-parallel size, which hold the whole model's heads if `full` is given."""

    def __init__(self, num_ranks: int, layout: str, *, rows: int = 1, full: Any = None) -> None:
        parts = min(num_ranks, HEADS)
        heads = HEADS // parts
        self.ranks = [caches(layout, heads, rows) for _ in range(num_ranks)]
        pages = head_pages(self.ranks[0], BLOCKS, heads)
        self.shards = Shards(num_ranks, parts, HEADS, pages)
        self.movers: list[BlockMover] = [mover_for(each, BLOCKS) for each in self.ranks]
        for rank, tensors in enumerate(self.ranks if full else []):
            for tensor, whole in zip(tensors, full, strict=True):
                mine = whole[:, self.heads(rank)].unflatten(2, (rows, TOKENS // rows))
                tensor.copy_(mine.transpose(1, 2).flatten(0, 1))

    def heads(self, rank: int) -> slice:
        count, part = HEADS // self.shards.num_parts, self.shards.part_of(rank)
        return slice(part * count, (part + 1) * count)

    def send(self, core: Backend, receiver: Any) -> None:
        """Send blocks of all shards, each by the first rank that has it."""
        found = []
        for rank, mover in enumerate(self.movers):
            if self.shards.sends(rank):
                part, count = self.shards.part_of(rank), self.shards.num_parts
                sender = core.sender(rank=part, num_ranks=count)
                transfer = sender.open(
                    receiver.endpoint, "t", len(SOURCE), mover.layout.block_bytes
                )
                transfer.write(mover.layout, 0, np.asarray(SOURCE, dtype=np.int32))
                transfer.finish()
                found.append(transfer)
        for transfer in found:
            assert ended(transfer) is TransferState.DONE, transfer.error

    def load(self, arena: Arena, slot: Any) -> None:
        """Load the blocks in two orders, the last ones first."""
        for rank, mover in enumerate(self.movers):
            parts = self.shards.sources(rank, slot.num_ranks)
            sources = [(slot.offset + part * slot.rank_bytes, cut) for part, cut in parts]
            for first, last in ((1, 3), (0, 1)):
                mover.scatter(
                    arena, sources, first, np.asarray(TARGET[first:last], dtype=np.int32), None
                )


def hand_over(core: Backend, sender: Instance, target: Instance) -> Any:
    """Send and load; returns the slot."""
    receiver = core.receiver()
    sender.send(core, receiver)
    slot = receiver.take("t")
    arena = Arena(receiver.segment)
    target.load(arena, slot)
    arena.close()
    return slot


def assert_holds(target: Instance, full: list[torch.Tensor]) -> None:
    untouched = [block for block in range(BLOCKS) if block not in TARGET]
    for rank, tensors in enumerate(target.ranks):
        for tensor, whole in zip(tensors, full, strict=True):
            found = content_of(tensor.cpu())
            assert torch.equal(found[TARGET], whole[SOURCE][:, target.heads(rank)])
            assert not found[untouched].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_heads_arrive_whatever_the_sizes(
    shm: Backend, prefill: int, decode: int, layout: str
) -> None:
    full = model()
    sender = Instance(prefill, layout, full=full)
    target = Instance(decode, layout)
    slot = hand_over(shm, sender, target)
    assert slot.num_ranks == min(prefill, HEADS)
    assert slot.num_ranks * slot.rank_bytes == sum(whole[SOURCE].nbytes for whole in full)
    assert_holds(target, full)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (4, 2)])
def test_a_block_of_several_rows_is_cut(
    core: Backend, prefill: int, decode: int, layout: str
) -> None:
    full = model()
    target = Instance(decode, layout, rows=4)
    hand_over(core, Instance(prefill, layout, rows=4, full=full), target)
    assert_holds(target, full)


def test_one_run_per_head_range_where_heads_are_outermost() -> None:
    half, whole = Instance(2, "LBHNC").shards, Instance(1, "LBHNC").shards
    assert [len(cut.sizes) for _, cut in whole.sources(0, 2) if cut] == [len(CONTENTS)] * 2
    assert [part for part, _ in Instance(4, "LBHNC").shards.sources(3, 2)] == [1]
    assert half.sources(1, 2) == [(1, None)]  # as it is, in one piece


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2)])
def test_a_device_copies_its_heads_from_parts(
    shm: Backend, prefill: int, decode: int, layout: str
) -> None:
    full, receiver, device = model(), shm.receiver(), FakeDevice()
    Instance(prefill, layout, full=full).send(shm, receiver)
    target = Instance(decode, layout)
    for tensors in target.ranks:
        device.own(*tensors)
    target.movers = [DeviceMover(device, tensors, BLOCKS) for tensors in target.ranks]
    slot, arenas = receiver.take("t"), [Arena(receiver.segment) for _ in target.ranks]
    for rank, (mover, mapping) in enumerate(zip(target.movers, arenas, strict=True)):
        parts = target.shards.sources(rank, slot.num_ranks)
        sources = [(slot.offset + part * slot.rank_bytes, cut) for part, cut in parts]
        mover.scatter(mapping, sources, 0, np.asarray(TARGET, dtype=np.int32), device.mark())
        mover.close()
        for tensor, whole in zip(target.ranks[rank], full, strict=True):
            mine = content_of(tensor)[TARGET]
            assert torch.equal(mine, whole[SOURCE][:, target.heads(rank)])
        mapping.close()
    device.close()
    assert device.faults == []


def test_copies_of_a_load_that_fails_are_over_when_it_says_so(shm: Backend) -> None:
    """Its blocks may be given to another request then."""
    full, receiver, device = model(), shm.receiver(), FakeDevice(delay_s=0.1)
    Instance(1, "LBHNC", full=full).send(shm, receiver)
    (tensors,) = Instance(1, "LBHNC").ranks
    device.own(*tensors)
    mover, slot = DeviceMover(device, tensors, BLOCKS), receiver.take("t")
    arena = Arena(receiver.segment)
    sources = [(slot.offset, None), (arena.num_bytes, None)]
    with pytest.raises(ValueError, match="are not in the arena"):
        mover.scatter(arena, sources, 0, np.asarray(TARGET[:1], dtype=np.int32), device.mark())
    for tensor, whole in zip(tensors, full, strict=True):
        assert torch.equal(content_of(tensor)[TARGET[:1]], whole[SOURCE][:1])
    mover.close()
    arena.close()
    device.close()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4)])
def test_one_rank_sends_what_all_have(shm: Backend, prefill: int, decode: int) -> None:
    full = [whole[:, :1] for whole in model()]  # latents: every rank has the same
    given, empty = ([whole.clone() * fill for whole in full] for fill in (1, 0))
    receiver = shm.receiver()
    shards, others = (Shards(count, num_parts=1, num_heads=1) for count in (prefill, decode))
    assert [shards.sends(rank) for rank in range(prefill)] == [True] + [False] * (prefill - 1)
    out, into = mover_for(given, BLOCKS), mover_for(empty, BLOCKS)
    transfer = shm.sender().open(receiver.endpoint, "t", len(SOURCE), out.layout.block_bytes)
    transfer.write(out.layout, 0, np.int32(SOURCE))
    transfer.finish()
    assert ended(transfer) is TransferState.DONE, transfer.error
    slot, arena = receiver.take("t"), Arena(receiver.segment)
    for rank in range(decode):
        assert others.sources(rank, slot.num_ranks) == [(0, None)]
    into.scatter(arena, [(slot.offset, None)], 0, np.asarray(TARGET, dtype=np.int32), None)
    for mine, whole in zip(empty, full, strict=True):
        assert torch.equal(mine[TARGET], whole[SOURCE])
    arena.close()


def test_sizes_that_do_not_divide_are_refused() -> None:
    pages = Instance(1, "LBHNC").shards.pages
    six = Shards(2, 2, 6, pages)
    assert [count for count in range(8) if six.can_read(count)] == [1, 2, 3, 6]
    with pytest.raises(ValueError, match="4 shards"):
        six.sources(0, 4)
    blind = Shards(2, 2)
    assert [count for count in range(8) if blind.can_read(count)] == [2]
    assert [(part, cut is None) for part, cut in Shards(2, 2).sources(1, 2)] == [(1, True)]
    with pytest.raises(ValueError, match="1 shards"):
        blind.sources(0, 1)
    thirds = [[part for part, _ in Shards(3, 3, 6, pages).sources(rank, 2)] for rank in range(3)]
    assert thirds == [[0], [0, 1], [1]]


def test_heads_are_found_only_where_they_are_known_to_be() -> None:
    tensors = caches("LBHNC", 2)
    assert [page.repeats for page in head_pages(tensors, BLOCKS, 2)] == [1] * len(CONTENTS)
    assert [page.repeats for page in head_pages(caches("LBNHC", 1), BLOCKS, 1)] == [16] * 3
    assert head_pages(tensors, BLOCKS, 4) == ()
    assert head_pages([each.flatten(2) for each in tensors], BLOCKS, 2) == ()
    again, smaller = (
        tensors[0][...],
        tensors[0].flatten(1)[:, : 2 * 16 * 16].unflatten(1, (2, 16, 16)),
    )
    assert len(head_pages([*tensors, again], BLOCKS, 2)) == len(CONTENTS)
    assert head_pages([*tensors, smaller], BLOCKS, 2) == ()


@pytest.mark.parametrize(
    ("starts", "wire_bytes"),
    [([0, 32], 96), ([0, 64], 127), ([64, 0], 128), ([0], 128), ([0, 2**63], 2**63), ([0, 64], 0)],
)
def test_pieces_that_overlap_or_lie_outside_are_refused(starts: list[int], wire_bytes: int) -> None:
    memory = np.zeros(1024, dtype=np.uint8)
    two = np.asarray([memory.ctypes.data, memory.ctypes.data + 512], dtype=np.uint64)
    sizes = np.asarray([64, 64], dtype=np.uint64)
    with pytest.raises(ValueError, match=r"pieces|layout"):
        Layout(two, sizes, sizes, 4, memory, np.asarray(starts, dtype=np.uint64), wire_bytes)
