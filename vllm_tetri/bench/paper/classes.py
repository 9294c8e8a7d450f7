"""Figures 11 to 15: classes of requests, simulated.

The paper compares one prefill and one decode instance with one vLLM on half of the cards, and
does not say how requests arrive. Here they arrive at once, and one by one at seven tenths of
what that vLLM answers when they are there at once. Beside it stand today's vLLM, Sarathi-Serve
and DistServe on as many cards as TetriInfer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from vllm_tetri.bench.paper.case import Case, Size, at_once, played, shape_of
from vllm_tetri.sim.figures import Slo, figures
from vllm_tetri.sim.links import LINKS, Link
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.systems import Parts, system_of
from vllm_tetri.sim.workload import KINDS, Ask, draw

# Section 5.1: vLLM with a fixed batch.
_BATCH = 16
_LOAD = 0.7
_ANY = Slo(1.0, 1.0)  # goodput is not asked here


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    system: str
    instances: int
    max_requests: int | None = None


_BASE = _System("vllm-2023", "vllm-2023", 1, _BATCH)
_SYSTEMS = (
    _BASE,
    _System("vllm-2023, batch 256", "vllm-2023", 1),
    _System("vllm-2023 on all cards", "vllm-2023", 2, _BATCH),
    _System("tetri", "tetri", 2),
    _System("vllm on all cards", "vllm", 2),
    _System("sarathi on all cards", "sarathi", 2),
    _System("distserve", "distserve", 2),
    _System("adaptive", "adaptive", 2),
)


def cases(size: Size) -> Iterator[Case]:
    """All classes, over both links."""
    count = size.requests["e1"]
    asked: dict[str, Callable[[str, int], list[Ask]]] = {
        "": partial(_at_once, count),
        ", one by one": partial(_one_by_one, count),
    }
    for kind in KINDS:
        for link_name, link in LINKS.items():
            for label, asks in asked.items():
                for system in _SYSTEMS:
                    setting = setting_of(system, link)
                    play = partial(_play, setting, partial(asks, kind))
                    yield Case("e1", f"{kind}, {link_name}{label}", system.name, play)


def setting_of(system: _System, link: Link) -> Callable[[int], Setting]:
    """The system with a seed."""
    shape = shape_of()
    if system.max_requests is not None:
        shape = replace(shape, max_requests=system.max_requests)
    return lambda seed: replace(
        system_of(system.system, Parts(system.instances, shape, seed=seed)), link=link
    )


def _at_once(count: int, kind: str, seed: int) -> list[Ask]:
    return at_once(kind, count, seed)


def _one_by_one(count: int, kind: str, seed: int) -> list[Ask]:
    return draw(kind, count, _rate_per_s(count, kind, seed), seed)


@cache
def _rate_per_s(count: int, kind: str, seed: int) -> float:
    """The same for every system and link."""
    base = setting_of(_BASE, next(iter(LINKS.values())))
    end_s = played(base(seed), at_once(kind, count, seed)).end_s
    return _LOAD * count / end_s


def _play(
    setting: Callable[[int], Setting], asks: Callable[[int], list[Ask]], seed: int
) -> dict[str, float]:
    outcome = played(setting(seed), asks(seed))
    found = figures(outcome.served, _ANY)
    return {
        "ttft_mean_s": found.ttft_mean_s,
        "ttft_p99_s": found.ttft_p99_s,
        "itl_p99_s": found.itl_p99_s,
        "jct_mean_s": found.jct_mean_s,
        "jct_p99_s": found.jct_p99_s,
        # Instances are charged while they compute: an idle one could serve others.
        "resource_s": sum(outcome.busy.values()) * outcome.end_s,
    }
