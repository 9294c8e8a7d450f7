"""The cells of `vllm-tetri bench modes` again, in the simulator: how far it is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from vllm_tetri.bench.modes.cells import Cell
from vllm_tetri.bench.modes.load import WINDOW_TOKENS
from vllm_tetri.bench.modes.systems import NIXL, REPLICAS, SYSTEMS
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.engine.kinds import Stock
from vllm_tetri.sim.setting import Setting, Shape, of_profile, places
from vllm_tetri.sim.workload import Ask

_BLOCK_SIZE = 128  # of vLLM on CPUs
_KV_BLOCKS = 512  # more than enough for all requests of a cell
_ARENA_REQUESTS = 64
_WORDS = (
    "Means of the same requests, with step costs from `vllm-tetri bench fit`. Error: of the "
    "simulated mean, as part of the measured one."
)
_CHUNK_TOKENS = 256  # the default of our instances on CPUs


@dataclass(frozen=True, slots=True)
class Profiles:
    """An engine on all cores of a run, and on half of them."""

    whole: Profile
    half: Profile


@dataclass(frozen=True, slots=True)
class Beside:
    """A cell, measured and simulated: mean seconds."""

    cell: Cell
    ttft_s: tuple[float, float]
    jct_s: tuple[float, float]

    @property
    def ttft_error(self) -> float:
        """Of the simulated mean, as part of the measured one."""
        return self.ttft_s[1] / self.ttft_s[0] - 1

    @property
    def jct_error(self) -> float:
        return self.jct_s[1] / self.jct_s[0] - 1


def beside(cells: Sequence[Cell], profiles: Profiles) -> list[Beside]:
    """Every cell whose requests were all answered, of systems that the simulator has."""
    return [
        _beside(cell, profiles)
        for cell in cells
        if cell.system != NIXL and len(cell.answered) == len(cell.requests)
    ]


def _beside(cell: Cell, profiles: Profiles) -> Beside:
    asks = [
        Ask(place, each.at_s, each.prompt_tokens, each.output_tokens)
        for place, each in enumerate(cell.requests)
    ]
    served = simulate(_setting(cell.system, profiles), asks)
    return Beside(
        cell,
        (fmean(each.reply.ttft_s for each in cell.requests), fmean(each.ttft_s for each in served)),
        (fmean(each.reply.jct_s for each in cell.requests), fmean(each.jct_s for each in served)),
    )


def _setting(name: str, profiles: Profiles) -> Setting:
    """The simulator's words for a system of the benchmark."""
    system = SYSTEMS[name]
    known = profiles.whole if system.engines == 1 else profiles.half
    shape = of_profile(Shape(kv_blocks=_KV_BLOCKS, block_size=_BLOCK_SIZE), known)
    if not system.is_ours:
        engine = Stock(int(system.serve[-1])) if system.serve else Stock()
        alike = places(both=system.engines, shape=replace(shape, engine=engine))
        return Setting(alike, "least-in-flight" if name == REPLICAS else "round-robin")
    shape = replace(shape, chunk_tokens=_CHUNK_TOKENS)
    if system.engines == 1:
        return Setting(places(both=1, shape=shape), "adaptive")
    arena_tokens = _ARENA_REQUESTS * WINDOW_TOKENS
    shape = replace(shape, arena_tokens=arena_tokens)
    return Setting(places(1, 1, shape=shape), "split")


def markdown(found: Sequence[Beside]) -> str:
    """How far the simulator is off, by system, and every cell."""
    lines = [
        "## Simulated, beside measured",
        "",
        _WORDS,
        "",
        "| system | TTFT, median error | largest | JCT, median error | largest |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name in SYSTEMS:
        own = [each for each in found if each.cell.system == name]
        if own:
            ttft, jct = [each.ttft_error for each in own], [each.jct_error for each in own]
            lines.append(
                f"| {name} | {median(ttft):+.0%} | {max(ttft, key=abs):+.0%} "
                f"| {median(jct):+.0%} | {max(jct, key=abs):+.0%} |"
            )
    lines += [
        "",
        "| system | cell | TTFT measured, ms | simulated | JCT measured, s | simulated |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {each.cell.system} | {each.cell.name} {each.cell.rate}, repeat {each.cell.repeat + 1} "
        f"| {each.ttft_s[0] * 1e3:.0f} | {each.ttft_s[1] * 1e3:.0f} "
        f"| {each.jct_s[0]:.2f} | {each.jct_s[1]:.2f} |"
        for each in found
    ]
    return "\n".join(lines) + "\n"
