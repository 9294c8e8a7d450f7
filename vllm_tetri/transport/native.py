"""The C++ core with this package's errors: what Python code of the engine uses."""

from __future__ import annotations

from vllm_tetri.errors import TransferError
from vllm_tetri.transport._core import (
    Arena,
    Layout,
    Order,
    Receiver,
    ReceiverStats,
    Sender,
    Slot,
    SlotState,
    Status,
    Transfer,
    TransferState,
)

__all__ = ["Arena", "Layout", "Order", "Receiver", "ReceiverStats", "Sender", "Slot"]
__all__ += ["SlotState", "Status", "Transfer", "TransferState", "open_receiver"]


def open_receiver(
    *,
    arena_bytes: int,
    identity: dict[str, str],
    host: str = "127.0.0.1",
    port: int = 0,
    fill_timeout_s: float = 30.0,
    hold_timeout_s: float = 60.0,
    key: bytes = b"",
    has_host_memory: bool = True,
) -> Receiver:
    """Open a receiver on a port of `host`, 0 for a free one; the caller closes it. Senders must
    prove that they hold the key, unless it is empty. Without host memory, slots are in memory that
    the caller owns and offers. TransferError if the arena does not fit into
    /dev/shm, or the address cannot be bound."""
    try:
        return Receiver(
            arena_bytes=arena_bytes,
            host=host,
            port=port,
            identity=identity,
            fill_timeout_s=fill_timeout_s,
            hold_timeout_s=hold_timeout_s,
            key=key,
            has_host_memory=has_host_memory,
        )
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"KV receiver on {host}: {error}") from error
