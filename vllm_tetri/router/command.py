"""``vllm-tetri router``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
import ssl
import sys
from math import inf

import uvloop

from vllm_tetri.config import DEFAULT_CONTROL
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.watcher import Watcher, WatchPolicy, make_watcher
from vllm_tetri.router.app import build_app
from vllm_tetri.router.door_options import (
    add_door_options,
    add_tls_options,
    instance_key_of,
    keys_of,
    tls_of,
)
from vllm_tetri.router.keys import Keys
from vllm_tetri.router.lease_option import HELP as LEASE_HELP
from vllm_tetri.router.lease_option import lease_of
from vllm_tetri.router.limits import Limits
from vllm_tetri.router.listener import Listener
from vllm_tetri.router.scheduler import MAX_IN_FLIGHT_EACH, GlobalScheduler
from vllm_tetri.secret import VARIABLE, read_secret, secret_file_of
from vllm_tetri.types import Mode

_STOP_S = 5.0
_OTHER_FILES = 256

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address for clients (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port for clients, 0 for a free one (%(default)s)"
    )
    parser.add_argument(
        "--control",
        default=DEFAULT_CONTROL,
        metavar="tcp://HOST:PORT",
        help="address for instances; other than loopback only with --secret-file (%(default)s)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="secret that all processes of the cluster share, as `vllm-tetri secret` makes it; "
        f"instances without it are not listened to (that of {VARIABLE}, else none)",
    )
    parser.add_argument(
        "--first-byte-timeout",
        type=_positive,
        default=300.0,
        metavar="SECONDS",
        help="longest wait for an instance's answer to begin (%(default)s)",
    )
    parser.add_argument(
        "--silent-after",
        type=_positive,
        default=1.0,
        metavar="SECONDS",
        help="an instance that reports nothing for so long is not used (%(default)s)",
    )
    parser.add_argument(
        "--max-in-flight",
        type=_count,
        default=MAX_IN_FLIGHT_EACH,
        metavar="N",
        help="most requests that one instance gets at a time; more go to the next, or are "
        "answered with 503 (%(default)s)",
    )
    parser.add_argument(
        "--resume-anywhere",
        action="store_true",
        help="let a stream whose instance died go on also on one of another device, dtype or "
        "version, where its text may differ from there on; without, it ends with an error "
        "when there is no other",
    )
    parser.add_argument(
        "--max-connections",
        type=_count,
        default=Limits().connections,
        metavar="N",
        help="most connections of clients at a time; the next one is answered with 503 "
        "(%(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=_count,
        default=Limits().body_bytes,
        metavar="BYTES",
        help="longest body of a request; a longer one is answered with 413 (%(default)s)",
    )
    add_door_options(parser)
    add_tls_options(parser)
    add_mode_options(parser)
    add_watcher_options(parser)


def add_mode_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how requests are served, and what clients are promised."""
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.SPLIT.value,
        help="prompt and answer on two instances (split), each request on one (whole), or "
        "whichever is expected to make all wait least, decided for every request (adaptive); "
        "`vllm-tetri mode` changes it (%(default)s)",
    )
    parser.add_argument(
        "--ttft-slo",
        type=_positive,
        default=inf,
        metavar="SECONDS",
        help="longest time to the first token that clients are promised; adaptive requests "
        "go where it is kept (no promise)",
    )
    parser.add_argument(
        "--tpot-slo",
        type=_positive,
        default=inf,
        metavar="SECONDS",
        help="longest mean time per token after the first, likewise (no promise)",
    )
    parser.add_argument(
        "--refuse-late",
        action="store_true",
        help="answer requests that are expected to miss --ttft-slo or --tpot-slo with 429 and "
        "Retry-After at once, instead of late",
    )


def add_watcher_options(parser: argparse.ArgumentParser) -> None:
    """Options that say when instances change role."""
    parser.add_argument(
        "--flip",
        choices=[policy.value for policy in WatchPolicy],
        default=WatchPolicy.BALANCE.value,
        help="when an instance changes role: when prompts and answers are out of balance, when "
        "it had little (threshold) or nothing (idle) to do, or when told to (%(default)s)",
    )
    parser.add_argument(
        "--flip-after",
        type=_positive,
        default=60.0,
        metavar="SECONDS",
        help="how long an instance must have had little or nothing to do (%(default)s)",
    )
    parser.add_argument(
        "--flip-dry-run", action="store_true", help="only log which instance would change role"
    )
    parser.add_argument(
        "--flip-lease",
        metavar="FILE|kubernetes:NAME",
        help=LEASE_HELP,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        keys, tls = keys_of(args), tls_of(args)
        limits = Limits(
            connections=args.max_connections,
            body_bytes=args.max_body_bytes,
            bodies_bytes=max(Limits().bodies_bytes, 4 * args.max_body_bytes),
        )
        scheduler = GlobalScheduler(
            args.control,
            first_byte_s=args.first_byte_timeout,
            silent_after_s=args.silent_after,
            max_in_flight_each=args.max_in_flight,
            num_parties=Keys(keys).num_parties,
            max_standing_wait_s=args.max_standing_wait,
            authorization=instance_key_of(keys),
            watcher=_watcher(args),
            is_watcher_dry=args.flip_dry_run,
            mode=Mode(args.mode),
            objective=_objective(args),
            refuses_late=args.refuse_late,
            secret=read_secret(secret_file_of(args.secret_file)),
            lease=lease_of(args.flip_lease),
            resumes_anywhere=args.resume_anywhere,
        )
        _allow_files(limits.connections)
        uvloop.run(_serve(scheduler, Keys(keys), limits, args.host, args.port, tls))
    except (ConfigError, OSError) as error:
        print(f"vllm-tetri router: {error}", file=sys.stderr)
        return 1
    return 0


def _objective(args: argparse.Namespace) -> Objective:
    if args.refuse_late and args.ttft_slo == args.tpot_slo == inf:
        raise ConfigError("--refuse-late needs --ttft-slo or --tpot-slo: what is late?")
    return Objective(args.ttft_slo, args.tpot_slo)


def _watcher(args: argparse.Namespace) -> Watcher | None:
    policy = WatchPolicy(args.flip)
    return None if policy is WatchPolicy.OFF else make_watcher(policy, after_s=args.flip_after)


async def _serve(
    scheduler: GlobalScheduler,
    keys: Keys,
    limits: Limits,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = build_app(scheduler, keys=keys, limits=limits)
    listener = Listener(app, limits, stop_s=_STOP_S)
    await listener.open(host, port, tls)
    try:
        scheme = "http" if tls is None else "https"
        instances = scheduler.monitor.address
        _log.info("clients: %s://%s:%d  instances: %s", scheme, *listener.address, instances)
        await stop.wait()
        _log.info("stopping")
    finally:
        await listener.close()


def _allow_files(num_connections: int) -> None:
    """A connection is a file, and each request in flight has one or two to instances. What
    is allowed by default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * num_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
