"""Compare systems by name: `python -m examples.benchmarks.rivals --system all --instances 4`."""

from __future__ import annotations

import argparse
import sys

from examples.benchmarks.rivals.engines import USUAL_WINDOW_TOKENS
from examples.benchmarks.rivals.systems import SYSTEMS, WITH_ROLES, Parts, system_of
from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.command import (
    add_engine_options,
    add_request_options,
    compare,
    engine_of,
    objective_of,
)
from vllm_tetri.sim.config import ClusterConfig


def main(words: list[str] | None = None) -> int:
    """Simulate the systems, and print a table or JSON."""
    options = _parser().parse_args(words)
    try:
        return compare(options, _systems(options))
    except ConfigError as error:
        print(f"rivals: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SYSTEMS))
    listed = "\n".join(f"  {name:{width}}  {system.words}" for name, system in SYSTEMS.items())
    parser = argparse.ArgumentParser(
        prog="python -m examples.benchmarks.rivals",
        description=f"Compare systems on as many equal instances:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--system",
        nargs="+",
        required=True,
        choices=(*SYSTEMS, "all"),
        metavar="NAME",
        help="systems to compare, a row each; all for all of them",
    )
    add(
        "--instances",
        type=int,
        default=2,
        metavar="N",
        help="number of instances of every system (default: %(default)s)",
    )
    add(
        "--prefill-instances",
        type=int,
        metavar="N",
        help=f"prefill instances among them, for {', '.join(WITH_ROLES)} (default: half)",
    )
    add(
        "--window",
        type=int,
        default=USUAL_WINDOW_TOKENS,
        metavar="TOKENS",
        help="longest prompt and output together, for which static and orca reserve memory "
        "(default: %(default)s)",
    )
    add_engine_options(parser)
    add_request_options(parser)
    return parser


def _systems(options: argparse.Namespace) -> list[tuple[str, ClusterConfig]]:
    parts = Parts(
        options.instances,
        engine_of(options),
        options.prefill_instances,
        options.window,
        objective_of(options),
        options.seed,
    )
    names = SYSTEMS if "all" in options.system else dict.fromkeys(options.system)
    systems = []
    for name in names:
        label = f"{name} {parts.instances}"
        if name in WITH_ROLES:
            prefill, decode = parts.divided()
            label = f"{name} {prefill}P+{decode}D"
        systems.append((label, system_of(name, parts)))
    return systems


if __name__ == "__main__":
    sys.exit(main())
