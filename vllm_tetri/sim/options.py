"""Options that the simulator's commands share: requests and SLOs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.trace import read_lengths, read_trace, replay
from vllm_tetri.sim.workload import KINDS, LoadPhase, RequestSpec, arrivals, draw, draw_phases

_REQUESTS = 500


# fmt: off
def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add which requests arrive, when, and how well their lengths are predicted."""
    add = parser.add_argument_group("requests").add_argument
    add("--kind", choices=KINDS, default="mixed",
        help="light or heavy prompts (l, h) with light or heavy outputs (default: %(default)s)")
    add("--rate", type=float, default=1.0, metavar="N",
        help="arrivals per second (default: %(default)s)")
    add("--arrivals", metavar="HOW",
        help="poisson, gamma:CV for bursts (the burstier the further CV is above 1), or at-once "
             "(default: poisson)")
    add("--requests", type=int, metavar="N",
        help=f"number of requests (default: {_REQUESTS}, or all of a trace)")
    add("--phases", metavar="KIND:RATE:SECONDS,...",
        help="phases of requests in sequence, instead of --kind, --rate and --requests")
    add("--lengths", type=Path, metavar="CSV",
        help="file with the columns ContextTokens and GeneratedTokens to draw lengths from")
    add("--trace", type=Path, metavar="FILE",
        help="replay recorded requests: a *.csv file of Azure's or a *.jsonl file of Mooncake's "
             "(docs/simulator.md)")
    add("--trace-speed", type=float, metavar="N",
        help="how many times faster than recorded a trace is replayed (default: 1)")
    add_accuracy_and_seed(add)


def add_accuracy_and_seed(add: Any) -> None:
    """Add what every drawn request depends on."""
    add("--accuracy", type=float, default=1.0, metavar="SHARE",
        help="share of output lengths that are predicted right, 0 to 1 (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N",
        help="seed of requests, predictions and probes (default: %(default)s)")


def add_slo_options(add: Any, *, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
    """Add both SLOs; without a default they are required."""
    for name, default, what in (
        ("--ttft-slo", ttft_s, "SLO of the time to the first token, in seconds"),
        ("--tpot-slo", tpot_s, "SLO of the mean time per token after the first one, in seconds"),
    ):
        shown = "required" if default is None else "default: %(default)s"
        add(name, type=float, default=default, required=default is None, metavar="SECONDS",
            help=f"{what} ({shown})")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add where results go as JSON."""
    parser.add_argument("--json", metavar="FILE",
        help="write the results as JSON to this file; - prints them instead of the table")
# fmt: on


def write_json(target: str, found: dict[str, Any]) -> None:
    """Write results for `--json`. Numbers that are not finite become null.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(_finite(found), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {target}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def requests_of(options: argparse.Namespace) -> list[RequestSpec]:
    """Return the requests that were asked for, in order of time.

    Raises:
        ConfigError: Options contradict each other, or a file cannot be used.
    """
    for names in (("phases", "lengths", "trace"), ("phases", "arrivals"), ("trace", "arrivals")):
        given = [f"--{name}" for name in names if getattr(options, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} exclude each other")
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


def _phase(text: str) -> LoadPhase:
    try:
        kind, rate, seconds = text.split(":")
        return LoadPhase(kind, float(rate), float(seconds))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--phases {text!r}: write KIND:RATE:SECONDS") from error
