"""Paged tensors as bytes, on whatever device is at hand. Needs torch, not vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.transport.conftest import Backend, ended
from vllm_tetri.transport.blocks import BlockMover, block_pages, distinct
from vllm_tetri.transport.cuda import mover_for
from vllm_tetri.transport.native import Arena, Transfer, TransferState

NUM_BLOCKS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def caches(device: str, fill: bool) -> list[torch.Tensor]:
    """Three layers, two of them strided views of one allocation."""
    shape = (NUM_BLOCKS, 2, 16, 8)
    interleaved = torch.zeros((NUM_BLOCKS, 2, 2, 16, 8), dtype=torch.bfloat16, device=device)
    layers = [interleaved[:, 0], interleaved[:, 1]]
    layers.append(torch.zeros(shape, dtype=torch.float32, device=device))
    if fill:
        for seed, layer in enumerate(layers):
            generator = torch.Generator().manual_seed(seed)
            layer.copy_(torch.randn(layer.shape, generator=generator).to(layer.dtype))
    return layers


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_arrive_where_they_belong(device: str, shm: Backend) -> None:
    receiver = shm.receiver()
    source, target = caches(device, fill=True), caches(device, fill=False)
    out, into = mover_for(source, NUM_BLOCKS), mover_for(target, NUM_BLOCKS)
    transfer = shm.sender().open(receiver.endpoint, "t", 5, out.block_bytes)
    sent = [send(out, transfer, 0, [3, 1]), send(out, transfer, 2, [7, 11, 0])]
    transfer.finish()
    assert ended(transfer) is TransferState.DONE, transfer.error
    slot = receiver.take("t")
    assert slot is not None
    arena = Arena(receiver.segment)
    into.scatter(arena, [(slot.offset, None)], 1, np.asarray([4, 9, 2, 8], dtype=np.int32))
    into.settle()
    for mine, theirs in zip(target, source, strict=True):
        assert torch.equal(mine[[4, 9, 2, 8]], theirs[[1, 7, 11, 0]])
        untouched = [0, 1, 3, 5, 6, 7, 10, 11]
        assert not mine[untouched].any()
    receiver.release("t")
    arena.close()
    assert sent


def send(mover: BlockMover, transfer: Transfer, first: int, ids: list[int]) -> object:
    gathered = mover.gather(np.asarray(ids, dtype=np.int32))
    while not gathered.is_ready():
        pass
    transfer.write(gathered.layout, first, gathered.block_ids)
    return gathered


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
