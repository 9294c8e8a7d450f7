"""The router's end of the control channel: who is in the cluster and how loaded.

A `Monitor` belongs to one event loop and is used on that loop only. Instances
report when a view reaches them, so that all of a period's traffic falls into one
short moment and an idle cluster sleeps in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from vllm_tetri import messages
from vllm_tetri.config import control_host, require_guarded
from vllm_tetri.control.curve import CONTROL, Curve, Gatekeeper
from vllm_tetri.control.membership import Membership
from vllm_tetri.control.views import row_of
from vllm_tetri.errors import ConfigError, ProtocolError
from vllm_tetri.secret import Secret
from vllm_tetri.types import (
    ClusterView,
    Flip,
    FlipStage,
    InstanceId,
    InstanceInfo,
    InstanceView,
    Role,
)

_MAX_DRAIN = 512  # frames per wake-up; HTTP must get its turn in between
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MonitorCounters:
    """What passed the control socket; all of them only grow."""

    received: dict[str, int] = field(default_factory=dict)  # by message name
    sent: int = 0
    dropped: int = 0  # malformed or foreign frames, and connections that were not let in
    undelivered: int = 0  # the instance was gone or did not read


class Monitor:
    """Keeps the table of instances and broadcasts who can decode to who dispatches.

    Args:
        bind: Address to listen on, ``tcp://HOST:PORT``; port 0 takes a free one.
        name: Name of this router in its views.
        period_s: Seconds between two broadcasts.
        silent_after_s: An instance that says nothing for so long is not used.
        on_hello: Called for every instance that is not known to be ready.
        on_dispatched: Called when a prefill instance names a decode instance.
        on_cut_off: Called when an instance left before it had finished.
        on_flip: Called when a flip has ended, in whatever way.
        in_flight: Requests that an instance has or may still get from this router;
            asked for those that leave or drain.
        secret: What routers and instances share; nobody without it is listened to.

    Raises:
        ConfigError: The address is malformed, or needs a secret.
    """

    def __init__(
        self,
        bind: str,
        name: str,
        *,
        period_s: float = 0.1,
        silent_after_s: float = 1.0,
        on_hello: Callable[[InstanceInfo], None] = lambda _: None,
        on_dispatched: Callable[[messages.Dispatched], None] = lambda _: None,
        on_cut_off: Callable[[InstanceId], None] = lambda _: None,
        on_flip: Callable[[InstanceId, Flip], None] = lambda *_: None,
        in_flight: Callable[[InstanceId], int] = lambda _: 0,
        secret: Secret | None = None,
    ) -> None:
        require_guarded("--control", control_host(bind), has_secret=secret is not None)
        self._curve = None if secret is None else Curve(secret, CONTROL)
        self.counters = MonitorCounters()
        self._bind = bind
        self._name = name
        self._period_s = period_s
        self._on_hello = on_hello
        self._on_dispatched = on_dispatched
        self._on_cut_off = on_cut_off
        self._on_flip = on_flip
        self._in_flight = in_flight
        self._members = Membership(silent_after_s)
        self._seq = 0
        self._told_roster = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0  # when it fires

    @property
    def address(self) -> str:
        """Where it listens; valid after `start`."""
        assert self._socket is not None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Bind and begin to listen on the running event loop.

        Raises:
            ConfigError: The address cannot be bound.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, is_ipv6="[" in self._bind)
        self._events = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
        if self._curve is not None:
            self._gatekeeper = Gatekeeper(self._context, self._curve)
            self._curve.listen(self._socket)
        try:
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--control {self._bind}: {error}; choose another port") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._drain)
        if self._gatekeeper is not None:
            loop.add_reader(self._gatekeeper.socket.fileno(), self._gatekeeper.answer)
        self._begin_period()

    def view(self) -> ClusterView:
        """Every instance that is not gone, as of now."""
        return ClusterView(self._name, self._seq, self._members.views(time.monotonic()))

    def view_of(self, instance: InstanceId) -> InstanceView | None:
        """One instance as of now; None when it is gone."""
        return self._members.view_of(instance, time.monotonic())

    @property
    def departed(self) -> dict[InstanceId, str]:
        """Who left because it was asked to, and what a deadline cut off there."""
        return self._members.departed

    def ask_to_leave(self, instance: InstanceId, deadline_s: float | None) -> None:
        """Tell a member to finish what it has and go, at the latest in `deadline_s`.

        Raises:
            KeyError: There is no such member.
        """
        now = time.monotonic()
        self._members.ask_to_leave(instance, None if deadline_s is None else now + deadline_s)
        leave = self._members.leave_for(instance, now)
        if leave is not None:
            self.send(instance, leave)

    def order_flip(self, instance: InstanceId, order: messages.FlipRole) -> int:
        """Tell a member to take another role; returns the epoch of the order.

        Raises:
            KeyError: There is no such member.
        """
        order = self._members.order_flip(instance, order, time.monotonic())
        self.send(instance, order)
        return order.epoch

    def mark_ready(self, info: InstanceInfo) -> None:
        """Its HTTP server answers. Ignored if the instance changed meanwhile."""
        self._members.mark_ready(info)

    def knows(self, info: InstanceInfo) -> bool:
        """Whether exactly this instance is a member, be it silent for the moment."""
        return self._members.is_known(info)

    def send(self, instance: InstanceId, message: messages.ToInstance) -> bool:
        """Queue a message; False (and counted) when the instance cannot be reached."""
        sender = self._members.sender_of(instance)
        if sender is None or self._socket is None:
            self.counters.undelivered += 1
            return False
        # Sending may swallow the edge that announces an incoming frame.
        asyncio.get_running_loop().call_soon(self._drain)
        return self._send(sender, messages.encode(message))

    def close(self) -> None:
        """Stop listening and release the port. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            assert self._socket is not None
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket.fileno())
            if self._gatekeeper is not None:
                loop.remove_reader(self._gatekeeper.socket.fileno())
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = None
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _tick(self) -> None:
        now = time.monotonic()
        # This process was stopped, or its loop held up: what instances said meanwhile is
        # still on its way here.
        self._members.forgive(max(0.0, now - self._due_s), now)
        self._begin_period()  # first: there is another one whatever happens in this
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        self._drain()
        self._count_foreign()
        self._members.forget_gone(now)
        self._broadcast()

    def _begin_period(self) -> None:
        self._due_s = time.monotonic() + self._period_s
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _broadcast(self) -> None:
        self._show()
        frame = messages.encode(messages.Cue(router=self._name))
        now = time.monotonic()
        for sender, instance, is_ending in self._members.cued():
            self._send(sender, self._cue(instance) if is_ending else frame)
            for order in self._members.orders_for(instance, now):
                self._send(sender, messages.encode(order))
        self._drain()

    def mix(self, is_mixed: bool) -> None:
        """Whether any instance may compute prompts for any other from now on, or each in
        its role."""
        self._members.mix(is_mixed)
        if is_mixed and self._socket is not None:
            self._show()  # those who did not dispatch have no picture yet

    def _show(self) -> None:
        """To all who dispatch: who decodes."""
        self._seq += 1
        dispatchers = self._members.dispatchers()
        if dispatchers:
            frame = messages.encode(self._picture())
            for sender in dispatchers:
                self._send(sender, frame)

    def _picture(self) -> messages.View | messages.Loads:
        """Who decodes; only what is new while the same instances are there."""
        roster = self._members.roster
        views = self._members.views(time.monotonic())
        is_mixed = self._members.is_mixed
        decoders = tuple(each for each in views if is_mixed or each.info.role is not Role.PREFILL)
        if roster == self._told_roster:
            return messages.Loads(roster, self._seq, [row_of(each) for each in decoders])
        self._told_roster = roster
        return messages.View(ClusterView(self._name, self._seq, decoders), roster)

    def _cue(self, instance: InstanceId) -> bytes:
        return messages.encode(messages.Cue(self._in_flight(instance), self._name))

    def _drain(self) -> None:
        # ZeroMQ signals an edge, so read until nothing is left or ask to be called again.
        for _ in range(_MAX_DRAIN):
            if self._socket is None or not _is_readable(self._socket):
                return
            parts = self._socket.recv_multipart()
            try:
                if len(parts) != 2:
                    raise ProtocolError(f"{len(parts) - 1} parts instead of one")
                message = messages.decode_to_router(parts[1])
            except ProtocolError as error:
                self._drop(str(error))
            else:
                self._take(parts[0], message)
        asyncio.get_running_loop().call_soon(self._drain)

    def _take(self, sender: bytes, message: messages.ToRouter) -> None:
        name = type(message).__name__
        self.counters.received[name] = self.counters.received.get(name, 0) + 1
        now = time.monotonic()
        match message:
            case messages.Hello(info=info):
                self._greet(sender, info, now)
            case messages.LoadReport():
                self._note(sender, message, now)
            case messages.Flipped():
                self._advertise(sender, message)
            case messages.Left():
                self._part(sender, message)
            case messages.Dispatched():
                if self._members.is_member(sender):
                    self._on_dispatched(message)
                else:
                    self._introduce(sender)

    def _greet(self, sender: bytes, info: InstanceInfo, now: float) -> None:
        try:
            replaced = self._members.join(sender, info, now)
        except ProtocolError as error:
            self._drop(str(error))
            self._send(sender, messages.encode(messages.Refused(str(error))))
            return
        if replaced is not None:
            _log.warning("%s was replaced by process %d", info.id, info.pid)
            reason = f"process {info.pid} joined as {info.id}; give every instance its own name"
            self._send(replaced, messages.encode(messages.Refused(reason)))
        if not self._members.is_ready(info):
            self._on_hello(info)

    def _note(self, sender: bytes, report: messages.LoadReport, now: float) -> None:
        is_own = self._members.sender_of(report.instance) == sender
        has_reported, was = self._members.newest_flip(report.instance)
        if not self._members.report(sender, report, now):
            self._introduce(sender)
        flip = report.flip
        if is_own and has_reported and flip is not None and has_ended(flip):
            is_known = was is not None and was.epoch == flip.epoch and has_ended(was)
            if not is_known:
                self._on_flip(report.instance, flip)
        elif is_own and flip is not None and flip.stage is FlipStage.DONE:
            # It does not know yet that it is known: something got lost.
            self._send(sender, messages.encode(messages.Advertised(flip.epoch, now)))

    def _advertise(self, sender: bytes, message: messages.Flipped) -> None:
        if not self._members.flipped(sender, message):
            self._introduce(sender)
            return
        _log.info("%s has the role %s now", message.instance, message.role)
        self._show()
        self._send(sender, messages.encode(messages.Advertised(message.epoch, time.monotonic())))

    def _part(self, sender: bytes, message: messages.Left) -> None:
        if self._members.left(sender, message) and message.was_asked:
            left_over = f"; cut off: {message.cut_off}" if message.cut_off else ""
            _log.info("%s has left%s", message.instance, left_over)
            if message.cut_off:
                self._on_cut_off(message.instance)

    def _introduce(self, sender: bytes) -> None:
        if not self._members.was_replaced(sender):
            self._send(sender, messages.encode(messages.Introduce(self._name)))

    def _send(self, sender: bytes, frame: bytes) -> bool:
        try:
            assert self._socket is not None
            self._socket.send_multipart((sender, frame), zmq.NOBLOCK)
        except zmq.ZMQError:  # EAGAIN: it does not read; EHOSTUNREACH: it is gone
            self.counters.undelivered += 1
            return False
        self.counters.sent += 1
        return True

    def _count_foreign(self) -> None:
        while self._events is not None and _is_readable(self._events):
            self._events.recv_multipart()
            self._drop("a connection that does not speak ZeroMQ, or has another secret or none")

    def _drop(self, why: str) -> None:
        self.counters.dropped += 1
        if self.counters.dropped == 1:
            _log.warning("dropped something on the control port: %s (later ones are counted)", why)


def has_ended(flip: Flip) -> bool:
    """Whether nothing about it changes any more."""
    return flip.stage is FlipStage.ROLLED_BACK or flip.commit_s > 0


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _configure(socket: zmq.Socket[bytes], *, is_ipv6: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unreachable instance is an error, not silence
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, 256)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
