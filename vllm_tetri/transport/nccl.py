"""KV over NCCL, from a device's memory into an arena in another device's. Has not run on a GPU.

NCCL has no one-sided writes: the receiving worker posts a receive for each write. A side channel
(docs/protocol.md) tells it of writes; each end of one is a thread, and blocks nothing else.

What is posted occupies part of a device until its other half is posted, so a write is announced
when its blocks are complete. A slot is let go when the event behind its receive has passed: where
the sender is gone or late, aborting the communicator sees to that.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from vllm_tetri.errors import TransferError
from vllm_tetri.transport import device as devices
from vllm_tetri.transport.device import CudaDevice, DeviceEvent
from vllm_tetri.transport.native import Arena, Order

logger = logging.getLogger(__name__)

MAX_ORDERS = 16  # of a pair, announced and not done
MOST_FAILURES = 2  # to open a pair
MOST_OPENING = 64  # pairs of a receiver
MOST_BYTES = 512  # of a message
POLL_S, IDLE_S = 200e-6, 0.05
CLOSE_S = 5.0
PAUSE = struct.pack("ll", 5, 0)  # longest one within a message: seconds, microseconds
# Messages by their first byte.
HELLO, WELCOME, READY, ANNOUNCE, POSTED, DONE, REFUSED = (bytes([each]) for each in b"HWRAPDX")
TOKEN_BYTES, ID_BYTES = 32, 128
PLACE = struct.Struct("<IQQQ")  # control word and generation of a slot; offset and bytes
HANDLE = struct.Struct(f"<IH{TOKEN_BYTES}s")  # version of NCCL, port, token; host follows
_UINT8 = 1  # of ncclDataType_t


@dataclass(slots=True)
class _Gear:
    """A device, NCCL's library (vLLM's `NCCLLibrary`), and lanes that are free: streams, of which
    CUDA has few, each with some memory."""

    device: CudaDevice
    library: Any
    timeout_s: float
    lane_bytes: int
    lanes: list[tuple[Any, int]] = field(default_factory=list)

    def take(self) -> tuple[Any, int]:
        """Return a lane; one thread calls this."""
        if self.lanes:
            return self.lanes.pop()
        return self.device.make_stream(), self.device.reserve(self.lane_bytes)


class _Pair(threading.Thread):
    """One end of a sender and a receiver: a thread that makes the communicator, works until there
    is a problem, and then aborts what is posted."""

    rank: ClassVar[int]  # 0 sends, 1 receives
    line: Connection  # the side channel

    def __init__(self, gear: _Gear) -> None:
        super().__init__(name="tetri-nccl", daemon=True)
        self.gear = gear
        self.stop = ""  # why another thread wants it to end
        self.problem = ""  # why it ends: from now on nothing is posted
        self.is_open = self.is_over = False  # over: nothing that was posted touches memory
        self.event: DeviceEvent | None = None  # behind all that was posted
        self.lane = gear.take()
        self._communicator: Any = None
        self.goes_on()

    def open(self) -> None: ...  # agrees with the other end, and meets it
    def turn(self) -> None: ...  # does what there is to do, or waits a moment

    def run(self) -> None:
        try:
            self.open()
            self.is_open = True  # before it looks at `stop`: see `_Write.query`
            while not self.stop:
                self.turn()
            self.problem = self.stop
        except Exception as error:  # a fault of a peer, NCCL or the device ends this pair alone
            self.problem = self.stop or str(error) or "the other side closed the connection"
        if hasattr(self, "line"):
            self.line.close()
        if self._communicator is not None:
            with suppress(RuntimeError):  # what was posted has an event that tells
                self.gear.library.ncclCommAbort(self._communicator)
        while self.event is not None and not devices.has_passed(self.event):
            time.sleep(POLL_S)
        self.gear.lanes.append(self.lane)
        self.is_over = True

    def goes_on(self) -> None:
        """Begin the time in which the other end has to go on."""
        self.deadline = time.monotonic() + self.gear.timeout_s

    def wait(self) -> None:
        """Wait a moment for the other end; TransferError if it is late."""
        if self.stop or time.monotonic() > self.deadline:
            raise TransferError(f"the other side does nothing for {self.gear.timeout_s:g} s")
        time.sleep(POLL_S)

    def expect(self, kind: bytes) -> bytes:
        """Return what a message of this kind says; TransferError if another one comes, or none."""
        while not self.line.poll():
            self.wait()
        message = self.line.recv_bytes(MOST_BYTES)
        if message[:1] == kind:
            return message[1:]
        raise TransferError(f"the other side refuses: {message[1:].decode(errors='replace')}")

    def meet(self, unique_id: bytes) -> None:
        """Make the communicator, and post a first byte. Both wait for the other end in NCCL; what
        is posted later does not."""
        library, made = self.gear.library, list[Any]()
        unique, rank = library.unique_id_from_bytes(unique_id), self.rank
        join = library.ncclCommInitRank
        self.gear.device.queue(self.lane[0], lambda _: made.append(join(2, unique, rank)))
        self._communicator = made[0]
        if not self.stop:
            self.post(self.lane[1], 1)

    def post(self, address: int, size: int) -> DeviceEvent:
        """Post a send or a receive; the event comes behind it."""
        library = self.gear.library
        call = library.ncclRecv if self.rank else library.ncclSend
        data = address, size, _UINT8, 1 - self.rank, self._communicator
        self.event = self.gear.device.queue(self.lane[0], lambda stream: call(*data, stream))
        return self.event


class _Outbound(_Pair):
    """The sender's end."""

    rank = 0

    def __init__(self, gear: _Gear, offer: bytes, num_failures: int) -> None:
        self.num_failures = num_failures
        self._segment, self.num_bytes, handle = devices.read_offer(offer)
        version, port, self._token = HANDLE.unpack_from(handle)
        self._address = handle[HANDLE.size :].decode(), port
        if version // 10000 != (own := gear.library.ncclGetRawVersion()) // 10000:
            raise TransferError(
                f"NCCL {own // 10000}.x here and {version // 10000}.x at the receiver do "
                "not work together: install the same version, or set --tetri-link auto on both"
            )
        super().__init__(gear)
        self.waiting, self.wake = deque[_Write](), threading.Event()
        self._announced, self._posted = deque[_Write](), deque[_Write]()
        self.start()

    def open(self) -> None:
        self.line = line_of(socket.create_connection(self._address, self.gear.timeout_s))
        unique_id = bytes(self.gear.library.ncclGetUniqueId().internal)
        self.line.send_bytes(HELLO + self._token + unique_id + self._segment.encode())
        self.expect(WELCOME)
        self.meet(unique_id)
        self.expect(READY)

    def turn(self) -> None:
        self.wake.clear()
        num_busy = len(self._announced) + len(self._posted)
        after = self.waiting[0].after if self.waiting else None
        is_complete = after is None or after.query()
        if not num_busy:
            self.goes_on()
        if self.waiting and num_busy < MAX_ORDERS and is_complete:
            self._announced.append(self.waiting.popleft())
            self.line.send_bytes(ANNOUNCE + self._announced[-1].place)
        elif self.line.poll():
            self.goes_on()
            self._take(self.line.recv_bytes(MOST_BYTES))
        elif num_busy:
            self.wait()
        else:
            self.wake.wait(POLL_S if self.waiting else IDLE_S)

    def _take(self, message: bytes) -> None:
        kind = message[:1]
        if kind == REFUSED and self._announced:
            self._announced.popleft().refusal = message[1:].decode(errors="replace")
        elif kind == POSTED and self._announced:
            write = self._announced.popleft()
            write.is_posted = True
            self._posted.append(write)
            stream, address = self.lane
            places = devices.places_of(write.order.layout, write.order.block_ids, address)
            self.event = self.gear.device.copy(stream, devices.Copies(*places), None)
            write.event = self.post(address, write.num_bytes)
        elif kind == DONE and self._posted:
            self._posted.popleft().is_placed = True
        else:
            raise TransferError(f"the receiver sent {kind!r} at the wrong time")


class _Write:
    """An order on its way."""

    def __init__(self, pair: _Outbound, order: Order, after: DeviceEvent | None) -> None:
        self._pair, self.order, self.after = pair, order, after
        self.num_bytes = devices.span_of(order, pair.num_bytes)
        self.place = PLACE.pack(order.control, order.generation, order.offset, self.num_bytes)
        self.refusal = ""
        self.is_posted = self.is_placed = False
        self.event: DeviceEvent | None = None  # behind its send

    def query(self) -> bool:
        pair = self._pair
        if not pair.is_open and time.monotonic() > pair.deadline:
            pair.stop = f"NCCL does not connect within {pair.gear.timeout_s:g} s"
        # One that has opened by now ends by itself; else it sees `stop`, and posts nothing.
        problem = self.refusal or pair.problem or ("" if pair.is_open else pair.stop)
        if problem and (pair.is_over or not self.is_posted):
            raise TransferError(problem)
        return self.event is not None and self.event.query() and self.is_placed


class NcclWire:
    """The sender's side: a `Wire` of the pushing thread. An order has at most `buffer_bytes`."""

    def __init__(
        self, device: CudaDevice, library: Any, timeout_s: float, buffer_bytes: int
    ) -> None:
        self._gear = _Gear(device, library, timeout_s, buffer_bytes)
        self._pairs: dict[bytes, _Outbound] = {}  # by offer

    def has_room(self, order: Order) -> bool:
        return True  # pairs wait

    def submit(self, order: Order, after: DeviceEvent | None) -> _Write:
        pair, layout = self._pair_with(order.offer), order.layout
        write = _Write(pair, order, after)
        if write.num_bytes > self._gear.lane_bytes or layout.page_bytes.sum() < layout.block_bytes:
            raise ValueError("NCCL moves whole blocks, as many as its buffer holds")
        pair.waiting.append(write)
        pair.wake.set()
        return write

    def _pair_with(self, offer: bytes) -> _Outbound:
        old = self._pairs.get(offer)
        if old is not None and not (old.problem or old.stop):
            return old
        num_failures = old.num_failures + 1 if old is not None and not old.is_open else 0
        if old is not None and num_failures >= MOST_FAILURES:
            problem = old.problem or old.stop
            raise TransferError(f"{num_failures} attempts failed, the last one: {problem}")
        self._pairs[offer] = _Outbound(self._gear, offer, num_failures)
        return self._pairs[offer]

    def close(self) -> None:
        """Abort all communicators. No order may be under way. Idempotent."""
        join_all(list(self._pairs.values()))


class _Inbound(_Pair):
    """The receiver's end, which holds every slot that is written to."""

    rank = 1

    def __init__(self, receiver: NcclReceiver, line: Connection) -> None:
        super().__init__(receiver.gear)
        self._receiver, self.line = receiver, line
        # Control words of slots, and events behind what is posted into them.
        self._held, self._events = deque[int](), deque[DeviceEvent]()
        self.start()

    def open(self) -> None:
        hello = self.expect(HELLO)
        if not hmac.compare_digest(hello[:TOKEN_BYTES], self._receiver.token):
            self.line.send_bytes(REFUSED + b"this instance did not make that offer")
            raise TransferError("a sender without the offer")
        self._words = Arena(hello[TOKEN_BYTES + ID_BYTES :].decode())
        self.line.send_bytes(WELCOME)
        self.meet(hello[TOKEN_BYTES:][:ID_BYTES])
        while self.event is not None and not self.event.query():
            if self.line.poll():
                raise TransferError("the sender left")
            self.wait()
        self.line.send_bytes(READY)

    def turn(self) -> None:
        if self._events and self._events[0].query():
            self._events.popleft()
            self._words.let_go(self._held.popleft())
            self.line.send_bytes(DONE)
            self.goes_on()
        elif self.line.poll(0.0 if self._held else IDLE_S):
            self.goes_on()
            self._take(self.line.recv_bytes(MOST_BYTES))
        elif self._held:
            self.wait()

    def _take(self, message: bytes) -> None:
        if message[:1] != ANNOUNCE or len(self._held) >= MAX_ORDERS:
            raise TransferError(f"the sender sent {message[:1]!r} at the wrong time")
        control, generation, offset, num_bytes = PLACE.unpack(message[1:])
        begin, size = self._receiver.memory
        if not num_bytes or offset + num_bytes > size:
            raise TransferError(f"bytes {offset} to {offset + num_bytes} are not in the arena")
        if self._words.hold(control, generation):
            self._held.append(control)
            self._events.append(self.post(begin + offset, num_bytes))
            self.line.send_bytes(POSTED)
        else:
            self.line.send_bytes(REFUSED + b"the slot was given to another transfer")

    def run(self) -> None:
        super().run()
        if self._held:
            logger.warning("KV over NCCL does not arrive: %s", self.problem)
        while self._held:
            self._words.let_go(self._held.popleft())


class NcclReceiver:
    """The receiver's side, in the worker whose device has the arena: `memory` is its address and
    bytes. `handle` belongs into the offer."""

    def __init__(
        self, device: CudaDevice, library: Any, memory: tuple[int, int], host: str, timeout_s: float
    ) -> None:
        self.gear, self.memory = _Gear(device, library, timeout_s, lane_bytes=1), memory
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._pairs: list[_Inbound] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), 0), family=family)
        self._listener.settimeout(IDLE_S)
        version, port = library.ncclGetRawVersion(), self._listener.getsockname()[1]
        self.handle = HANDLE.pack(version, port, self.token) + host.strip("[]").encode()
        self._is_closing = False
        self._thread = threading.Thread(target=self._accept, name="tetri-nccl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort all communicators and end the threads. Idempotent."""
        self._is_closing = True
        self._thread.join()
        join_all(self._pairs)

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:  # none comes
                continue
            except OSError:  # no descriptor is left, and it waits
                time.sleep(IDLE_S)
                continue
            with suppress(OSError, RuntimeError):  # it is gone, or the device fails
                self._pairs = [each for each in self._pairs if each.is_alive()]
                opening = [each for each in self._pairs if not (each.is_open or each.stop)]
                if len(opening) >= MOST_OPENING:
                    opening[0].stop = "there are too many connections"
                self._pairs.append(_Inbound(self, line_of(connection)))
        self._listener.close()


def line_of(connection: socket.socket) -> Connection:
    """Make an end of a side channel. OSError or EOFError from it: the other end is gone, sends what
    is no message, or stops within one."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, PAUSE)
    return Connection(connection.detach())


def join_all(pairs: Sequence[_Pair]) -> None:
    """End pairs, and wait a while for their threads: those that hang keep what they use."""
    for each in pairs:
        each.stop = "the instance shuts down"
    deadline = time.monotonic() + CLOSE_S
    for each in pairs:
        each.join(max(0.0, deadline - time.monotonic()))
