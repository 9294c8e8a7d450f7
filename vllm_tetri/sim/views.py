"""What router and instances know of instances: reports of a period ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_tetri.policy.lengths import reported_tokens
from vllm_tetri.policy.peers import Peers
from vllm_tetri.sim.cost.step_cost import linear
from vllm_tetri.sim.engine.fcfs import FcfsInstance
from vllm_tetri.sim.engine.instance import Instance
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.setting import Place, Setting
from vllm_tetri.types import (
    ClusterView,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

MODEL = "model"
_WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Picture:
    """A view, and when its ages were right; the same object until there is a newer one.

    What instances that are alike would all make of it is made once.
    """

    view: ClusterView
    at_s: float
    _bucket_tokens: dict[int, list[float]] = field(default_factory=dict, compare=False, repr=False)
    _peers: dict[tuple[object, ...], Peers] = field(default_factory=dict, compare=False, repr=False)

    def bucket_tokens(self, num_buckets: int) -> list[float]:
        """As `policy.lengths.reported_tokens`."""
        found = self._bucket_tokens.get(num_buckets)
        if found is None:
            found = self._bucket_tokens[num_buckets] = reported_tokens(self.view, num_buckets)
        return found

    def peers(self, me: InstanceInfo) -> Peers:
        """Whom an instance sees. One that decodes does not see itself, so only those that do
        not are alike."""
        if me.role is not Role.PREFILL:
            return Peers(self.view, me, self.at_s)
        key = (me.block_size, *sorted(me.identity.items()))
        found = self._peers.get(key)
        if found is None:
            found = self._peers[key] = Peers(self.view, me, self.at_s)
        return found


class Pictures:
    """Takes one of all instances; those that did nothing since are not asked again."""

    def __init__(self, instances: Sequence[Instance], setting: Setting) -> None:
        self._instances = instances
        self._setting = setting
        self._loads = [load_of(each, setting) for each in instances]
        self._infos = [info_of(each.place) for each in instances]
        self._seq = 0

    def take(self, now: float) -> Picture:
        """As of now."""
        self._seq += 1
        for index, instance in enumerate(self._instances):
            if instance.has_changed:
                instance.has_changed = False
                self._loads[index] = load_of(instance, self._setting)
        views = tuple(
            InstanceView(info, InstanceState.READY, load, 0.0, self._seq)
            for info, load in zip(self._infos, self._loads, strict=True)
        )
        return Picture(ClusterView(router="sim", seq=self._seq, instances=views), now)


def info_of(place: Place) -> InstanceInfo:
    """What an instance says of itself once."""
    return InstanceInfo(
        id=place.id,
        url=f"http://{place.id}",
        role=place.role,
        models=(MODEL,),
        kv_endpoint=f"{place.id}:1" if place.shape.can_hand_over else "",
        identity={"block_size": str(place.shape.block_size)},
        max_model_len=_WINDOW_TOKENS,
        block_size=place.shape.block_size,
        pid=1,
        version="sim",
    )


def load_of(instance: Instance, setting: Setting) -> InstanceLoad:
    """What an instance reports, as `engine.load` reads it. A byte of the arena is a token,
    and what steps and hand-overs cost is known, as far as it is linear."""
    shape, cost = instance.shape, linear(instance.shape.cost)
    blocks_used = shape.kv_blocks - instance.free_blocks
    num_running = len(instance.batch) + len(instance.started)
    if isinstance(instance, FcfsInstance):
        jobs = (*instance.started, *instance.waiting)
        return InstanceLoad(
            running=num_running,
            waiting=len(instance.waiting),
            queued_prefill_tokens=sum(job.missing_tokens for job in jobs),
            blocks_used=blocks_used,
            blocks_total=shape.kv_blocks,
        )
    assert isinstance(instance, TetriInstance)
    decodes = instance.decodes()
    num_decodes = decodes.heavy + decodes.light
    context_s = decodes.context_tokens * cost.token_s / num_decodes if num_decodes else 0.0
    chunk_s = shape.cost.step_s(0, 0, shape.chunk_tokens, 0)
    handover_s, handover_token_s = setting.handover_s(shape)
    return InstanceLoad(
        running=num_running,
        waiting=instance.num_waiting(),
        held=len(instance.held) + len(instance.coming),
        queued_prefill_tokens=instance.queued_tokens(),
        blocks_used=blocks_used,
        blocks_total=shape.kv_blocks,
        arena_used_bytes=instance.arena.used_tokens,
        arena_total_bytes=instance.arena.total_tokens,
        heavy=decodes.heavy,
        light=decodes.light,
        remaining_tokens=decodes.remaining_tokens,
        reserved_blocks=instance.gate.reserved_blocks if num_running else 0,
        step_s=instance.step_s,
        prefills_done=instance.prefills_done,
        decodes_done=instance.decodes_done,
        prompt_tokens_done=instance.prompt_tokens_done,
        answer_tokens_done=instance.answer_tokens_done,
        prefill_tokens_per_s=shape.chunk_tokens / chunk_s,
        decode_base_s=cost.base_s,
        decode_request_s=cost.request_s + context_s,
        cost=cost,
        context_tokens=decodes.context_tokens,
        chunk_tokens=shape.chunk_tokens,
        handover_s=handover_s,
        handover_token_s=handover_token_s,
        preemptions=instance.preemptions,
        bucket_tokens=instance.answers.bucket_tokens(),
    )
