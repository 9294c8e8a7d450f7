"""The instance's end of the control channel: one thread that owns one socket per router."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import zmq

from vllm_tetri import messages
from vllm_tetri.config import control_host, require_guarded
from vllm_tetri.control.curve import CONTROL, Curve
from vllm_tetri.control.link import Link
from vllm_tetri.control.role_keeper import RoleKeeper
from vllm_tetri.control.role_switch import RoleSwitch
from vllm_tetri.control.views import Picture, Sights
from vllm_tetri.errors import ProtocolError
from vllm_tetri.policy.leaving import Leaving, Verdict
from vllm_tetri.secret import Secret
from vllm_tetri.types import ClusterView, InstanceInfo, InstanceLoad, Role, TransferId

MAX_QUEUED = 4096
_CLOSE_S = 2.0
# A step that was under way when a router died may still send KV for it.
_GONE_S = 30.0
_MAX_GONE = 16  # at one address in that time
_FLIPPING_S = 0.01  # so often a flip that is under way looks whether it can go on
_MAX_DRAIN = 256  # frames of one router per wake-up, so that no peer can starve the rest

_log = logging.getLogger(__name__)


class Agent:
    """Announces an instance to its routers, reports its load and keeps their views.

    Every public method may be called from any thread and none of them waits for
    the network; `close` waits at most two seconds. The callables run on the agent's
    thread and should only take microseconds.

    Args:
        routers: Addresses of the routers, ``tcp://HOST:PORT``; they need not be up.
        info: What this instance says of itself.
        read_load: Gives the numbers of the next report.
        on_cancel: Called for every transfer that nobody waits for any more.
        on_lost: Called for every transfer whose sender is silent.
        period_s: Seconds between two reports. A router's views and cues set the pace.
        unfinished: What the instance still has of a role's work, in words; empty when it
            has nothing.
        on_left: Called once, when the instance was asked to leave and has left.
        on_router_gone: Called with the name of a router whose connection broke: at once, and
            with every report for half a minute or until it is heard again.
        switch: Where the engine finds the role that it is to take.
        secret: What routers and instances share; without one, routers are on this machine.

    Raises:
        ConfigError: An address is malformed, or needs a secret.
    """

    def __init__(
        self,
        *,
        routers: tuple[str, ...],
        info: InstanceInfo,
        read_load: Callable[[], InstanceLoad],
        on_cancel: Callable[[TransferId], None],
        on_lost: Callable[[TransferId], None] = lambda _: None,
        period_s: float,
        unfinished: Callable[[Role], str] = lambda _: "",
        on_left: Callable[[], None] = lambda: None,
        on_router_gone: Callable[[str], None] = lambda _: None,
        switch: RoleSwitch | None = None,
        secret: Secret | None = None,
    ) -> None:
        for address in routers:
            host = control_host(address)
            require_guarded("--tetri-control", host, has_secret=secret is not None)
        self._curve = None if secret is None else Curve(secret, CONTROL)
        self._routers = routers
        self._info = info
        self._read_load = read_load
        self._on_cancel = on_cancel
        self._on_lost = on_lost
        self._period_s = period_s
        self._unfinished = unfinished
        self._on_left = on_left
        self._on_router_gone = on_router_gone
        self._connected: set[int] = set()  # links that have a router
        self._names: dict[int, str] = {}  # of the routers at the links
        self._gone: dict[str, float] = {}  # routers that went, and until when that is told
        self._leaving = Leaving()
        self._roles = RoleKeeper(info.id, info.role, switch or RoleSwitch())
        self._verdict = Verdict.STAY
        self._outbox: deque[messages.Dispatched] = deque()
        self._sights = Sights()
        self._logged: set[str] = set()
        self._dropped = 0
        self._seq = 0
        self._load = InstanceLoad()
        self._late_s = 6 * period_s  # without a view for so long, report all the same
        self._reported_s = float("-inf")
        self._is_cued = False
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the life of _wake, _thread and counters
        self._wake = -1
        self._thread: threading.Thread | None = None

    @property
    def dropped_messages(self) -> int:
        """Frames that were malformed, and messages that found their queue full."""
        return self._dropped

    @property
    def num_flips(self) -> int:
        """Roles taken since the start."""
        return self._roles.num_flips

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The agent was started or closed before.
        """
        with self._lock:
            if self._thread is not None or self._stop.is_set():
                raise RuntimeError("an Agent starts once; build a new one")
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="tetri-agent", daemon=True)
            self._thread.start()

    def view(self) -> ClusterView:
        """Who decodes, over all routers; ages are as of now."""
        return self._sights.view(time.monotonic())

    def picture(self) -> Picture:
        """The same as of when something new came: the same object until then, and cheap."""
        return self._sights.picture(time.monotonic())

    def publish(self, message: messages.Dispatched) -> None:
        """Queue a message for every router; dropped and counted when the queue is full."""
        if len(self._outbox) >= MAX_QUEUED:
            self._count_drop()
            return
        self._outbox.append(message)
        self.wake_up()

    def close(self) -> None:
        """Say `Left` to every router and stop the thread. Idempotent."""
        self._stop.set()
        self.wake_up()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSE_S)
        if thread.is_alive():
            self._log_once("stuck", "the control agent did not stop within %s s", _CLOSE_S)

    def wake_up(self) -> None:
        """Something that the agent waits for may have happened."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _count_drop(self) -> None:
        with self._lock:
            self._dropped += 1

    def _log_once(self, key: str, text: str, *args: object, exc_info: bool = False) -> None:
        if key not in self._logged and len(self._logged) < 64:
            self._logged.add(key)
            _log.warning(text, *args, exc_info=exc_info)

    # Everything below runs on the agent's thread.

    def _run(self) -> None:
        context = zmq.Context()
        links: list[Link] = []
        try:
            links = [Link.open(context, address, self._curve) for address in self._routers]
            self._loop(links)
            self._part(links)
        except Exception:
            _log.exception("the control agent of %s died", self._info.id)
        finally:
            for link in links:
                link.close()
            context.term()
            with self._lock:
                os.close(self._wake)
                self._wake = -1
        if self._verdict is not Verdict.STAY:
            self._on_left()

    def _part(self, links: list[Link]) -> None:
        was_asked = self._verdict is not Verdict.STAY
        cut_off = self._read_unfinished(Role.BOTH) if self._verdict is Verdict.CUT_OFF else ""
        if was_asked:
            left_over = f"; cut off: {cut_off}" if cut_off else ""
            _log.info("%s leaves the cluster%s", self._info.id, left_over)
        for link in links:
            link.send(messages.encode(messages.Left(self._info.id, was_asked, cut_off)))

    def _loop(self, links: list[Link]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for link in links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.connected, zmq.POLLIN)
        while not self._stop.is_set() and self._verdict is Verdict.STAY:
            since_s = time.monotonic() - self._reported_s
            # A view that just came in is the cue to report: one wake-up instead of two.
            if since_s >= self._late_s or (self._is_cued and since_s >= self._period_s / 2):
                self._report(links)
                since_s = 0.0
            self._is_cued = False
            wait_s = self._late_s - since_s
            if not self._roles.is_steady:
                wait_s = min(wait_s, _FLIPPING_S)
            ready = dict(poller.poll(max(1, round(wait_s * 1000))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for index, link in enumerate(links):
                if link.connected in ready:
                    self._meet(index, link)
                if link.socket in ready:
                    self._drain(index, link)
            self._flush(links)
            if not self._roles.is_steady:
                self._go_on_flipping(links)
            if self._leaving.is_asked:
                is_at_rest = not self._read_unfinished(Role.BOTH)
                self._verdict = self._leaving.look(is_at_rest=is_at_rest, now=time.monotonic())

    def _meet(self, index: int, link: Link) -> None:
        """A router came, or went, or was not to be agreed with."""
        event = link.next_event()
        if event == zmq.EVENT_DISCONNECTED:
            self._connected.discard(index)
            self._lose(index)
            self._tell_gone()
            return
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._log_once(
                f"not accepted by {index}",
                "the router at %s and this instance do not accept each other; if that lasts: "
                "do both have the same secret (--secret-file, --tetri-secret-file), or none?",
                self._routers[index],
            )
            return
        self._connected.add(index)
        link.send(messages.encode(messages.Hello(self._info)))
        self._reported_s = float("-inf")  # a report follows at once

    def _hear(self, index: int, router: str) -> None:
        """The router at a link said its name."""
        if not router or index not in self._connected:
            return  # it may have said so before it went
        if self._names.get(index) != router:
            self._lose(index)
            self._names[index] = router
        self._gone.pop(router, None)

    def _lose(self, index: int) -> None:
        router = self._names.pop(index, "")
        if router and router not in self._names.values():
            self._gone[router] = time.monotonic() + _GONE_S
            while len(self._gone) > len(self._routers) * _MAX_GONE:
                del self._gone[next(iter(self._gone))]

    def _tell_gone(self) -> None:
        now = time.monotonic()
        for router, until in list(self._gone.items()):
            if now >= until:
                del self._gone[router]
            try:
                self._on_router_gone(router)
            except Exception:
                self._log_once("gone", "dropping what %s left failed", router, exc_info=True)

    def _report(self, links: list[Link]) -> None:
        self._tell_gone()
        self._refresh_load()
        self._reported_s = time.monotonic()
        self._seq += 1
        report = messages.LoadReport(
            self._info.id,
            self._seq,
            self._load,
            self._leaving.is_asked,
            self._roles.epoch,
            self._roles.newest(self._reported_s),
        )
        frame = messages.encode(report)
        for link in links:
            link.send(frame)

    def _refresh_load(self) -> None:
        try:
            self._load = self._read_load()
        except Exception:  # the engine's trouble must not make the instance look dead
            self._log_once("load", "reading the load failed: reporting the last", exc_info=True)

    def _read_unfinished(self, role: Role) -> str:
        try:
            return self._unfinished(role)
        except Exception:
            self._log_once("unfinished", "looking at what is unfinished failed", exc_info=True)
            return "unknown"

    def _go_on_flipping(self, links: list[Link]) -> None:
        if self._roles.go_on(self._read_unfinished, time.monotonic()):
            self._info = replace(self._info, role=self._roles.role)
            flipped = messages.Flipped(self._info.id, self._info.role, self._roles.epoch)
            for link in links:
                link.send(messages.encode(flipped))
        if self._roles.is_steady:
            self._report(links)

    def _flush(self, links: list[Link]) -> None:
        while self._outbox:
            frame = messages.encode(self._outbox.popleft())
            delivered = [link.send(frame) for link in links]
            if not any(delivered):
                self._count_drop()

    def _drain(self, index: int, link: Link) -> None:
        for _ in range(_MAX_DRAIN):
            if not link.is_readable():
                return
            parts = link.socket.recv_multipart()
            self._roles.heard(index, time.monotonic())
            try:
                if len(parts) != 1:
                    raise ProtocolError(f"{len(parts)} parts instead of one")
                self._take(index, link, messages.decode_to_instance(parts[0]))
            except ProtocolError as error:
                self._count_drop()
                self._log_once("frame", "dropped a control frame: %s", error)

    def _take(self, index: int, link: Link, message: messages.ToInstance) -> None:
        match message:
            case messages.View(view=view, roster=roster):
                self._hear(index, view.router)
                self._sights.see(index, view, roster, time.monotonic())
                self._is_cued = True
            case messages.Loads():
                self._is_cued = True
                if not self._sights.refresh(index, message, time.monotonic()):
                    # Its view got lost. It sends one to everybody after a `Hello`.
                    link.send(messages.encode(messages.Hello(self._info)))
            case messages.Cue(in_flight=in_flight, router=router):
                self._hear(index, router)
                if in_flight is not None:
                    self._leaving.told(index, in_flight, time.monotonic())
                    self._roles.told(index, in_flight, time.monotonic())
                self._is_cued = True
            case messages.Leave(deadline_s=deadline_s):
                self._leaving.ask(deadline_s, time.monotonic())
            case messages.FlipRole():
                self._roles.order(message, time.monotonic())
                self._reported_s = float("-inf")  # a report follows at once
            case messages.Advertised(epoch=epoch, at_s=at_s):
                if self._roles.known(epoch, at_s, time.monotonic()):
                    self._reported_s = float("-inf")
            case messages.Introduce():
                link.send(messages.encode(messages.Hello(self._info)))
            case messages.CancelTransfer(transfer=transfer):
                self._tell(self._on_cancel, transfer)
            case messages.TransferLost(transfer=transfer):
                self._tell(self._on_lost, transfer)
            case messages.Refused(reason=reason):
                self._log_once(f"refused {reason}", "a router refused us: %s", reason)
            case _:
                assert_never(message)

    def _tell(self, on: Callable[[TransferId], None], transfer: TransferId) -> None:
        try:
            on(transfer)
        except Exception:
            self._log_once("cancel", "giving %s up failed", transfer, exc_info=True)
