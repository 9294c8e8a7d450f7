"""The table of instances that one router knows. No clock, no socket."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from vllm_tetri.control.views import GONE_AFTER_S
from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import (
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
)

MAX_INSTANCES = 1024
_MAX_NAME = 128
_MAX_URL = 2048
_MAX_FACTS = 256


@dataclass(slots=True)
class _Member:
    info: InstanceInfo
    sender: bytes
    heard_s: float
    load: InstanceLoad = field(default_factory=InstanceLoad)
    ready: bool = False

    def is_same_process(self, info: InstanceInfo) -> bool:
        return (self.info.pid, self.info.url) == (info.pid, info.url)


class Membership:
    """Who is in, under which ZeroMQ address, and what it last reported."""

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[InstanceId, _Member] = {}
        self._ids: dict[bytes, InstanceId] = {}
        self._replaced: OrderedDict[bytes, None] = OrderedDict()

    def join(self, sender: bytes, info: InstanceInfo, now: float) -> bytes | None:
        """Take an instance in, or renew what it said.

        Returns:
            The address of another process that had the same name until now.

        Raises:
            ProtocolError: What it says cannot be used.
        """
        _check(info)
        known = self._members.get(info.id)
        if known is None and len(self._members) >= MAX_INSTANCES:
            raise ProtocolError(f"{info.id}: there are {MAX_INSTANCES} instances already")
        self._drop_name_of(sender, keep=info.id)
        member = _Member(info, sender, now)
        replaced = None
        if known is not None:
            self._ids.pop(known.sender, None)
            if known.is_same_process(info):
                member.load, member.ready = known.load, known.ready
            elif known.sender != sender:
                replaced = known.sender
                self._remember_replaced(replaced)
        self._members[info.id] = member
        self._ids[sender] = info.id
        self._replaced.pop(sender, None)
        return replaced

    def report(self, sender: bytes, instance: InstanceId, load: InstanceLoad, now: float) -> bool:
        """Note a load; False when this sender did not introduce itself as `instance`."""
        if self._ids.get(sender) != instance:
            return False
        member = self._members[instance]
        member.load = load
        member.heard_s = now
        return True

    def leave(self, sender: bytes, instance: InstanceId) -> None:
        """Forget an instance that goes in good order."""
        if self._ids.get(sender) == instance:
            del self._ids[sender], self._members[instance]

    def forget_gone(self, now: float) -> None:
        """Forget instances that have been silent for a minute."""
        for instance, member in list(self._members.items()):
            if now - member.heard_s >= GONE_AFTER_S:
                self._ids.pop(member.sender, None)
                del self._members[instance]

    def mark_ready(self, info: InstanceInfo) -> None:
        """Its HTTP server answered; ignored for a process that is no member any more."""
        member = self._members.get(info.id)
        if member is not None and member.is_same_process(info):
            member.ready = True

    def is_ready(self, info: InstanceInfo) -> bool:
        """Whether this very process was marked ready."""
        member = self._members.get(info.id)
        return member is not None and member.is_same_process(info) and member.ready

    def is_live(self, info: InstanceInfo, now: float) -> bool:
        """Whether this very process is a member and not silent."""
        member = self._members.get(info.id)
        return (
            member is not None and member.is_same_process(info) and not self._is_silent(member, now)
        )

    def is_member(self, sender: bytes) -> bool:
        """Whether the address belongs to an instance."""
        return sender in self._ids

    def was_replaced(self, sender: bytes) -> bool:
        """Whether another process took this sender's name."""
        return sender in self._replaced

    def sender_of(self, instance: InstanceId) -> bytes | None:
        """The ZeroMQ address of an instance."""
        member = self._members.get(instance)
        return None if member is None else member.sender

    def senders(self) -> list[bytes]:
        """The ZeroMQ addresses of all instances."""
        return list(self._ids)

    def views(self, now: float) -> tuple[InstanceView, ...]:
        """Every instance as of `now`."""
        return tuple(
            InstanceView(member.info, self._state(member, now), member.load, now - member.heard_s)
            for member in self._members.values()
        )

    def _state(self, member: _Member, now: float) -> InstanceState:
        if self._is_silent(member, now):
            return InstanceState.SILENT
        return InstanceState.READY if member.ready else InstanceState.STARTING

    def _is_silent(self, member: _Member, now: float) -> bool:
        return now - member.heard_s >= self._silent_after_s

    def _drop_name_of(self, sender: bytes, keep: InstanceId) -> None:
        former = self._ids.get(sender)
        if former is not None and former != keep:
            del self._ids[sender], self._members[former]

    def _remember_replaced(self, sender: bytes) -> None:
        self._replaced[sender] = None
        while len(self._replaced) > MAX_INSTANCES:
            self._replaced.popitem(last=False)


def _check(info: InstanceInfo) -> None:
    if not 0 < len(info.id) <= _MAX_NAME or not info.id.isprintable():
        raise ProtocolError(f"an instance's name has 1 to {_MAX_NAME} printable characters")
    if not info.url.startswith("http://") or len(info.url) > _MAX_URL:
        raise ProtocolError(f"{info.id}: url {info.url[:80]!r} does not start with http://")
    if not info.models or not all(info.models):
        raise ProtocolError(f"{info.id} serves no model")
    host, _, port = info.kv_endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or len(host) > _MAX_NAME:
        raise ProtocolError(f"{info.id}: KV endpoint {info.kv_endpoint[:80]!r} is not HOST:PORT")
    sizes = [len(text) for pair in info.identity.items() for text in pair]
    sizes += [len(model) for model in info.models]
    if len(sizes) > _MAX_FACTS or max(sizes) > _MAX_URL:
        raise ProtocolError(f"{info.id} says more of itself than fits into a view")
