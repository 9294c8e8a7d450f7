"""The router's end of the control channel: which instances there are, and their load.

Instances report when a poll reaches them, so that all of a period's traffic falls into one short
moment and an idle cluster sleeps in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
from cachetools import TTLCache

from vllm_tetri import messages
from vllm_tetri.config import control_host, require_guarded, require_reachable
from vllm_tetri.control.membership import Membership
from vllm_tetri.control.view import GONE_AFTER_S, row_of
from vllm_tetri.errors import ConfigError, ProtocolError
from vllm_tetri.messages import CacheReport
from vllm_tetri.security import HANDSHAKE_FAILED, Curve, Secret, is_readable
from vllm_tetri.types import (
    ClusterView,
    Flip,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    Role,
)

# Addresses that frames were dropped from, in the log: so many, each once in so long.
_MAX_NAMED, _NAMED_S = 64, 600.0
_MAX_DRAIN = 512  # frames per wake-up; HTTP must get its turn in between

_log = logging.getLogger(__name__)


class RouterSide(Protocol):
    """What a monitor needs of its router, on the event loop."""

    def on_hello(self, info: InstanceInfo) -> None: ...  # it is not known to be ready
    def on_published(self, instance: InstanceId, message: messages.OfRequest) -> None: ...
    def on_cache(self, report: CacheReport) -> bool: ...  # False: one is missing
    def on_cut_off(self, instance: InstanceId) -> None: ...  # it left before it had finished
    def on_flip(self, instance: InstanceId, flip: Flip) -> None: ...  # done or rolled back
    def on_ending(self) -> None: ...  # an instance drains or flips, or is still at it
    def num_reaching(self, instance: InstanceId) -> int: ...  # requests it has or may still get


@dataclass(slots=True)
class MonitorCounters:
    """What passed the control socket; all of them only grow."""

    received: Counter[str] = field(default_factory=Counter)  # by message name
    sent: int = 0
    dropped: int = 0  # malformed or foreign frames, and connections that were refused
    undelivered: int = 0  # the instance was gone or did not read


class Monitor:
    """Keeps the table of instances and polls them, with views for those that dispatch.

    It listens at `bind`, ``tcp://HOST:PORT`` with port 0 for a free one; ConfigError if that is
    malformed or needs a secret. An instance is not used after `silent_after_s` without a report.
    All methods belong to one event loop.
    """

    def __init__(
        self,
        bind: str,
        name: str,
        router: RouterSide,
        period_s: float = 0.1,
        silent_after_s: float = 1.0,
        secret: Secret | None = None,
    ) -> None:
        require_guarded("--control", control_host(bind), has_secret=secret is not None)
        self._curve = None if secret is None else Curve(secret)
        self.counters = MonitorCounters()
        self.members = Membership(silent_after_s)
        self._bind, self._name, self._router = bind, name, router
        self._period_s = period_s
        self._seq = self._sent_roster = 0
        self._opened = contextlib.ExitStack()  # what `close` closes
        self._socket: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when it fires
        # Addresses as logged, an empty one for refused connections.
        self._dropped_from: TTLCache[str, None] = TTLCache(_MAX_NAMED, _NAMED_S)

    @property
    def address(self) -> str:
        """Where it listens; valid after `start`."""
        assert self._socket is not None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Listen on the running event loop; ConfigError if the address cannot be bound."""
        loop, opened, context = asyncio.get_running_loop(), self._opened, zmq.Context()
        opened.callback(context.destroy, linger=0)
        self._socket = context.socket(zmq.ROUTER)
        # An unreachable instance is an error, not silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 256)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.IPV6, int("[" in self._bind))
        self._events = self._socket.get_monitor_socket(HANDSHAKE_FAILED)
        opened.callback(self._socket.disable_monitor)
        if self._curve is not None:
            self._curve.listen(self._socket)
            opened.callback(self._curve.gatekeeper(context))
        try:
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--control {self._bind}: {error}; choose another port") from error
        loop.add_reader(self._socket.fileno(), self._drain)
        opened.callback(loop.remove_reader, self._socket.fileno())
        self._tick()

    def view(self) -> ClusterView:
        """Every instance that is not gone, as of now."""
        return ClusterView(self._name, self._seq, self.members.views(self._heard_until_s()))

    def view_of(self, instance: InstanceId) -> InstanceView | None:
        return self.members.view_of(instance, self._heard_until_s())

    def info_of(
        self, instance: InstanceId, states: Collection[InstanceState]
    ) -> InstanceInfo | None:
        """What an instance announced, if it is in one of these states."""
        return self.members.info_of(instance, self._heard_until_s(), states)

    def _heard_until_s(self) -> float:
        """Return the time, or that of the overdue tick of a loop that is too busy to receive."""
        return min(time.monotonic(), self._due_s)

    def order_drain(self, instance: InstanceId, deadline_s: float | None) -> None:
        """Tell a member to finish its requests and leave within `deadline_s`, or KeyError."""
        now = time.monotonic()
        self.members.order_drain(instance, None if deadline_s is None else now + deadline_s)
        for order in self.members.orders_for(instance, now):
            self.send(instance, order)
        self._tell_ending()

    def order_flip(self, instance: InstanceId, order: messages.FlipRole) -> int:
        """Tell a member to take another role, or KeyError; returns the epoch of the order."""
        order = self.members.order_flip(instance, order, time.monotonic())
        self.send(instance, order)
        self._tell_ending()
        return order.epoch

    def _tell_ending(self) -> None:
        """Let all know at once that an instance gets no new work, and the instance what is left."""
        if self._socket is not None:
            self._poll()
        self._router.on_ending()

    def mix(self, is_mixed: bool) -> None:
        """Set whether any instance may compute prompts for any other from now on."""
        self.members.mix(is_mixed)
        if is_mixed and self._socket is not None:
            self._poll()  # those that did not dispatch have no view yet

    def send(self, instance: InstanceId, message: messages.ToInstance) -> bool:
        """Queue a message; False (and counted) when the instance cannot be reached."""
        sender = self.members.sender_of(instance)
        if sender is None or self._socket is None:
            self.counters.undelivered += 1
            return False
        # Sending may swallow the edge that announces an incoming frame.
        asyncio.get_running_loop().call_soon(self._drain)
        return self._send(sender, message)

    def close(self) -> None:
        """Stop listening and release the port. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._opened.close()
        self._timer = self._socket = self._events = None

    def _tick(self) -> None:
        now = time.monotonic()
        # After a stop of this process or its loop, reports of that time are still to come.
        self.members.forgive(max(0.0, now - self._due_s), now)
        # Before all else: whatever fails below, there is another period.
        self._due_s = now + self._period_s
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)
        self._drain()
        while self._events is not None and is_readable(self._events):
            self._events.recv_multipart()
            self._drop("a connection that does not speak ZeroMQ, or has another secret or none")
        for instance in self.members.forget_gone(now):
            _log.warning("%s is forgotten: no report came for %.0f s", instance, GONE_AFTER_S)
        self._poll()
        self._drain()

    def _poll(self) -> None:
        self._seq += 1
        now = time.monotonic()
        members, plain = self.members, messages.Poll(self._name, self._seq)
        dispatching = set(filter(members.dispatches, members.names.values()))
        informed = self._with_views(now) if dispatching else plain
        polls = ((plain, messages.encode(plain)), (informed, messages.encode(informed)))
        for sender, instance in members.names.items():
            poll, frame = polls[instance in dispatching]
            if members.is_ending(instance):
                in_flight = self._router.num_reaching(instance)
                frame = messages.encode(msgspec.structs.replace(poll, in_flight=in_flight))
            self._send(sender, frame)
            for order in members.orders_for(instance, now):
                self._send(sender, order)

    def _with_views(self, now: float) -> messages.Poll:
        """The instances that decode; only what changes while the roster stays the same."""
        views, roster, infos = self.members.views(now), self.members.roster, None
        if not self.members.is_mixed:
            views = tuple(each for each in views if each.info.role is not Role.PREFILL)
        if roster != self._sent_roster:
            self._sent_roster, infos = roster, tuple(each.info for each in views)
        return messages.Poll(self._name, self._seq, roster, infos, [*map(row_of, views)])

    def _drain(self) -> None:
        # ZeroMQ signals an edge, so read until nothing is left or ask to be called again.
        for _ in range(_MAX_DRAIN):
            if self._socket is None or not is_readable(self._socket):
                return
            # `recv_multipart` takes 3 µs for this. All parts of a message come at once.
            sender, num_parts = self._socket.recv(), 1
            frame = self._socket.recv(copy=False)
            while frame.more:
                frame, num_parts = self._socket.recv(copy=False), num_parts + 1
            try:
                if num_parts != 1:
                    raise ProtocolError(f"{num_parts} parts instead of one")
                message = messages.decode_to_router(frame.bytes)
            except ProtocolError as error:
                self._drop(str(error), _peer_of(frame))
            else:
                self._take(sender, message, frame)
        asyncio.get_running_loop().call_soon(self._drain)

    def _take(self, sender: bytes, message: messages.ToRouter, frame: zmq.Frame) -> None:
        self.counters.received[type(message).__name__] += 1
        match message:
            case messages.Hello(info=info):
                self._on_hello(sender, info, _peer_of(frame))
            case messages.LoadReport():
                self._on_report(sender, message)
            case messages.Flipped():
                self._on_flipped(sender, message)
            case messages.Goodbye(instance=instance, cut_off=cut_off):
                if self.members.left(sender, message):
                    _log.info("%s has left; unfinished: %s", instance, cut_off or "none")
                    if cut_off:
                        self._router.on_cut_off(instance)
            case _ if (known := self.members.names.get(sender)) is not None:
                self._pass_on(sender, known, message)
            case messages.Dispatched():  # after the others a report asks for hello
                self._ask_for_hello(sender)

    def _pass_on(
        self, sender: bytes, instance: InstanceId, message: messages.Published | CacheReport
    ) -> None:
        match message:
            case messages.OutputEnded(prefill=prefill):
                self.send(prefill, message)
            case messages.LengthMap():
                for other in self.members.names:
                    if other != sender:
                        self._send(other, message)
            case CacheReport():
                if message.instance == instance and not self._router.on_cache(message):
                    self._send(sender, messages.SendCache())
            case _:
                self._router.on_published(instance, message)

    def _on_hello(self, sender: bytes, info: InstanceInfo, peer: str) -> None:
        try:
            require_reachable(info.id, info.url, peer)
            is_new = not self.members.is_known(info)
            replaced = self.members.join(sender, info, time.monotonic())
        except ProtocolError as error:
            self._drop(str(error), peer)
            self._send(sender, messages.Refused(str(error)))
            return
        if is_new:
            _log.info("%s (%s) joined from %s: %s", info.id, info.role.value, peer, info.url)
        if replaced is not None:
            _log.warning("%s was replaced by process %d", info.id, info.pid)
            reason = f"process {info.pid} joined as {info.id}; give every instance its own name"
            self._send(replaced, messages.Refused(reason))
        if not self.members.is_ready(info):
            self._router.on_hello(info)

    def _on_report(self, sender: bytes, report: messages.LoadReport) -> None:
        now = time.monotonic()
        found = self.members.report(sender, report, now)
        if not found.is_welcome:
            self._ask_for_hello(sender)
        if found.ended is not None:
            self._router.on_flip(report.instance, found.ended)
        if report.is_draining or (report.flip is not None and report.flip.is_under_way):
            self._router.on_ending()
        if found.uncommitted is not None:
            self._send(sender, messages.RoleCommitted(found.uncommitted.epoch, now))

    def _on_flipped(self, sender: bytes, message: messages.Flipped) -> None:
        if not self.members.flipped(sender, message):
            self._ask_for_hello(sender)
            return
        _log.info("%s has the role %s now", message.instance, message.role)
        self._poll()
        self._send(sender, messages.RoleCommitted(message.epoch, time.monotonic()))

    def _ask_for_hello(self, sender: bytes) -> None:
        if self.members.may_join(sender):
            self._send(sender, messages.WhoAreYou())

    def _send(self, sender: bytes, message: messages.ToInstance | bytes) -> bool:
        frame = message if isinstance(message, bytes) else messages.encode(message)
        try:
            assert self._socket is not None
            self._socket.send_multipart((sender, frame), zmq.NOBLOCK)
        except zmq.ZMQError:  # EAGAIN: it does not read; EHOSTUNREACH: it is gone
            self.counters.undelivered += 1
            return False
        self.counters.sent += 1
        return True

    def _drop(self, why: str, peer: str = "") -> None:
        self.counters.dropped += 1
        if peer not in self._dropped_from and len(self._dropped_from) < _MAX_NAMED:
            self._dropped_from[peer] = None
            where = f" from {peer}" if peer else ""
            _log.warning("the control port dropped %s%s; its next ones are counted", why, where)


def _peer_of(frame: zmq.Frame) -> str:
    return str(frame.get("Peer-Address"))
