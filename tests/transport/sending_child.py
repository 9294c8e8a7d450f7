"""A process that opens a transfer, sends a part of it, says so, and writes on and on."""

from __future__ import annotations

import sys
import time

import numpy as np

from vllm_tetri.transport.native import Layout, Sender, TransferState


def main(endpoint: str, link: str, key: str = "") -> None:
    pages = np.full((64, 65536), 0xAB, np.uint8)
    one = np.ones(1, np.uint64)
    layout = Layout(pages.ctypes.data * one, 65536 * one, 65536 * one, 64, pages)
    identity = {"model": "tiny", "block_size": "16"}
    sender = Sender(identity=identity, links=[link], key=bytes.fromhex(key))
    transfer = sender.open(endpoint, "child", 64, 65536)
    ids = np.arange(32, dtype=np.int32)
    transfer.write(layout, 0, ids)
    while transfer.bytes_sent == 0:
        time.sleep(0.001)
    print("sending", flush=True)
    while transfer.state == TransferState.SENDING:
        if transfer.bytes_sent % (32 * 65536) == 0:
            transfer.write(layout, 0, ids)
        time.sleep(0.0005)
    print(transfer.status.name, flush=True)
    sys.stdin.read()
    sender.close()


main(*sys.argv[1:])
