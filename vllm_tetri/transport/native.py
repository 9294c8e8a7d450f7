"""The C++ core with this package's errors: what Python code of the engine uses.

Everything of `_core` is available here; three functions turn its answers into
exceptions for callers that want those.
"""

from __future__ import annotations

import time

from vllm_tetri.errors import (
    PeerLost,
    TransferClosed,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from vllm_tetri.transport._core import (
    Arena,
    Layout,
    Receiver,
    ReceiverStats,
    Sender,
    SenderStats,
    Slot,
    SlotState,
    Status,
    Transfer,
    TransferState,
    copy_blocks,
)

__all__ = [
    "Arena",
    "Layout",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "SenderStats",
    "Slot",
    "SlotState",
    "Status",
    "Transfer",
    "TransferState",
    "copy_blocks",
    "error_of",
    "is_over",
    "open_receiver",
    "wait_done",
]

_ERRORS: dict[Status, type[TransferError]] = {
    Status.FULL: TransferRefused,
    Status.REFUSED: TransferRefused,
    Status.TIMEOUT: TransferTimeout,
    Status.PEER_LOST: PeerLost,
    Status.CLOSED: TransferClosed,
}
_OVER = (TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)


def open_receiver(
    *,
    arena_bytes: int,
    identity: dict[str, str],
    host: str = "127.0.0.1",
    port: int = 0,
    fill_timeout_s: float = 30.0,
    hold_timeout_s: float = 60.0,
    key: bytes = b"",
) -> Receiver:
    """A receiver on ``host:port``; the caller closes it. Senders must prove that they hold
    the key, unless it is empty.

    Raises:
        TransferError: The arena does not fit into /dev/shm, or the address
            cannot be bound.
    """
    try:
        return Receiver(
            arena_bytes=arena_bytes,
            host=host,
            port=port,
            identity=identity,
            fill_timeout_s=fill_timeout_s,
            hold_timeout_s=hold_timeout_s,
            key=key,
        )
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"KV receiver on {host}:{port}: {error}") from error


def is_over(transfer: Transfer) -> bool:
    """Whether the transfer has reached its last state."""
    return transfer.state in _OVER


def error_of(transfer: Transfer) -> TransferError | None:
    """Why a transfer failed or was cancelled; None while it runs and when it is done."""
    if transfer.state not in (TransferState.FAILED, TransferState.CANCELLED):
        return None
    kind = _ERRORS.get(transfer.status, TransferError)
    return kind(f"transfer {transfer.name}: {transfer.error}")


def wait_done(sender: Sender, transfer: Transfer, timeout_s: float) -> None:
    """Wait until the receiver has confirmed everything.

    Raises:
        TransferTimeout: It has not within ``timeout_s``; the transfer goes on.
        TransferError: The transfer failed or was cancelled.
    """
    deadline = time.monotonic() + timeout_s
    while not is_over(transfer):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeout(f"transfer {transfer.name}: not done after {timeout_s} s")
        sender.wait(min(left, 0.05))  # another waiter may take the news
    error = error_of(transfer)
    if error is not None:
        raise error
