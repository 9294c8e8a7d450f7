"""The table of instances that one router knows. No clock, no socket."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cachetools import FIFOCache, TTLCache
from msgspec.structs import replace as replace_struct

from vllm_tetri.control.view import GONE_AFTER_S
from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import Drain, Flipped, FlipRole, Goodbye, LoadReport
from vllm_tetri.types import (
    Adapter,
    Flip,
    FlipStage,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
    server_name,
)

MAX_INSTANCES = 1024
MAX_DEPARTED = 256
_MAX_NAME = 128
_MAX_URL = 2048
_MAX_FACTS = 256
_MOST_TOKENS = 1 << 40
_BACK_S = 600.0  # in which an instance that left may be back: weights take minutes to load


@dataclass(slots=True)
class _Member:
    info: InstanceInfo
    sender: bytes
    heard_s: float
    load: InstanceLoad = field(default_factory=InstanceLoad)
    seq: int = 0
    is_ready: bool = False
    was_ready: bool = False  # at any time: its server has started
    reports_draining: bool = False
    drain_by_s: float | None = None  # asked to drain by then, which may be infinity
    epoch: int = 0
    flip: Flip | None = None
    order: FlipRole | None = None  # to flip, not acknowledged by a report yet
    ordered_s: float = 0.0

    @property
    def is_draining(self) -> bool:
        return self.drain_by_s is not None or self.reports_draining

    @property
    def is_flipping(self) -> bool:
        if self.order is not None:
            return not self.order.is_now
        return self.flip is not None and self.flip.stage is FlipStage.DRAINING

    @property
    def state(self) -> InstanceState:
        if self.is_draining:
            return InstanceState.DRAINING
        if not self.is_ready:
            return InstanceState.STARTING
        return InstanceState.FLIPPING if self.is_flipping else InstanceState.READY

    def newest_flip(self, now: float) -> Flip | None:
        if (order := self.order) is None:
            return self.flip
        stage = FlipStage.SWITCHING if order.is_now else FlipStage.DRAINING
        age_s = now - self.ordered_s
        source, target = self.info.role, order.role
        return Flip(order.epoch, source, target, stage, age_s, reason=order.reason, is_heard=False)


class Reported(NamedTuple):
    """What a load report asks of the router."""

    is_welcome: bool = True  # else the sender must introduce itself (again)
    ended: Flip | None = None  # a flip that ended since the last report
    uncommitted: Flip | None = None  # a flip whose `RoleCommitted` got lost


class Membership:
    """The members, their ZeroMQ addresses and what they last reported, in monotonic seconds.

    `roster` changes whenever an instance joins, joins again, changes its role or goes. While
    `is_mixed`, every instance dispatches to every other. `departed` has the newest drained
    instances, each with the work that a deadline cut off.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[InstanceId, _Member] = {}
        self.names: dict[bytes, InstanceId] = {}  # by sender
        # Senders whose name another process took.
        self._replaced: FIFOCache[bytes, InstanceId] = FIFOCache(MAX_INSTANCES)
        self.departed: FIFOCache[InstanceId, str] = FIFOCache(MAX_DEPARTED)
        # Models of instances that left, which may be on their way back.
        self.models_gone: TTLCache[str, None] = TTLCache(MAX_INSTANCES, _BACK_S)
        self.is_mixed, self.roster = False, 0

    def join(self, sender: bytes, info: InstanceInfo, now: float) -> bytes | None:
        """Add an instance, or renew its description; ProtocolError if that cannot be used.
        Returns the address of another process that had the same name until now."""
        _check(info)
        known = self._members.get(info.id)
        if known is None and len(self._members) >= MAX_INSTANCES:
            raise ProtocolError(f"{info.id}: there are {MAX_INSTANCES} instances already")
        if (former := self.names.get(sender, info.id)) != info.id:
            del self.names[sender], self._members[former]
        member, replaced = _Member(info, sender, now), None
        if known is not None:
            self.names.pop(known.sender, None)
            if self.is_known(info):
                member = known
                member.info = replace(info, adapters=known.info.adapters)
                member.sender, member.heard_s = sender, now
            elif known.sender != sender:
                replaced = known.sender
                self._replaced[replaced] = info.id
        self._members[info.id], self.names[sender] = member, info.id
        self.roster += 1
        self.departed.pop(info.id, None)
        self._replaced.pop(sender, None)
        return replaced

    def report(self, sender: bytes, report: LoadReport, now: float) -> Reported:
        """Record a load report."""
        if self.names.get(sender) != report.instance:
            return Reported(is_welcome=False)
        member = self._members[report.instance]
        if report.seq < member.seq:  # another process, with the pid of the one before (containers)
            self._remove(report.instance)
            return Reported(is_welcome=False)
        has_reported, was, flip = member.seq > 0, member.flip, report.flip
        member.load, member.seq, member.heard_s = report.load, report.seq, now
        member.reports_draining = report.is_draining
        member.epoch, member.flip = report.epoch, flip
        if member.order is not None and report.epoch >= member.order.epoch:
            member.order = None
        if flip is None:
            return Reported()
        is_done = flip.stage is FlipStage.DONE
        has_role = member.info.role is (flip.target if is_done else flip.source)
        if not (has_reported and flip.has_ended):
            return Reported(has_role, uncommitted=flip if is_done else None)
        is_known = was is not None and was.epoch == flip.epoch and was.has_ended
        return Reported(has_role, ended=None if is_known else flip)

    def order_drain(self, instance: InstanceId, by_s: float | None) -> None:
        """Want a member drained, at the latest at the time `by_s`; KeyError if it is none."""
        member = self._members[instance]
        member.drain_by_s, member.reports_draining = math.inf if by_s is None else by_s, False

    def order_flip(self, instance: InstanceId, order: FlipRole, now: float) -> FlipRole:
        """Want a member to have another role; sets the epoch. KeyError if it is no member."""
        member = self._members[instance]
        newest = max(member.epoch, member.order.epoch if member.order is not None else 0)
        member.order, member.ordered_s = replace_struct(order, epoch=newest + 1), now
        return member.order

    def orders_for(self, instance: InstanceId, now: float) -> list[Drain | FlipRole]:
        """Orders that no report of a member has acknowledged yet."""
        member = self._members[instance]
        orders: list[Drain | FlipRole] = []
        by_s, order = member.drain_by_s, member.order
        # vLLM's server ends in good order only when it has started.
        if by_s is not None and not member.reports_draining and member.was_ready:
            orders.append(Drain(None if by_s == math.inf else max(0.0, by_s - now)))
        if order is not None and order.deadline_s is not None:
            left_s = member.ordered_s + order.deadline_s - now
            order = replace_struct(order, deadline_s=left_s)
            if left_s <= 0:
                order = member.order = None
        return orders if order is None else [*orders, order]

    def flipped(self, sender: bytes, message: Flipped) -> bool:
        """Record a member's new role; False if the sender is not that member."""
        if self.names.get(sender) != message.instance:
            return False
        member = self._members[message.instance]
        member.info = replace(member.info, role=message.role)
        self.roster += 1
        return True

    def may_join(self, sender: bytes) -> bool:
        """Whether no member is another process with the name of this sender."""
        return self._replaced.get(sender) not in self._members

    def left(self, sender: bytes, message: Goodbye) -> bool:
        """Remove an instance that ends in good order; False if the sender is not that member."""
        if self.names.get(sender) != message.instance:
            return False
        self._remove(message.instance)
        if message.was_asked:
            self.departed[message.instance] = message.cut_off
            return True
        server = server_name(message.instance)  # which was not drained, whatever its other ranks
        for rank in [each for each in self.departed if server_name(each) == server]:
            del self.departed[rank]
        return True

    def _remove(self, instance: InstanceId) -> None:
        member = self._members.pop(instance)
        self.names.pop(member.sender, None)
        self.models_gone.update(dict.fromkeys(member.info.names))
        self.roster += 1

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count a time in which this router could not receive as silence."""
        for member in self._members.values():
            member.heard_s = min(now, member.heard_s + seconds)

    def forget_gone(self, now: float) -> list[InstanceId]:
        """Remove instances that have been silent for a minute, and return them."""
        gone = [name for name, each in self._members.items() if now - each.heard_s >= GONE_AFTER_S]
        for instance in gone:
            self._remove(instance)
        return gone

    def mark_ready(self, info: InstanceInfo, *, is_ready: bool = True) -> None:
        """Record that its HTTP server answered, or that it does not; ignored for a process that is
        no member."""
        if self.is_known(info):
            member = self._members[info.id]
            member.is_ready, member.was_ready = is_ready, member.was_ready or is_ready

    def record_adapters(self, info: InstanceInfo, adapters: dict[str, Adapter]) -> None:
        """Record which LoRA adapters it has; ignored for a process that is no member."""
        if self.is_known(info) and self._members[info.id].info.adapters != adapters:
            member = self._members[info.id]
            member.info = replace(member.info, adapters=adapters)
            self.roster += 1

    def is_ready(self, info: InstanceInfo) -> bool:
        return self.is_known(info) and self._members[info.id].is_ready

    def is_doubted(self, info: InstanceInfo) -> bool:
        """Whether its HTTP server answers no more, but may again."""
        member = self._members.get(info.id)
        return member is not None and member.was_ready and not member.is_ready

    def is_known(self, info: InstanceInfo) -> bool:
        """Whether this very process is a member, even if it is silent at the moment."""
        member = self._members.get(info.id)
        return member is not None and (member.info.pid, member.info.url) == (info.pid, info.url)

    def sender_of(self, instance: InstanceId) -> bytes | None:
        member = self._members.get(instance)
        return None if member is None else member.sender

    def mix(self, is_mixed: bool) -> None:
        """Set whether any instance may compute prompts for any other from now on."""
        self.roster += is_mixed != self.is_mixed
        self.is_mixed = is_mixed

    def dispatches(self, instance: InstanceId) -> bool:
        """Whether a member wants views. One with prompts of a role or mode that was still does."""
        member = self._members[instance]
        has_prompts = member.load.queued_prefill_tokens > 0
        return self.is_mixed or has_prompts or member.info.role is not Role.DECODE

    def is_ending(self, instance: InstanceId) -> bool:
        """Whether a member wants to know how many requests are on their way to it."""
        member = self._members[instance]
        return member.is_draining or member.is_flipping or member.order is not None

    def views(self, now: float) -> tuple[InstanceView, ...]:
        return tuple(self._view(member, now) for member in self._members.values())

    def view_of(self, instance: InstanceId, now: float) -> InstanceView | None:
        member = self._members.get(instance)
        return None if member is None else self._view(member, now)

    def info_of(
        self, instance: InstanceId, now: float, states: Collection[InstanceState]
    ) -> InstanceInfo | None:
        member = self._members.get(instance)
        return member.info if member is not None and self._state(member, now) in states else None

    def _view(self, member: _Member, now: float) -> InstanceView:
        age_s, flip, state = now - member.heard_s, member.newest_flip(now), self._state(member, now)
        return InstanceView(member.info, state, member.load, age_s, member.seq, flip)

    def _state(self, member: _Member, now: float) -> InstanceState:
        is_silent = now - member.heard_s >= self._silent_after_s
        return InstanceState.SILENT if is_silent else member.state


def _check(info: InstanceInfo) -> None:
    if not 0 < len(info.id) <= _MAX_NAME or not info.id.isprintable():
        raise ProtocolError(f"an instance's name has 1 to {_MAX_NAME} printable characters")
    if not info.url.startswith("http://") or len(info.url) > _MAX_URL:
        raise ProtocolError(f"{info.id}: url {info.url[:80]!r} does not start with http://")
    if not info.models or not all(info.models):
        raise ProtocolError(f"{info.id} serves no model")
    host, _, port = info.kv_endpoint.rpartition(":")
    is_port = port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536
    if not host or not is_port or len(host) > _MAX_NAME:
        raise ProtocolError(f"{info.id}: KV endpoint {info.kv_endpoint[:80]!r} is not HOST:PORT")
    if not 0 < info.block_size < _MOST_TOKENS or not 0 < info.max_model_len < _MOST_TOKENS:
        raise ProtocolError(f"{info.id}: blocks and models have 1 to {_MOST_TOKENS} tokens")
    texts = [*info.models, info.root, info.device, info.checkpoint]
    texts += [*info.identity, *info.identity.values()]
    if len(texts) > _MAX_FACTS or max(map(len, texts)) > _MAX_URL:
        raise ProtocolError(f"{info.id}: its description exceeds {_MAX_FACTS} texts of {_MAX_URL}")
