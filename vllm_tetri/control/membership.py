"""The table of instances that one router knows. No clock, no socket."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_struct

from vllm_tetri.control.views import GONE_AFTER_S
from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import Flipped, FlipRole, Leave, Left, LoadReport
from vllm_tetri.types import (
    Flip,
    FlipStage,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

MAX_INSTANCES = 1024
MAX_DEPARTED = 256
_MAX_NAME = 128
_MAX_URL = 2048
_MAX_FACTS = 256
_MOST_TOKENS = 1 << 40


@dataclass(slots=True)
class _Member:
    info: InstanceInfo
    sender: bytes
    heard_s: float
    load: InstanceLoad = field(default_factory=InstanceLoad)
    seq: int = 0
    ready: bool = False
    says_leaving: bool = False
    is_asked: bool = False  # to leave
    leave_by_s: float | None = None
    epoch: int = 0
    flip: Flip | None = None
    order: FlipRole | None = None  # to flip, that it has not heard yet
    ordered_s: float = 0.0

    @property
    def is_leaving(self) -> bool:
        return self.is_asked or self.says_leaving

    @property
    def is_draining(self) -> bool:
        if self.order is not None:
            return not self.order.is_now
        return self.flip is not None and self.flip.stage is FlipStage.DRAINING

    @property
    def newest_epoch(self) -> int:
        return max(self.epoch, self.order.epoch if self.order is not None else 0)

    @property
    def is_ending(self) -> bool:
        """Whether it is to leave or to have another role."""
        return self.is_leaving or self.is_draining or self.order is not None

    @property
    def dispatches(self) -> bool:
        """Whether it chooses where KV goes: also for prompts of a role or mode that was."""
        return self.info.role is not Role.DECODE or self.load.queued_prefill_tokens > 0

    def is_same_process(self, info: InstanceInfo) -> bool:
        return (self.info.pid, self.info.url) == (info.pid, info.url)


class Membership:
    """Who is in, under which ZeroMQ address, and what it last reported."""

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._members: dict[InstanceId, _Member] = {}
        self._ids: dict[bytes, InstanceId] = {}
        self._replaced: OrderedDict[bytes, None] = OrderedDict()
        self._departed: OrderedDict[InstanceId, str] = OrderedDict()
        self.is_mixed = False  # all dispatch, to all
        self.roster = 0  # another number whenever an instance came, spoke up again or went

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
                member = known
                member.info, member.sender, member.heard_s = info, sender, now
            elif known.sender != sender:
                replaced = known.sender
                self._remember_replaced(replaced)
        self._members[info.id] = member
        self.roster += 1
        self._departed.pop(info.id, None)
        self._ids[sender] = info.id
        self._replaced.pop(sender, None)
        return replaced

    def report(self, sender: bytes, report: LoadReport, now: float) -> bool:
        """Note a load; False when this sender did not introduce itself by that name, or
        had another role then."""
        if self._ids.get(sender) != report.instance:
            return False
        member = self._members[report.instance]
        member.load, member.seq, member.heard_s = report.load, report.seq, now
        member.says_leaving = report.is_leaving
        member.epoch, member.flip = report.epoch, report.flip
        if member.order is not None and report.epoch >= member.order.epoch:
            member.order = None
        # It told us so, but that was lost.
        flip = report.flip
        return flip is None or member.info.role is (
            flip.target if flip.stage is FlipStage.DONE else flip.source
        )

    def newest_flip(self, instance: InstanceId) -> tuple[bool, Flip | None]:
        """Whether a member has reported yet, and the newest flip that it told of."""
        member = self._members.get(instance)
        return (False, None) if member is None else (member.seq > 0, member.flip)

    def ask_to_leave(self, instance: InstanceId, by_s: float | None) -> None:
        """Want a member gone, at the latest at the monotonic time `by_s`."""
        member = self._members[instance]
        member.is_asked, member.says_leaving, member.leave_by_s = True, False, by_s

    def leave_for(self, instance: InstanceId, now: float) -> Leave | None:
        """What to tell a member that has not understood yet that it is to leave. vLLM's
        server ends in good order only when it has started."""
        member = self._members[instance]
        if not member.is_asked or member.says_leaving or not member.ready:
            return None
        return Leave(None if member.leave_by_s is None else max(0.0, member.leave_by_s - now))

    def order_flip(self, instance: InstanceId, order: FlipRole, now: float) -> FlipRole:
        """Want a member to have another role; its epoch is set here."""
        member = self._members[instance]
        member.order = replace_struct(order, epoch=member.newest_epoch + 1)
        member.ordered_s = now
        return member.order

    def flip_for(self, instance: InstanceId, now: float) -> FlipRole | None:
        """What to tell a member that has not heard yet what role it is to have; nothing
        any more once its deadline has passed."""
        member = self._members[instance]
        order = member.order
        if order is None or order.deadline_s is None:
            return order
        left_s = member.ordered_s + order.deadline_s - now
        if left_s <= 0:
            member.order = None
            return None
        return replace_struct(order, deadline_s=left_s)

    def orders_for(self, instance: InstanceId, now: float) -> Iterator[Leave | FlipRole]:
        """What to tell a member again."""
        orders = (self.leave_for(instance, now), self.flip_for(instance, now))
        return (order for order in orders if order is not None)

    def flipped(self, sender: bytes, message: Flipped) -> bool:
        """A member has another role; False if it is no member."""
        if self._ids.get(sender) != message.instance:
            return False
        member = self._members[message.instance]
        member.info = replace(member.info, role=message.role)
        self.roster += 1
        return True

    def left(self, sender: bytes, message: Left) -> bool:
        """Forget an instance that goes in good order; False if it is no member."""
        if self._ids.get(sender) != message.instance:
            return False
        del self._ids[sender], self._members[message.instance]
        self.roster += 1
        if message.was_asked:
            self._departed[message.instance] = message.cut_off
            while len(self._departed) > MAX_DEPARTED:
                self._departed.popitem(last=False)
        return True

    @property
    def departed(self) -> dict[InstanceId, str]:
        """Who left because it was asked to, and what a deadline cut off there. Until it
        joins again; the newest few."""
        return dict(self._departed)

    def forgive(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long: that is no silence of theirs."""
        for member in self._members.values():
            member.heard_s = min(now, member.heard_s + seconds)

    def forget_gone(self, now: float) -> None:
        """Forget instances that have been silent for a minute."""
        for instance, member in list(self._members.items()):
            if now - member.heard_s >= GONE_AFTER_S:
                self._ids.pop(member.sender, None)
                del self._members[instance]
                self.roster += 1

    def mark_ready(self, info: InstanceInfo) -> None:
        """Its HTTP server answered; ignored for a process that is no member any more."""
        member = self._members.get(info.id)
        if member is not None and member.is_same_process(info):
            member.ready = True

    def is_ready(self, info: InstanceInfo) -> bool:
        """Whether this very process was marked ready."""
        member = self._members.get(info.id)
        return member is not None and member.is_same_process(info) and member.ready

    def is_known(self, info: InstanceInfo) -> bool:
        """Whether this very process is a member, be it silent for the moment."""
        member = self._members.get(info.id)
        return member is not None and member.is_same_process(info)

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

    def dispatchers(self) -> list[bytes]:
        """The ZeroMQ addresses of the instances that choose where KV goes."""
        return [member.sender for member in self._members.values() if self._dispatches(member)]

    def _dispatches(self, member: _Member) -> bool:
        return self.is_mixed or member.dispatches

    def mix(self, is_mixed: bool) -> None:
        """Whether any instance may compute prompts for any other from now on."""
        if is_mixed != self.is_mixed:
            self.is_mixed = is_mixed
            self.roster += 1

    def cued(self) -> list[tuple[bytes, InstanceId, bool]]:
        """Address and name of those that get no view, or are ending something (then True)."""
        return [
            (member.sender, instance, is_ending)
            for instance, member in self._members.items()
            if (is_ending := member.is_ending) or not self._dispatches(member)
        ]

    def views(self, now: float) -> tuple[InstanceView, ...]:
        """Every instance as of `now`."""
        return tuple(self._view(member, now) for member in self._members.values())

    def view_of(self, instance: InstanceId, now: float) -> InstanceView | None:
        """One instance as of `now`."""
        member = self._members.get(instance)
        return None if member is None else self._view(member, now)

    def _view(self, member: _Member, now: float) -> InstanceView:
        return InstanceView(
            member.info,
            self._state(member, now),
            member.load,
            now - member.heard_s,
            member.seq,
            _flip_of(member, now),
        )

    def _state(self, member: _Member, now: float) -> InstanceState:
        if self._is_silent(member, now):
            return InstanceState.SILENT
        if member.is_leaving:
            return InstanceState.LEAVING
        if member.ready and member.is_draining:
            return InstanceState.FLIPPING
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


def _flip_of(member: _Member, now: float) -> Flip | None:
    """Its newest flip, also one that it has not heard of yet."""
    order = member.order
    if order is None:
        return member.flip
    return Flip(
        order.epoch,
        member.info.role,
        order.role,
        FlipStage.SWITCHING if order.is_now else FlipStage.DRAINING,
        age_s=now - member.ordered_s,
        reason=order.reason,
        is_heard=False,
    )


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
    sizes = [len(text) for pair in info.identity.items() for text in pair]
    sizes += [len(model) for model in (*info.models, info.version, info.device)]
    if len(sizes) > _MAX_FACTS or max(sizes) > _MAX_URL:
        raise ProtocolError(f"{info.id} says more of itself than fits into a view")
