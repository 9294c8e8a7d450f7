"""`vllm-tetri up`: a whole cluster on one machine, from start to clean end."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.cluster import Cluster
from vllm_tetri.launch.in_memory import in_memory
from vllm_tetri.launch.machine import inspect, require_vllm
from vllm_tetri.launch.plan import DEFAULT_MODE, MAX_PORT, make_plan
from vllm_tetri.launch.secret import share_secret
from vllm_tetri.policy.placement import Sharing
from vllm_tetri.policy.watcher import WatchPolicy
from vllm_tetri.router.door_options import add_door_options
from vllm_tetri.types import Mode

MOST_ROUTERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `up`."""
    parser.add_argument("model", help="model name or folder, as for vllm serve")
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=DEFAULT_MODE.value,
        help=_TEXT["mode"],
    )
    parser.add_argument("--prefill", type=_count, default=None, metavar="N", help=_TEXT["prefill"])
    parser.add_argument("--decode", type=_count, default=None, metavar="M", help=_TEXT["decode"])
    parser.add_argument("--both", type=_count, default=None, metavar="K", help=_TEXT["both"])
    parser.add_argument("--routers", type=_routers, default=1, metavar="N", help=_TEXT["routers"])
    parser.add_argument("--host", default="127.0.0.1", help=_TEXT["host"])
    parser.add_argument("--port", type=_port, default=8000, help=_TEXT["port"])
    add_door_options(parser)
    parser.add_argument(
        "--placement", choices=[way.value for way in Sharing], default="auto", help=_TEXT["place"]
    )
    parser.add_argument("--max-in-flight", type=_count, metavar="N", help=_TEXT["in_flight"])
    parser.add_argument(
        "--flip", choices=[policy.value for policy in WatchPolicy], help=_TEXT["flip"]
    )
    parser.add_argument("--ttft-slo", type=_seconds, metavar="SECONDS", help=_TEXT["ttft"])
    parser.add_argument("--tpot-slo", type=_seconds, metavar="SECONDS", help=_TEXT["tpot"])
    parser.add_argument("--refuse-late", action="store_true", help=_TEXT["late"])
    parser.add_argument("--flip-after", type=float, metavar="SECONDS", help=_TEXT["flip_after"])
    parser.add_argument("--arena-bytes", type=_bytes, metavar="BYTES", help=_TEXT["arena"])
    parser.add_argument("--predictor", metavar="FOLDER", help=_TEXT["predictor"])
    parser.add_argument("--kv-bytes", type=_bytes, metavar="BYTES", help=_TEXT["kv"])
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="SECONDS", help=_TEXT["start"]
    )
    parser.add_argument("--secret-file", metavar="FILE", help=_TEXT["secret"])
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help=_TEXT["log"])
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help=_TEXT["ready"])
    parser.add_argument("--verbose", action="store_true", help=_TEXT["verbose"])
    parser.set_defaults(flip_lease=None)  # no option: `run` makes one where it is needed


_TEXT = {
    "mode": "how the router serves requests: prompt and answer on two instances (split), each "
    "on one instance (whole), or decided for every request (adaptive); "
    f"default: {DEFAULT_MODE.value}",
    "prefill": "prefill instances; default: 1, or 0 with --both; without any count see --both",
    "decode": "decode instances; default: as for prefill",
    "both": "instances that do both; default: 0; in mode adaptive or whole, when no count is "
    "given, one per GPU (or group of --tensor-parallel-size GPUs), on a CPU host one with all "
    "cores",
    "routers": "routers side by side, for whatever spreads clients over them; default: 1",
    "host": "address of the router's HTTP server; default: 127.0.0.1",
    "port": "port of the router's HTTP server, 0 for any free one; further routers have those "
    "that follow; default: 8000",
    "place": "CPU hosts: cores of its own for every instance (split), or all cores for all with "
    "prefill at a low priority (shared), or what a measurement of a few seconds at the first "
    "start finds better on this machine (auto); default: auto",
    "in_flight": "most requests that the router gives one instance at a time; default: 1024",
    "flip": "when the router lets an instance change role: when prompts and answers are out of "
    "balance, when it had little (threshold) or nothing (idle) to do, or when told to; default: "
    "balance",
    "ttft": "longest time to the first token that clients are promised; default: no promise",
    "tpot": "longest mean time per token after the first, likewise; default: no promise",
    "late": "answer requests that are expected to miss either with 429 and Retry-After at once",
    "flip_after": "how long it must have had little or nothing to do; default: 60",
    "arena": "receive arena of every instance; suffixes K, M, G; default: that of vllm serve",
    "predictor": "length predictor beside every instance that computes prompts: a folder that "
    "predictor train wrote, or oracle; default: none",
    "kv": "KV cache of every instance; suffixes K, M, G; default: vLLM's own on GPUs, at most 1G "
    "on a CPU host",
    "start": "longest time until an instance is ready; default: 900",
    "secret": "secret that its processes share, as `vllm-tetri secret` makes it; default: that of "
    "TETRI_SECRET_FILE, else a new one, whose place the ready file names",
    "log": "write everything that NAME prints to DIR/NAME.log",
    "ready": "write what runs to FILE as JSON when all is ready; removed at the end",
    "verbose": "show every line of every instance",
}


def run(options: argparse.Namespace) -> int:
    """Bring the cluster up and keep it up until a signal asks to stop.

    Returns:
        0 after one Ctrl-C or SIGTERM, 130 after a second one, 1 when the cluster
        cannot be brought up.
    """
    require_vllm()
    machine = inspect()
    # One of several routers decides on roles; the kernel forgets who when it ends.
    if options.routers > 1:
        options.flip_lease = in_memory("tetri-lease")
    plan = make_plan(options, machine)
    options.secret_file = share_secret(options.secret_file)
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {options.log_dir}: {error}") from error
    return asyncio.run(Cluster(options, plan, machine).run())


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of instances")
    return int(text)


def _routers(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_ROUTERS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of routers (1 to {MOST_ROUTERS})")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _bytes(text: str) -> int:
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(plain[-1:], 1)
    digits = plain if factor == 1 else plain[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 256M")
    return int(digits) * factor
