"""The instance's end of the control channel: one thread that owns one link per router."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol, TypeVar

import zmq
from cachetools import TTLCache
from zmq.utils.monitor import parse_monitor_message

from vllm_tetri import messages
from vllm_tetri.config import control_host, require_guarded
from vllm_tetri.control.links import RouterLink, RouterLinks
from vllm_tetri.control.role import RoleKeeper
from vllm_tetri.control.view import Snapshot, ViewStore
from vllm_tetri.errors import ProtocolError
from vllm_tetri.policy.role import Leaving, Verdict
from vllm_tetri.security import Curve, Secret, is_readable
from vllm_tetri.types import FlipStage, InstanceInfo, InstanceLoad, Role, is_loopback

MAX_QUEUED = 4096
_CLOSE_S = 2.0
_GONE_S = 30.0  # a step that was under way when a router died may still send KV for it
_MAX_GONE = 64  # routers in that time
_UNHEARD_S = 10.0  # without any router, an instance says so
_FLIPPING_S = 0.01  # between two looks at a change of role
_MAX_DRAIN = 256  # frames of one router per wake-up, so that no peer can starve the others

_log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineSide(Protocol):
    """What an agent needs of its engine, on the agent's thread and within microseconds."""

    def read_load(self) -> InstanceLoad: ...  # the numbers of the next report
    # What changed in the prefix cache since the last call, or all that is there.
    def read_cache(self, seq: int, *, is_all: bool) -> messages.CacheReport | None: ...
    def unfinished(self, role: Role) -> str: ...  # a role's work that is left, in words
    def is_idle(self) -> bool: ...  # it takes a new role before anything else that it does
    def take(self, message: messages.ToEngine) -> None: ...  # from a router
    def abandon(self, router: str) -> None: ...  # its connection broke; repeated for a while
    def on_drained(self) -> None: ...  # the instance was drained and has left the cluster


class Agent:
    """Announces an instance to its routers, reports its load and keeps their views.

    Every public method may be called from any thread and none of them waits for the network;
    `close` waits at most two seconds. Routers, at ``tcp://HOST:PORT``, need not be up, and HOST may
    be a name of several; their polls set the pace of reports. ConfigError if an address is
    malformed or needs a secret.
    """

    def __init__(
        self,
        routers: tuple[str, ...],
        info: InstanceInfo,
        engine: EngineSide,
        period_s: float,
        secret: Secret | None = None,
    ) -> None:
        for address in routers:
            require_guarded("--tetri-control", control_host(address), has_secret=bool(secret))
        self._routers = routers
        self._links = RouterLinks(routers, None if secret is None else Curve(secret))
        self._info, self._engine = info, engine
        self._period_s = period_s
        self._late_s = 6 * period_s  # without a poll for this time, report nevertheless
        self.roles = RoleKeeper(info.id, info.role)
        # The names of routers that went, as long as it matters.
        self._gone: TTLCache[str, None] = TTLCache(_MAX_GONE, _GONE_S)
        self._leaving, self._verdict = Leaving(self.roles.expected), Verdict.STAY
        self._outbox: deque[messages.Published] = deque()
        self._described: InstanceInfo | None = None  # not yet told
        self._views = ViewStore()
        self._logged: set[str] = set()
        self.num_flips = 0  # roles taken since the start
        self.dropped_messages = 0  # malformed frames, and messages that found their queue full
        self._load, self._seq, self._reported_s = InstanceLoad(), 0, -inf
        self._cache_seq = 0  # of the newest report of the prefix cache
        self._is_polled = self._was_ordered = False  # the latter: to drain, by a router
        self._unheard_at_s = time.monotonic() + _UNHEARD_S
        self._leave_by_s = inf  # goes before the deadline of a router's order
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the life of _wake, _thread and counters
        self._wake = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once."""
        with self._lock:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="tetri-agent", daemon=True)
            self._thread.start()

    def snapshot(self) -> Snapshot:
        """The instances that decode, over all routers; the same object until a poll comes."""
        return self._views.snapshot(time.monotonic())

    def take_role(self) -> Role | None:
        """Engine thread: the role to have from now on, if it is another one."""
        role = self.roles.take()
        if role is not None:
            self.wake_up()
        return role

    def publish(self, message: messages.Published, *, is_urgent: bool = True) -> None:
        """Queue a message for every router; dropped and counted when the queue is full. One that
        is not urgent goes out with the next report, and so does not wake the agent's thread."""
        if len(self._outbox) < MAX_QUEUED:
            self._outbox.append(message)
            if is_urgent:
                self.wake_up()
        else:
            self._count_drop()

    def leave(self, deadline_s: float) -> None:
        """Drain and leave within `deadline_s`, whatever routers order. It takes no lock, so a
        signal handler may call it; the thread sees it within a report period."""
        self._leave_by_s = time.monotonic() + deadline_s

    def describe(self, info: InstanceInfo) -> None:
        """Introduce the instance anew to every router: something else than its role changed."""
        self._described = info
        self.wake_up()

    def close(self) -> None:
        """Send `Goodbye` to every router and stop the thread. Idempotent."""
        self._stop.set()
        self.wake_up()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
            if thread.is_alive():
                self._log_once("stuck", "the control agent did not stop within %s s", _CLOSE_S)

    def wake_up(self) -> None:
        """Let the thread look at what it waits for."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _count_drop(self) -> None:
        with self._lock:
            self.dropped_messages += 1

    def _log_once(self, key: str, text: str, *args: object, exc_info: bool = False) -> None:
        if key not in self._logged and len(self._logged) < 64:
            self._logged.add(key)
            _log.warning(text, *args, exc_info=exc_info)

    # Everything below runs on the agent's thread.

    def _run(self) -> None:
        try:
            self._links.open()
            self._loop()
            is_drained = self._verdict is not Verdict.STAY
            cut_off = self._read_unfinished(Role.BOTH) if self._verdict is Verdict.CUT_OFF else ""
            if is_drained:
                _log.info("%s leaves the cluster; unfinished: %s", self._info.id, cut_off or "none")
            self._send_all(
                messages.Goodbye(self._info.id, is_drained and self._was_ordered, cut_off)
            )
        except Exception:
            _log.exception("the control agent of %s died", self._info.id)
        finally:
            self._links.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1
        if self._verdict is not Verdict.STAY:
            self._engine.on_drained()

    def _loop(self) -> None:
        poller = self._links.poller
        poller.register(self._wake, zmq.POLLIN)
        while not self._stop.is_set() and self._verdict is Verdict.STAY:
            if self._links.update():
                self._described = self._described or self._info
            since_s = (now := time.monotonic()) - self._reported_s
            if self._leave_by_s < inf:
                self._leaving.ask(self._leave_by_s - now, now)
            if since_s >= (self._period_s / 2 if self._is_polled else self._late_s):
                self._report()
                since_s = 0.0
            if now >= self._unheard_at_s:
                self._unheard_at_s = inf
                self._say_unheard()
            self._is_polled = False
            wait_s = self._late_s - since_s if self.roles.is_steady else _FLIPPING_S
            ready = dict(poller.poll(max(1, round(wait_s * 1000))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for link in self._links:
                if link.events in ready:
                    self._on_event(link)
                if link.socket in ready:
                    self._drain(link)
            while self._outbox:
                if not self._send_all(self._outbox.popleft()):
                    self._count_drop()
            described, self._described = self._described, None
            if described is not None:
                self._info = replace(described, role=self._info.role, num_routers=len(self._links))
                self._send_all(messages.Hello(self._info))
            if not self.roles.is_steady:
                self._continue_flip()
            if self._leaving.is_asked:
                is_at_rest = not self._read_unfinished(Role.BOTH)
                self._verdict = self._leaving.decide(is_at_rest=is_at_rest, now=time.monotonic())

    def _say_unheard(self) -> None:
        hosts = map(control_host, self._routers)
        _log.log(
            logging.INFO if all(map(is_loopback, hosts)) else logging.WARNING,
            "no router at %s has answered for %.0f s; until one does, this instance serves alone. "
            "Start one there, or open its control port to this machine.",
            ", ".join(self._routers), _UNHEARD_S,
        )  # fmt: skip

    def _on_event(self, link: RouterLink) -> None:
        event = parse_monitor_message(link.events.recv_multipart())["event"]
        if event == zmq.EVENT_DISCONNECTED:
            link.is_connected = False
            self._lose_router(link)
            self._abandon_gone()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.is_connected, self._unheard_at_s = True, inf
            self._send_hello(link)
            self._reported_s = -inf  # report at once
        else:
            self._log_once(
                f"refused by {link.index}",
                "the router at %s and this instance refuse each other; if that lasts, give both "
                "the same secret (--secret-file, --tetri-secret-file), or neither",
                link.address,
            )

    def _record_router(self, link: RouterLink, router: str) -> None:
        if not router or not link.is_connected:
            return  # the poll may be older than the end of its connection
        if link.router != router:
            self._lose_router(link)
            link.router = router
        self._gone.pop(router, None)

    def _lose_router(self, link: RouterLink) -> None:
        router, link.router = link.router, ""
        if router and all(each.router != router for each in self._links):
            self._gone[router] = None

    def _abandon_gone(self) -> None:
        for router in list(self._gone):
            self._ask("abandoning a router", None, self._engine.abandon, router)

    def _report(self) -> None:
        self._abandon_gone()
        load = self._load = self._ask("reading the load", self._load, self._engine.read_load)
        self._reported_s, self._seq = time.monotonic(), self._seq + 1
        is_draining, flip = self._leaving.is_asked, self.roles.newest(self._reported_s)
        what = self._info.id, self._seq, load, is_draining, self.roles.epoch, flip
        self._send_all(messages.LoadReport(*what))
        read = partial(self._engine.read_cache, self._cache_seq + 1, is_all=False)
        if (changes := self._ask("reading the prefix cache", None, read)) is not None:
            self._cache_seq += 1
            self._send_all(changes)

    def _ask(self, what: str, otherwise: T, call: Callable[..., T], *args: object) -> T:
        """Call the engine: an error there must not make the instance look dead."""
        try:
            return call(*args)
        except Exception:
            self._log_once(what, "%s failed; the agent goes on", what, exc_info=True)
            return otherwise

    def _read_unfinished(self, role: Role) -> str:
        return self._ask("looking at unfinished work", "unknown", self._engine.unfinished, role)

    def _continue_flip(self) -> None:
        roles = self.roles
        left = self._read_unfinished(roles.role) if roles.stage is FlipStage.DRAINING else ""
        if roles.proceed(left, self._engine.is_idle(), time.monotonic()):
            self._info = replace(self._info, role=roles.role)
            self.num_flips += 1
            self._send_all(messages.Flipped(self._info.id, roles.role, roles.epoch))
        if roles.is_steady:
            self._report()

    def _send_hello(self, link: RouterLink) -> None:
        link.send(messages.encode(messages.Hello(self._info)))
        self._send_cache(link)

    def _send_cache(self, link: RouterLink) -> None:
        read = partial(self._engine.read_cache, self._cache_seq, is_all=True)
        if (cache := self._ask("reading the prefix cache", None, read)) is not None:
            link.send(messages.encode(cache))

    def _send_all(self, message: messages.ToRouter) -> bool:
        """Send to every router; False if none can be reached."""
        frame = messages.encode(message)
        return sum(link.send(frame) for link in self._links) > 0

    def _drain(self, link: RouterLink) -> None:
        for _ in range(_MAX_DRAIN):
            if not is_readable(link.socket):
                return
            parts = link.socket.recv_multipart()
            self.roles.expected.record_message(link.index, time.monotonic())
            try:
                if len(parts) != 1:
                    raise ProtocolError(f"{len(parts)} parts instead of one")
                self._take(link, messages.decode_to_instance(parts[0]))
            except ProtocolError as error:
                self._count_drop()
                self._log_once("frame", "dropped a control frame: %s", error)

    def _take(self, link: RouterLink, message: messages.ToInstance) -> None:
        now = time.monotonic()
        match message:
            case messages.Poll():
                self._is_polled = True
                self._record_router(link, message.router)
                if message.in_flight is not None:
                    self.roles.expected.record_in_flight(link.index, message.in_flight, now)
                if not self._views.observe(link.index, message, now):
                    self._send_hello(link)  # its view got lost: a router sends one after this
            case messages.Drain(deadline_s=deadline_s):
                self._was_ordered = True
                self._leaving.ask(deadline_s, now)
            case messages.FlipRole():
                self.roles.obey(message, now)
                self._reported_s = -inf
            case messages.RoleCommitted(epoch=epoch, at_s=at_s):
                if self.roles.record_commit(epoch, at_s, now):
                    self._reported_s = -inf
            case messages.WhoAreYou():
                self._send_hello(link)
            case messages.SendCache():
                self._send_cache(link)
            case messages.Placed():
                frame = messages.encode(message)
                for other in self._links:
                    is_same = other is link or (link.router and other.router == link.router)
                    if not is_same:  # two addresses may lead to one
                        other.send(frame)
            case messages.Refused(reason=reason):
                self._log_once(f"refused {reason}", "a router refused this instance: %s", reason)
            case _:
                self._ask(f"taking {type(message).__name__}", None, self._engine.take, message)
