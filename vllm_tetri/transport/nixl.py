"""KV over NIXL (UCX): RDMA where there is a network card for it, else TCP or shared memory.

The receiver registers its arena with an agent and offers that agent's metadata; a sender's agent
writes pages straight to their places in a slot. Slots, cancels and the end of a transfer stay on
the control channel of the native core.

NIXL's own progress thread is off, since it polls all the time. A sender looks at its writes while
there are any. A receiver takes part only where UCX has no one-sided writes (TCP), and while
connections are made: its thread polls quickly while slots fill, else 100 times a second.

The metadata lets every reader write to the arena. The handshake's proof keeps it from being
exchanged, not from being read.
"""

from __future__ import annotations

import importlib
import logging
import struct
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.device import DeviceEvent, places_of, span_of
from vllm_tetri.transport.links import link_kinds, parse_link
from vllm_tetri.transport.native import Arena, Layout, Order, Receiver

logger = logging.getLogger(__name__)

KIND = "nixl"
INSTALL = "install it: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
POLL_IDLE_S, POLL_BUSY_S = 0.01, 0.0002
_HEAD = struct.Struct("<QQ5x")  # address, bytes; metadata follows


def _make_agent(side: str) -> Any:
    """Start NIXL; TransferError that says what to install if it is missing."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransferError(
            f"--tetri-link nixl needs the package nixl ({error}): {INSTALL}"
        ) from None
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    try:
        agent = api.nixl_agent(f"tetri-{side}-{uuid.uuid4().hex}", config)
    except Exception as error:
        raise TransferError(f"NIXL cannot start: {type(error).__name__} {error}") from error
    if "UCX" not in agent.backends:
        raise TransferError("NIXL has no UCX plugin; " + INSTALL)
    return agent


def _regions(starts: NDArray[Any], sizes: Any, device: int) -> NDArray[np.uint64]:
    """Describe regions to NIXL: rows of address, bytes, device."""
    found = np.empty((len(starts), 3), np.uint64)
    found[:, 0], found[:, 1], found[:, 2] = starts, sizes, device
    return found


class NixlReceiver:
    """Offers the arena of a receiver to NIXL senders. Close it before the receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._agent = _make_agent("receiver")
        self._arena = Arena(receiver.segment)
        address, num_bytes = self._arena.address, self._arena.num_bytes
        row = _regions(np.array([address], np.uint64), num_bytes, 0)
        try:
            self._registered = self._agent.register_memory(row, "DRAM")
        except Exception as error:
            raise TransferError(
                f"NIXL cannot register the arena ({num_bytes} bytes): {type(error).__name__}"
            ) from error
        metadata = self._agent.get_agent_metadata()
        receiver.offer(KIND, _HEAD.pack(address, num_bytes) + metadata)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="tetri-nixl", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._is_closing.is_set():
            try:
                self._agent.get_new_notifs()  # there are none: it lets UCX work
            except Exception as error:  # a peer's fault must not end it
                logger.warning("NIXL: %s %s", type(error).__name__, error)
            is_busy = self._receiver.stats().filling > 0
            self._is_closing.wait(POLL_BUSY_S if is_busy else POLL_IDLE_S)

    def close(self) -> None:
        """Take the arena back from NIXL; senders' writes fail from now on. Idempotent."""
        self._is_closing.set()
        self._thread.join()
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None
        self._arena.close()


def offer_nixl(receiver: Receiver, option: str, host: str) -> NixlReceiver | None:
    """Offer a receiver's arena where `--tetri-link` wants NIXL: always, or with `auto` if peers may
    be on other hosts and NIXL works here. TransferError if it must, and cannot."""
    is_wanted = parse_link(option).kind == KIND
    is_local = host.startswith("127.") or host == "localhost"
    if KIND not in link_kinds(option, is_device=True) or (is_local and not is_wanted):
        return None
    try:
        return NixlReceiver(receiver)
    except TransferError as error:
        if is_wanted:
            raise
        logger.warning("peers on other hosts use TCP to send KV here: %s", error)
        return None


@dataclass(eq=False, slots=True)
class _Peer:
    """A receiver's memory, as its offer says."""

    offer: bytes
    agent: str  # its name
    address: int
    num_bytes: int
    is_connected: bool = True
    has_worked: bool = False  # a write to it has ended well
    has_failed: bool = False  # a write to it has not


class NixlWire:
    """The sender's side: a `Wire` of the pushing thread, which makes all calls.

    Its agent starts with the first order and registers source memory that it has not seen yet;
    that memory must outlive the wire. `timeout_s` is for one write, `device` the index of the
    device that layouts of device memory are on.
    """

    def __init__(self, timeout_s: float = 30.0, device: int = 0) -> None:
        self._timeout_s, self._device = timeout_s, device
        self.agent: Any = None
        self._peers: dict[str, _Peer] = {}  # by endpoint
        self._known: dict[int, Layout] = {}  # whose memory is registered, by id; their owners stay
        self._spans: list[tuple[int, int]] = []  # of all memory that is
        self._registered: list[Any] = []

    def submit(self, order: Order, after: DeviceEvent | None) -> NixlPending:
        """Prepare a write; it starts when `after` is over. TransferError if the receiver's offer
        cannot be opened, or has never worked; ValueError if it is smaller than its slots."""
        if self.agent is None:
            self.agent = _make_agent("sender")
        peer = self._peers.get(order.endpoint)
        if peer is None or peer.offer != order.offer or (peer.has_worked and peer.has_failed):
            self._forget(order.endpoint)
            peer = self._peers[order.endpoint] = self._open(order.offer)
        if peer.has_failed and not peer.has_worked:
            raise TransferError("no write has reached this receiver (does a firewall stop UCX?)")
        span_of(order, peer.num_bytes)
        return NixlPending(self, peer, order, after, time.monotonic() + self._timeout_s)

    def _open(self, offer: bytes) -> _Peer:
        try:
            address, num_bytes = _HEAD.unpack_from(offer)
            name = self.agent.add_remote_agent(offer[_HEAD.size :])
        except struct.error:
            raise TransferError("its offer is of another version") from None
        except Exception as error:
            raise TransferError(f"its offer cannot be opened: {type(error).__name__}") from error
        name = name.decode() if isinstance(name, bytes) else name
        return _Peer(offer, name, address, num_bytes)

    def start(self, peer: _Peer, order: Order) -> Any:
        """Post a write; its handle."""
        layout = order.layout
        memory = "VRAM" if layout.is_device else "DRAM"
        device = self._device if layout.is_device else 0
        if id(layout) not in self._known:
            self._register(layout, memory, device)
        pages, places, sizes = places_of(layout, order.block_ids, peer.address + order.offset)
        handle = self.agent.initialize_xfer(
            "WRITE",
            self.agent.get_xfer_descs(_regions(pages, sizes, device), memory),
            self.agent.get_xfer_descs(_regions(places, sizes, 0), "DRAM"),
            peer.agent,
        )
        self.agent.transfer(handle)
        return handle

    def _register(self, layout: Layout, memory: str, device: int) -> None:
        """Register what is not yet: the spans of all layers, those that touch as one."""
        begins = layout.bases
        ends = begins + np.uint64(layout.num_blocks - 1) * layout.block_strides + layout.page_bytes
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(zip(begins.tolist(), ends.tolist(), strict=True)):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        known = self._spans
        new = [(a, b) for a, b in merged if not any(x <= a and b <= y for x, y in known)]
        if new:
            starts, stops = np.array(new, np.uint64).T
            rows = _regions(starts, stops - starts, device)
            self._registered.append(self.agent.register_memory(rows, memory))
            self._spans += new
            self._known[id(layout)] = layout

    def has_room(self, order: Order) -> bool:
        return True  # UCX queues by itself, and the caller bounds its orders

    def disconnect(self, peer: _Peer) -> None:
        """Leave a receiver, which ends what is being written to it. Idempotent."""
        if not peer.is_connected:
            return
        peer.is_connected = False
        try:
            self.agent.remove_remote_agent(peer.agent)
        except Exception as error:
            logger.debug("NIXL: leaving a peer that is gone: %s", type(error).__name__)

    def _forget(self, endpoint: str) -> None:
        if (peer := self._peers.pop(endpoint, None)) is not None:
            self.disconnect(peer)

    def close(self) -> None:
        """Disconnect from all receivers, and end the agent with its thread and sockets."""
        for endpoint in list(self._peers):
            self._forget(endpoint)
        if self.agent is not None:
            for each in self._registered:
                self.agent.deregister_memory(each)
            self._registered.clear()
            self._known.clear()
            self._spans.clear()
            self.agent = None


class NixlPending:
    """One write: waiting for its event, then under way, until done, failed or too late."""

    def __init__(
        self, wire: NixlWire, peer: _Peer, order: Order, after: DeviceEvent | None, deadline: float
    ) -> None:
        self._wire, self._peer, self._order = wire, peer, order
        self._after, self._deadline = after, deadline
        self._handle: Any = None

    def query(self) -> bool:
        """Advance; True once the bytes are placed. TransferError when the write fails or its time
        is over."""
        if self._handle is None and self._after is not None and not self._after.query():
            return False
        if self._handle is None and not self._peer.is_connected:  # nor could it be ended then
            raise self._failed("its connection was given up")
        try:
            if self._handle is None:
                self._handle = self._wire.start(self._peer, self._order)
            state = self._wire.agent.check_xfer_state(self._handle)
        except Exception as error:  # NIXL's have no base class
            raise self._failed(type(error).__name__) from error
        if state == "PROC" and time.monotonic() < self._deadline:
            return False
        if state != "DONE":
            raise self._failed("the write timed out" if state == "PROC" else f"state {state}")
        self._peer.has_worked = True
        self._wire.agent.release_xfer_handle(self._handle)
        return True

    def _failed(self, reason: str) -> TransferError:
        # Disconnecting ends what is under way: nothing reads the source afterwards.
        self._peer.has_failed = True
        self._wire.disconnect(self._peer)
        if self._handle is not None:
            try:
                self._wire.agent.release_xfer_handle(self._handle)
            except Exception as error:  # NIXL frees it with the agent
                logger.debug("NIXL: releasing a failed write: %s", type(error).__name__)
        return TransferError(f"NIXL cannot write {self._order.num_bytes} bytes: {reason}")
