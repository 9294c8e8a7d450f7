"""Options of the simulator's commands, what they ask for, and how results are written."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import policy_names
from vllm_tetri.sim.cost.hardware import GPUS, MODELS
from vllm_tetri.sim.cost.profiles import NAMES_OF_ROOFLINES, PROFILES
from vllm_tetri.sim.links import LINKS
from vllm_tetri.sim.modes import MODES
from vllm_tetri.sim.trace import read_lengths, read_trace, replay
from vllm_tetri.sim.workload import KINDS, LoadPhase, RequestSpec, arrivals, draw, draw_phases

REQUIRED = object()
_REQUESTS = 500


def _number(what: str, kind: type = int, metavar: str = "N", **more: Any) -> dict[str, Any]:
    return {"help": what, "type": kind, "metavar": metavar, **more}


def _text(what: str, metavar: str = "NAME", **more: Any) -> dict[str, Any]:
    return {"help": what, "metavar": metavar, **more}


def _policy(kind: Any, what: str) -> dict[str, Any]:
    names = ", ".join(policy_names(kind))
    return _text(f"{what}: {names}, an entry point or package.module:attribute")


# fmt: off
_OPTIONS: dict[str, dict[str, Any]] = {
    "mode": _text(f"how requests find instances, a row each: {', '.join(MODES)} (default: split)",
                  "MODE", nargs="+", action="extend", choices=MODES),
    "prefill": _number("number of instances with the role prefill"),
    "decode": _number("number of instances with the role decode"),
    "both": _number("number of instances with the role both"),
    "dispatch_policy": _policy("dispatch", "which decode instance takes over a request"),
    "prefill_policy": _policy("order", "which waiting prompt is computed next"),
    "decode_policy": _policy("admission", "when a request enters a decode batch"),
    "stock": _number("also simulate vLLM without this package, a row per token budget of a step, "
                     "2048 for example", metavar="TOKENS", nargs="+"),
    "replicas": _number("number of stock instances"),
    "stock_profile": _text("their step costs (default: as --profile)"),
    "profile": _text(f"step costs: {', '.join(PROFILES)}, {NAMES_OF_ROOFLINES}, or a *.json file"),
    "chunk_size": _number("most prompt tokens of a step", metavar="TOKENS"),
    "tbt_slo": _number("longest step with decodes; prompts get what is left of it (default: none)",
                       float, "SECONDS"),
    "kv_blocks": _number("KV blocks of 16 tokens of each instance (default: those of the profile, "
                         "else 4096)"),
    "link": _text(f"what KV is sent over: {', '.join(LINKS)}, or Gbit/s and µs of latency; "
                  "transfers share it; without one a token takes 5 µs", "NAME|GBIT[:US]"),
    "send": _text("when KV is sent: with each chunk of a prompt, or after all of it", "WHEN",
                  choices=("chunk", "request")),
    "model": _text(f"one of {', '.join(MODELS)}, or a folder with a config.json"),
    "gpu": _text(f"kind of GPU: {', '.join(GPUS)}"),
    "parallel": _number("GPUs of an instance, tensor parallel (default: 1, 2, 4 and 8 where the "
                        "model fits)", nargs="+"),
    "gpus": _number("number of GPUs (default: 8, unless --rate is given)"),
    "price": _number("price of a GPU hour; adds the price of tokens", float),
    "attainment": _number("share of requests that must keep both SLOs", float, "SHARE"),
    "kind": _text("light or heavy prompts (l, h) with light or heavy outputs", "KIND",
                  choices=KINDS),
    "rate": _number("requests per second", float),
    "arrivals": _text("poisson, gamma:CV for bursts (the burstier the further CV is above 1), or "
                      "at-once (default: poisson)", "HOW"),
    "requests": _number(f"number of requests (default: {_REQUESTS}, or all of a trace), for a plan "
                        "the least number of a simulation"),
    "phases": _text("phases of requests in sequence, instead of --kind, --rate and --requests",
                    "KIND:RATE:SECONDS,..."),
    "lengths": _text("file with the columns ContextTokens and GeneratedTokens to draw lengths from",
                     "CSV", type=Path),
    "trace": _text("recorded requests to replay, for a plan to draw lengths from: a *.csv file of "
                   "Azure's or a *.jsonl file of Mooncake's (docs/simulator.md)", "FILE",
                   type=Path),
    "trace_speed": _number("how many times faster than recorded a trace is replayed (default: 1)",
                           float),
    "accuracy": _number("share of output lengths that are predicted right, 0 to 1", float, "SHARE"),
    "seed": _number("seed of requests, predictions and probes"),
    "ttft_slo": _number("SLO of the time to the first token, in seconds", float, "SECONDS"),
    "tpot_slo": _number("SLO of the mean time per token after the first one, in seconds", float,
                        "SECONDS"),
    "json": _text("write the results as JSON to this file; - prints them instead of the table",
                  "FILE"),
}
# fmt: on


def add_options(parser: argparse.ArgumentParser, title: str, **defaults: Any) -> None:
    """Add a group of options by name, each with its default, or `REQUIRED`."""
    add = parser.add_argument_group(title).add_argument
    for name, default in defaults.items():
        is_required, more = default is REQUIRED, dict(_OPTIONS[name])
        if is_required:
            default = None
        elif default is not None and default != []:
            more["help"] += " (default: %(default)s)"
        add(f"--{name.replace('_', '-')}", default=default, required=is_required, **more)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what all instances have in common."""
    add_options(
        parser, "instances",
        profile="smollm2-1core", chunk_size=512, tbt_slo=None, kv_blocks=None,
        link=None, send="chunk",
    )  # fmt: skip


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add requests, their SLOs, and where results go."""
    add_options(
        parser, "requests",
        kind="mixed", rate=1.0, arrivals=None, requests=None, phases=None, lengths=None,
        trace=None, trace_speed=None, accuracy=1.0, seed=0,
    )  # fmt: skip
    add_options(parser, "results", ttft_slo=1.0, tpot_slo=0.1, json=None)


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
        variation=arrivals(options.arrivals or "poisson"),
    )


def _phase(text: str) -> LoadPhase:
    try:
        kind, rate, seconds = text.split(":")
        return LoadPhase(kind, float(rate), float(seconds))
    except ValueError as error:
        raise ConfigError(f"--phases {text!r}: write KIND:RATE:SECONDS") from error
