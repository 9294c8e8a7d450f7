"""Carries out orders: writes that the C++ core leaves to its caller.

One thread takes orders of a `Sender`, gives each to the wire of its kind as soon as that has
room, and ends it when the wire is done. The engine's thread only queues writes: it never waits for
a copy, a buffer or a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Protocol

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.device import DeviceEvent
from vllm_tetri.transport.native import Order, Sender

logger = logging.getLogger(__name__)

POLL_S = 100e-6  # while copies are under way
IDLE_S = 0.05  # without any; an order wakes the thread at once
CLOSE_S = 6.0  # the core waits 5 s for orders that were begun


class Pending(Protocol):
    """An order that a wire carries out; the event behind its copy is one."""

    def query(self) -> bool:
        """Whether the order's bytes were moved and nothing reads their source any more. Raises
        RuntimeError or TransferError if they will not be: then nothing reads it either."""
        ...


class Wire(Protocol):
    """Moves the bytes of orders of one kind. Called by the push thread only."""

    # False: it waits, with what follows to the same receiver, and nothing of it has begun.
    def has_room(self, order: Order) -> bool: ...
    def submit(self, order: Order, after: DeviceEvent | None) -> Pending:
        """Begin to move an order whose blocks are complete behind the event; never wait. Raises
        TransferError where this kind of link does not reach the receiver, RuntimeError or
        ValueError where this order alone fails."""
        ...

    def close(self) -> None: ...


def _oldest(waiting: tuple[object, deque[tuple[Order, float]]]) -> float:
    """Return the deadline of the first order in a queue."""
    return waiting[1][0][1]


class Push:
    """The push thread of a worker. Owns its wires. Close the sender first, then this."""

    def __init__(self, sender: Sender, wires: dict[str, Wire], timeout_s: float) -> None:
        self._sender, self._wires, self._timeout_s = sender, wires, timeout_s
        # By kind and receiver: one that is slow does not hold up the others.
        self._queues: dict[tuple[str, str], deque[tuple[Order, float]]] = {}
        self._under_way: list[tuple[Order, Pending]] = []
        self._marks: dict[int, DeviceEvent] = {}
        self._lock = threading.Lock()  # guards _marks and _tag
        self._tag = 0
        self._is_closing = False
        self._said: set[str] = set()  # failures in the log
        self._thread = threading.Thread(target=self._run, name="tetri-push", daemon=True)
        self._thread.start()

    def mark(self, event: DeviceEvent | None) -> int:
        """Return a tag for writes of blocks that are complete behind the event (engine thread)."""
        if event is None:
            return 0
        with self._lock:
            try:
                while self._marks and self._marks[tag := next(iter(self._marks))].query():
                    del self._marks[tag]
            except RuntimeError:
                pass  # the orders behind it fail
            self._tag += 1
            self._marks[self._tag] = event
            return self._tag

    def stop(self) -> None:
        """Begin no order any more; those under way go on. Call it before the sender closes."""
        self._is_closing = True

    def close(self) -> None:
        """Wait for orders under way and let go of the wires. Idempotent."""
        self.stop()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.error(
                "copies of KV blocks do not end: the device does not respond. Memory that they "
                "use stays as it is until this process ends."
            )
            return
        for wire in self._wires.values():
            wire.close()
        self._wires = {}

    def _run(self) -> None:
        while not self._is_closing or self._under_way:
            is_busy = self._under_way or self._queues
            order = self._sender.take_order(POLL_S if is_busy else IDLE_S)
            if order is None and self._is_closing:
                time.sleep(POLL_S)  # a closed sender does not wait
            elif order is not None and order.kind not in self._wires:
                self._fail(order, f"this instance has no link of kind {order.kind}")
            elif order is not None:
                deadline = time.monotonic() + self._timeout_s
                queue = self._queues.setdefault((order.kind, order.endpoint), deque())
                queue.append((order, deadline))
            for (kind, _), queue in sorted(self._queues.items(), key=_oldest):
                self._begin(kind, queue)
            self._queues = {key: queue for key, queue in self._queues.items() if queue}
            self._under_way = [each for each in self._under_way if not self._is_over(*each)]
        for queue in self._queues.values():
            for order, _ in queue:
                order.failed("the instance shuts down")
            queue.clear()

    def _begin(self, kind: str, queue: deque[tuple[Order, float]]) -> None:
        """Begin orders of a kind to a receiver in their order, as far as there is room."""
        wire = self._wires[kind]
        while queue and not self._is_closing:
            order, deadline = queue[0]
            if not wire.has_room(order):
                if time.monotonic() < deadline:
                    return
                self._fail(
                    order,
                    f"no staging buffer became free within {self._timeout_s:g} s, since receivers "
                    "are slow; give --tetri-transfer-timeout more time, or use a faster link",
                )
            elif order.begin():
                self._submit(wire, order)
            queue.popleft()

    def _submit(self, wire: Wire, order: Order) -> None:
        with self._lock:
            after = self._marks.get(order.tag)  # gone: it is over
        try:
            if not order.live():
                order.failed("the receiver gave the slot to another transfer")
                return
            self._under_way.append((order, wire.submit(order, after)))
        except TransferError as error:
            self._fail(order, str(error))
            self._sender.exclude(order.endpoint, order.kind)
        except Exception as error:
            self._fail(order, failure(error))

    def _is_over(self, order: Order, pending: Pending) -> bool:
        """Whether nothing has to be done for an order any more; ends it if it was moved."""
        try:
            if not pending.query():
                return False
        except Exception as error:
            self._fail(order, failure(error))
            return True
        if order.kind != "tcp":  # staged: its wire ended it
            order.placed()
        return True

    def _fail(self, order: Order, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.error(
                "pushing KV to %s over link %s failed: %s. Requests of such transfers are "
                "computed elsewhere; this is logged once.",
                order.endpoint, order.kind, text,
            )  # fmt: skip
        order.failed(text)


def failure(error: Exception) -> str:
    """Say what a device's error means. Its copies are over: after a CUDA error nothing runs."""
    if isinstance(error, RuntimeError) and not isinstance(error, TransferError):
        return f"the device failed, restart this instance: {error}"
    return str(error)
