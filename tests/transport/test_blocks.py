"""Paged tensors as bytes, on whatever device is at hand. Needs torch, not vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.transport.conftest import Backend, ended
from vllm_tetri.transport.blocks import PAGE_GROUPS, HostMover, block_pages, distinct, mover_for
from vllm_tetri.transport.native import Arena, Layout, TransferState

NUM_BLOCKS = 12


def caches(fill: bool) -> list[torch.Tensor]:
    """Three layers, two of them strided views of one allocation."""
    shape = (NUM_BLOCKS, 2, 16, 8)
    interleaved = torch.zeros((NUM_BLOCKS, 2, 2, 16, 8), dtype=torch.bfloat16)
    layers = [interleaved[:, 0], interleaved[:, 1]]
    layers.append(torch.zeros(shape, dtype=torch.float32))
    if fill:
        for seed, layer in enumerate(layers):
            generator = torch.Generator().manual_seed(seed)
            layer.copy_(torch.randn(layer.shape, generator=generator).to(layer.dtype))
    return layers


def test_blocks_arrive_where_they_belong(shm: Backend) -> None:
    receiver = shm.receiver()
    source, target = caches(fill=True), caches(fill=False)
    out, into = mover_for(source, NUM_BLOCKS), mover_for(target, NUM_BLOCKS)
    transfer = shm.sender().open(receiver.endpoint, "t", 5, out.layout.block_bytes)
    transfer.write(out.layout, 0, np.asarray([3, 1], dtype=np.int32))
    transfer.write(out.layout, 2, np.asarray([7, 11, 0], dtype=np.int32))
    transfer.finish()
    assert ended(transfer) is TransferState.DONE, transfer.error
    slot = receiver.take("t")
    assert slot is not None
    arena = Arena(receiver.segment)
    into.scatter(arena, [(slot.offset, None)], 1, np.asarray([4, 9, 2, 8], dtype=np.int32), None)
    for mine, theirs in zip(target, source, strict=True):
        assert torch.equal(mine[[4, 9, 2, 8]], theirs[[1, 7, 11, 0]])
        untouched = [0, 1, 3, 5, 6, 7, 10, 11]
        assert not mine[untouched].any()
    receiver.release("t")
    arena.close()


def test_a_block_may_be_several_rows() -> None:
    """Kernel blocks can be smaller than the cache manager's."""
    tensor = torch.zeros((NUM_BLOCKS * 4, 2, 8), dtype=torch.float32)
    assert block_pages(tensor, NUM_BLOCKS) == (4 * 64, 4 * 64)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros((NUM_BLOCKS, 4, 8))[:, :, ::2],
        torch.zeros((NUM_BLOCKS * 2, 2, 8))[:, :1],
        torch.zeros((NUM_BLOCKS + 1, 8)),
        torch.zeros((4, 8)),
    ],
    ids=["holes", "cut", "rows left over", "too few rows"],
)
def test_a_block_that_is_not_one_run_of_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"rows|dense"):
        block_pages(tensor, NUM_BLOCKS)


def test_a_transposed_block_is_still_dense() -> None:
    tensor = torch.zeros((NUM_BLOCKS, 4, 8)).transpose(1, 2)
    assert block_pages(tensor, NUM_BLOCKS) == (128, 128)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        mover_for([torch.zeros((NUM_BLOCKS, 8), device="meta")], NUM_BLOCKS)


def test_layers_that_share_memory_are_moved_once() -> None:
    memory = torch.zeros((2, NUM_BLOCKS, 64), dtype=torch.uint8)  # as vLLM has KV cache groups
    full, window = [memory[0], memory[1]], [memory[0]]
    state = memory[1, :, :40].view(torch.bfloat16)
    found = distinct([*window, state, *full], NUM_BLOCKS)
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in full]
    overlapping = memory.view(-1)[32:-32].view(-1, 64)
    with pytest.raises(ValueError, match="overlap"):
        distinct([memory[0], overlapping[:NUM_BLOCKS]], NUM_BLOCKS)


def pages_of(part: Layout | None) -> int:
    """Number of pages that a part gives out."""
    return 0 if part is None else len(part.starts)


def test_pages_are_given_out_in_order_as_their_layers_are_done() -> None:
    layers = {f"layer{i}": torch.zeros(NUM_BLOCKS, 8) for i in range(4)}
    progress = HostMover(list(layers.values()), NUM_BLOCKS).progress(layers)
    for _ in range(2):  # forward passes
        progress.begin()
        assert pages_of(progress.record("layer0")) == 1
        assert pages_of(progress.record("layer2")) == 0  # page 1 is missing
        assert pages_of(progress.record("unknown")) == 0
        assert pages_of(progress.record("layer1")) == 2
        assert progress.num_given == 3
        assert pages_of(progress.record(None)) == 1
        assert pages_of(progress.record(None)) == 0


def test_a_page_that_layers_share_waits_for_all_of_them() -> None:
    shared, other = torch.zeros(NUM_BLOCKS, 8), torch.zeros(NUM_BLOCKS, 8)
    layers = {"full": shared, "sliding": shared, "last": other}
    progress = HostMover(list(layers.values()), NUM_BLOCKS).progress(layers)
    assert pages_of(progress.record("full")) == 0
    assert pages_of(progress.record("sliding")) == 1
    assert pages_of(progress.record("full")) == 0  # more often than expected
    assert pages_of(progress.record("last")) == 0
    assert pages_of(progress.record(None)) == 1


def test_many_pages_leave_in_few_parts() -> None:
    layers = {f"layer{i}": torch.zeros(NUM_BLOCKS, 8) for i in range(80)}
    progress = HostMover(list(layers.values()), NUM_BLOCKS).progress(layers)
    parts = [pages_of(progress.record(name)) for name in layers]
    assert sum(parts) == 80
    assert len([each for each in parts if each]) == PAGE_GROUPS
