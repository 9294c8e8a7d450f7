"""Placing requests on made-up clusters: what `bench decisions` times of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from vllm_tetri.policy.adaptive import Candidates, choose_place
from vllm_tetri.policy.site import Ask
from vllm_tetri.policy.sites import Sites
from vllm_tetri.policy.step_fit import GUESS
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

_MODEL = "model"
_USUAL = Ask(512, 200)


def placement(size: int, rng: Random) -> Callable[[], object]:
    """A decision over so many instances, a quarter of them prefill; each time another
    request, and what was sent before counts."""
    sites = Sites()
    sites.renew(_view(size, rng), 0.0)
    candidates = Candidates(sites.by_model[_MODEL], _USUAL, rng)

    def decide() -> None:
        ask = Ask(rng.randint(16, 2000), rng.randint(8, 600))
        place = choose_place(candidates, ask, may_split=True)
        assert place is not None
        sites.send(place.prompt, place.answer, ask, 0.0)

    return decide


def renewal(size: int, rng: Random) -> Callable[[], object]:
    """What is done once per view."""
    sites, views = Sites(), [_view(size, rng) for _ in range(2)]

    def renew() -> None:
        views.reverse()
        sites.renew(views[0], 0.0)
        Candidates(sites.by_model[_MODEL], _USUAL, rng)

    return renew


def _view(size: int, rng: Random) -> ClusterView:
    instances = map(partial(_instance, rng=rng), range(size))
    return ClusterView("router", 1, tuple(instances))


def _instance(index: int, rng: Random) -> InstanceView:
    role = Role.PREFILL if index % 4 == 0 else Role.DECODE
    decodes = 0 if role is Role.PREFILL else rng.randrange(100)
    load = InstanceLoad(
        queued_prefill_tokens=rng.randrange(4000),
        blocks_total=20_000,
        blocks_used=rng.randrange(10_000),
        light=decodes,
        remaining_tokens=decodes * rng.randint(1, 400),
        context_tokens=decodes * rng.randint(100, 2000),
        chunk_tokens=512,
        cost=GUESS,
    )
    info = InstanceInfo(
        id=InstanceId(f"instance-{index}"),
        url=f"http://instance-{index}",
        role=role,
        models=(_MODEL,),
        kv_endpoint=f"instance-{index}:1",
        identity={"model": _MODEL, "dtype": "bfloat16"},
        max_model_len=8192,
        block_size=16,
        pid=1,
        version="0",
    )
    return InstanceView(info, InstanceState.READY, load, 0.05, 1)
