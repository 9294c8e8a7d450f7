"""Options of `vllm-tetri sim` for systems by name."""

from __future__ import annotations

import argparse

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.engine.kinds import USUAL_WINDOW_TOKENS
from vllm_tetri.sim.setting import Setting, Shape
from vllm_tetri.sim.systems import APART, SYSTEMS, Parts, system_of

_ALL = "all"


def add_system_options(parser: argparse.ArgumentParser) -> None:
    """Which systems, and of how many instances."""
    width = max(map(len, SYSTEMS))
    group = parser.add_argument_group(
        "systems by name",
        "A row each, all on as many equal instances of --profile, --chunk and --kv-blocks:\n"
        + "\n".join(f"  {name:{width}}  {system.words}" for name, system in SYSTEMS.items()),
    )
    add = group.add_argument
    add(
        "--system",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"instead of --mode or beside it; {_ALL} for all of them",
    )
    add("--instances", type=int, default=2, metavar="N", help="of every system (2)")
    add(
        "--prefill-instances",
        type=int,
        metavar="N",
        help=f"of those for prompts, in {', '.join(APART)} (half)",
    )
    add(
        "--window",
        type=int,
        default=USUAL_WINDOW_TOKENS,
        metavar="TOKENS",
        help="longest prompt and answer together, for which static and orca reserve memory "
        f"({USUAL_WINDOW_TOKENS})",
    )


def named_systems(options: argparse.Namespace, shape: Shape) -> list[tuple[str, Setting]]:
    """Labels and settings of the systems that are wanted.

    Raises:
        ConfigError: There is no such system, or it cannot be built.
    """
    names: list[str] = options.system or []
    if _ALL in names:
        names = list(SYSTEMS)
    if not names:
        return []
    ttft_s, tpot_s = options.slo
    parts = Parts(
        options.instances,
        shape,
        options.prefill_instances,
        options.window,
        Objective(ttft_s, tpot_s),
        options.seed,
    )
    return [(_label(name, parts), _setting(name, parts)) for name in dict.fromkeys(names)]


def _setting(name: str, parts: Parts) -> Setting:
    try:
        return system_of(name, parts)
    except ConfigError as error:
        raise ConfigError(f"--system {name}: {error}") from error


def _label(name: str, parts: Parts) -> str:
    if name not in APART or parts.instances < 2:
        return f"{name} {parts.instances}"
    prefill, decode = parts.divided()
    return f"{name} {prefill}P+{decode}D"
