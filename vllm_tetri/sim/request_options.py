"""Options of `vllm-tetri sim` for the requests."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.arrivals import arrivals
from vllm_tetri.sim.trace import read_lengths, read_trace, replay
from vllm_tetri.sim.workload import KINDS, Ask, Phase, draw, draw_phases

_REQUESTS = 500


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Which requests, when, and what is predicted of them."""
    add = parser.add_argument_group("requests").add_argument
    add("--kind", default="mixed", metavar="KIND", help=f"{', '.join(KINDS)} (mixed)")
    add("--rate", type=float, default=1.0, metavar="N", help="arrivals per second (1)")
    add(
        "--arrivals",
        metavar="HOW",
        help="poisson, gamma:CV for bursts (the more the further CV is above 1), or at-once "
        "(poisson)",
    )
    add("--requests", type=int, metavar="N", help="how many (500; of a trace all)")
    add(
        "--phases",
        metavar="KIND:RATE:SECONDS,...",
        help="one after the other, instead of --kind, --rate and --requests",
    )
    add(
        "--lengths",
        type=Path,
        metavar="CSV",
        help="draw lengths from its columns ContextTokens and GeneratedTokens",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded requests at their times: a *.csv of Azure's or a *.jsonl of Mooncake's "
        "(docs/simulator.md), instead of --kind and --rate",
    )
    add(
        "--trace-speed",
        type=float,
        metavar="N",
        help="how many times quicker than recorded they come (1)",
    )
    add("--accuracy", type=float, default=1.0, metavar="PART", help="of predictions (1)")


def requests_of(options: argparse.Namespace) -> list[Ask]:
    """What was asked for, in order of time.

    Raises:
        ConfigError: It makes no sense, or a file cannot be used.
    """
    _exclude(options, "--phases", "--lengths", "--trace")
    _exclude(options, "--phases", "--arrivals")
    _exclude(options, "--trace", "--arrivals")
    if options.trace is None and options.trace_speed is not None:
        raise ConfigError("--trace-speed is for --trace")
    accuracy, seed = options.accuracy, options.seed
    if options.phases is not None:
        phases = [_phase(text) for text in options.phases.split(",")]
        return draw_phases(phases, seed, accuracy=accuracy)
    if options.trace is not None:
        speed = 1.0 if options.trace_speed is None else options.trace_speed
        recorded = read_trace(options.trace)
        return replay(recorded, speed=speed, most=options.requests, accuracy=accuracy, seed=seed)
    return draw(
        options.kind,
        _REQUESTS if options.requests is None else options.requests,
        options.rate,
        seed,
        accuracy=accuracy,
        known=None if options.lengths is None else read_lengths(options.lengths),
        arrivals=arrivals(options.arrivals or "poisson"),
    )


def _exclude(options: argparse.Namespace, *names: str) -> None:
    given = [name for name in names if getattr(options, name.removeprefix("--")) is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other")


def _phase(text: str) -> Phase:
    try:
        kind, rate, seconds = text.split(":")
        return Phase(kind, float(rate), float(seconds))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--phases {text!r}: write KIND:RATE:SECONDS") from error
