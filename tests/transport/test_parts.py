"""Writes that fill only some pages of each block, over each link."""

from __future__ import annotations

import numpy as np
import pytest

from tests.transport.conftest import Backend, ended, fails
from vllm_tetri.transport.native import Status, TransferState


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_of_blocks_arrive_as_whole_blocks(core: Backend, num_parts: int) -> None:
    receiver, sender = core.receiver(), core.sender()
    cache = core.cache(num_layers=5, num_blocks=16, page_bytes=768, gap=32, seed=1)
    ids = np.arange(15, 5, -1, dtype=np.int32)
    transfer = sender.open(receiver.endpoint, "t", len(ids), cache.layout.block_bytes)
    for pages in np.array_split(np.arange(5), num_parts):
        part = cache.layout.part(int(pages[0]), len(pages))
        assert transfer.write(part, 0, ids[:4]) == Status.OK
        assert transfer.write(part, 4, ids[4:]) == Status.OK
    transfer.finish()
    assert ended(transfer) == TransferState.DONE, transfer.error
    assert transfer.bytes_sent == len(ids) * cache.layout.block_bytes
    assert core.arrived(receiver, "t", cache) == cache.bytes_of(ids)


def test_a_block_of_which_a_part_is_missing_is_not_complete(core: Backend) -> None:
    receiver, sender, cache = core.ends()
    transfer = sender.open(receiver.endpoint, "t", 2, cache.layout.block_bytes)
    transfer.write(cache.layout, 0, np.array([0], np.int32))
    transfer.write(cache.layout.part(1, 1), 1, np.array([1], np.int32))
    transfer.finish()
    fails(transfer, Status.INVALID, "block 1 of 2 was never written, or not all of it")


def test_a_part_is_made_of_pages_that_are_there(shm: Backend) -> None:
    layout = shm.cache(num_layers=3, page_bytes=512).layout
    part = layout.part(1, 2)
    assert part.block_bytes == layout.block_bytes
    assert part.starts.tolist() == [512, 1024]
    assert part.part(1, 1).bases.tolist() == layout.bases.tolist()[2:]
    for first, count in ((3, 1), (0, 4), (1, 0)):
        with pytest.raises(ValueError, match="of a layout with 3 pages"):
            layout.part(first, count)
