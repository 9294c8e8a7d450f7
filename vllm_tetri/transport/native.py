"""The C++ core: what Python code of the engine uses."""

from vllm_tetri.transport._core import (
    Arena,
    Layout,
    Order,
    Receiver,
    Sender,
    Slot,
    SlotState,
    Status,
    Transfer,
    TransferState,
)

__all__ = ["Arena", "Layout", "Order", "Receiver", "Sender", "Slot", "SlotState", "Status"]
__all__ += ["Transfer", "TransferState"]
