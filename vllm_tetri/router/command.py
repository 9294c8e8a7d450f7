"""``vllm-tetri router``.

`up` takes some of its options from here, so the server is imported only where it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_tetri.config import DEFAULT_CONTROL, DEFAULT_MODE, DRAIN_S
from vllm_tetri.errors import ConfigError
from vllm_tetri.logs import add_log_option, configure_logging
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.overload import PATIENCE_S
from vllm_tetri.policy.scale import ROLES, Bounds
from vllm_tetri.policy.watcher import Watcher, WatchPolicy
from vllm_tetri.router.auth import KEY_VARIABLE, Keys, Limits, instance_key_of, keys_of, tls_of
from vllm_tetri.security import VALUE_VARIABLE, VARIABLE, read_secret, secret_file_of
from vllm_tetri.types import Mode

if TYPE_CHECKING:
    from vllm_tetri.router.scheduler import RouterConfig

STOP_S = 5.0  # after Ctrl-C
# New objects after which Python looks for cycles: requests make few, and a look takes milliseconds.
_YOUNG_OBJECTS = 20_000
_OTHER_FILES = 256
_Number = TypeVar("_Number", int, float)

_log = logging.getLogger(__name__)


def number(
    kind: Callable[[str], _Number], is_right: Callable[[_Number], bool], what: str
) -> Callable[[str], _Number]:
    """Make the parser of an option that is a number with a bound."""

    def parse(text: str) -> _Number:
        with suppress(ValueError):
            if is_right(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


positive = number(float, lambda value: value > 0, "a positive number of seconds")
_finite = number(float, lambda value: 0 < value < inf, "a positive number of seconds")
count = number(int, lambda value: value > 0, "a positive number")
port = number(int, lambda value: 0 <= value < 1 << 16, "a port")
_delay = number(float, lambda value: 0 <= value < inf, "a number of seconds")


def bounds(text: str) -> Bounds:
    """Parse a number of instances, or the bounds between which it may change."""
    try:
        return Bounds.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor MIN:MAX") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add, limits = parser.add_argument, Limits()
    # fmt: off
    add("--host", default="127.0.0.1", help="address for clients (default: %(default)s)")
    add("--port", type=port, default=8000,
        help="port for clients, 0 for any free one (default: %(default)s)")
    add("--first-byte-timeout", type=positive, default=300.0, metavar="SECONDS",
        help="time in which an instance with requests must compute or send something, else they "
        "get 504; time in its queue does not count (default: %(default)s)")
    add("--resume-anywhere", action="store_true",
        help="continue a broken stream also on an instance of another device, dtype or version, "
        "where the text may differ from there on; without this option the stream ends with an "
        "error if there is no other instance")
    add("--flip-dry-run", action="store_true", help="only log which instance would change role")
    for role in ROLES:
        add(f"--{role}", type=bounds, metavar="N|MIN:MAX",
            help=f"{role} instances that flips must keep; with --flip balance, /tetri/v1/instances "
            "tells which one the load needs more or less, as `changes` (default: at least 1)")
    add("--flip-lease", metavar="FILE|kubernetes:NAME",
        help="how several routers agree which of them flips roles, the same for all: on one host a "
        "file in a folder that only you may write to, in Kubernetes a Lease object of the pod's "
        "namespace (default: this router decides alone)")
    add("--max-connections", type=count, metavar="N",
        help="client connections at a time; the next one gets 503 (default: a third of the "
        "hard limit of open files)")
    add("--max-body-bytes", type=count, default=limits.body_bytes, metavar="BYTES",
        help="size of a request's body; a larger one gets 413 (default: %(default)s)")
    # fmt: on
    add_cluster_options(parser)
    add_serving_options(parser)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of processes that instances report to, but for those that `up` has."""
    add = parser.add_argument
    # fmt: off
    add("--control", default=DEFAULT_CONTROL, metavar="tcp://HOST:PORT",
        help="address for instances; one that is not loopback needs --secret-file "
        "(default: %(default)s)")
    add("--secret-file", metavar="FILE",
        help="secret that all processes of the cluster share, as `vllm-tetri secret` makes it; "
        f"instances without it cannot join (default: ${VARIABLE}, else the secret in "
        f"${VALUE_VARIABLE}, else none)")
    add("--silent-after", type=positive, default=1.0, metavar="SECONDS",
        help="seconds without a load report before an instance is taken out of rotation "
        "(default: %(default)s)")
    add("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates, PEM")
    add("--ssl-cert-reqs", type=int, choices=[each.value for each in ssl.VerifyMode],
        default=ssl.CERT_NONE.value,
        help="whether clients need a certificate: no (0), optional (1), required (2); "
        "needs --ssl-ca-certs (default: %(default)s)")
    add("--ssl-ciphers", metavar="LIST", help="cipher suites of TLS 1.2, as OpenSSL lists them")
    # fmt: on


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `up` has as well, and hands on to its routers."""
    add = parser.add_argument
    # fmt: off
    add("--mode", choices=[mode.value for mode in Mode], default=DEFAULT_MODE.value,
        help="prefill and decode on two instances (split), each request on one (whole), or "
        "decided per request by the estimated delay of all (adaptive); `vllm-tetri mode` changes "
        "it (default: %(default)s)")
    add("--flip", choices=[policy.value for policy in WatchPolicy],
        default=WatchPolicy.BALANCE.value,
        help="when an instance changes role: when prefill and decode load are out of balance "
        "(balance), when it had little (threshold) or nothing (idle) to do, or by order only (off) "
        "(default: %(default)s)")
    add("--flip-after", type=positive, default=60.0, metavar="SECONDS",
        help="time that an instance must have had little or nothing to do, with threshold and idle "
        "(default: %(default)s)")
    add("--moves", choices=["on", "off"], default="on",
        help="whether running outputs move from instances that leave, lack memory or are much "
        "slower than another one, or end where they are unless they are ordered to move "
        "(default: %(default)s)")
    add("--mirror", type=count, metavar="TOKENS",
        help="copy running outputs to the prefix cache of a second instance each time they have "
        "grown by so many tokens, so that one whose instance dies goes on there at once "
        "(default: no copies)")
    add("--shared-port", type=port, metavar="PORT",
        help="one more port for clients, which several routers of this host may have: the kernel "
        "spreads new connections over those that have an instance (default: none)")
    add("--otlp-traces-endpoint", metavar="URL",
        help="collector of OpenTelemetry traces, as with vllm serve, whose spans are in the same "
        "traces if it has this option, too; OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says how it is "
        "spoken to, grpc or http/protobuf (default: no traces)")
    # fmt: on
    add_placement_options(parser)


def add_placement_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of everything that places requests."""
    add = parser.add_argument
    # fmt: off
    add("--ttft-slo", type=positive, default=inf, metavar="SECONDS",
        help="promised time to first token; mode adaptive prefers placements that keep it "
        "(default: no promise)")
    add("--tpot-slo", type=positive, default=inf, metavar="SECONDS",
        help="promised mean time per output token after the first (default: no promise)")
    add("--refuse-late", action="store_true",
        help="reject requests that are expected to miss --ttft-slo or --tpot-slo with 429 and "
        "Retry-After, instead of serving them late")
    add("--max-in-flight", type=count, metavar="N",
        help="requests that one instance gets at a time; more go to another instance, or are "
        "rejected with 503 (default: no limit, they wait at the instance as with stock vLLM)")
    add("--max-queue-delay", type=_delay, default=0.0, metavar="SECONDS",
        help="when the prompts queued at an instance have exceeded this delay for "
        f"{PATIENCE_S:g} s, send new requests elsewhere, or reject them with 503 and Retry-After "
        "(default: 0, no limit)")
    add("--shutdown-timeout", type=_finite, default=DRAIN_S, metavar="SECONDS",
        help="time for requests in flight to end after SIGTERM (default: %(default)g)")
    add("--api-key", nargs="+", action="extend", metavar="KEY",
        help="keys that clients may present as `Authorization: Bearer KEY`. Other users of this "
        "machine can read them in the list of processes: prefer --api-key-file, or the environment "
        f"variable {KEY_VARIABLE}, which is used if neither option is given (default: no key)")
    add("--api-key-file", type=Path, metavar="FILE",
        help="file with such keys, one per line; lines that begin with # are skipped")
    add("--ssl-certfile", metavar="FILE", help="certificate for https, PEM (default: plain http)")
    add("--ssl-keyfile", metavar="FILE",
        help="private key of the certificate, PEM (default: the one in --ssl-certfile)")
    # fmt: on
    add_log_option(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    import uvloop

    from vllm_tetri.router.app import App
    from vllm_tetri.router.flips import lease_of
    from vllm_tetri.router.scheduler import GlobalScheduler
    from vllm_tetri.router.server import SharedPort, listening
    from vllm_tetri.router.tracing import Tracing

    async def serve() -> None:
        scheduler = GlobalScheduler(config)
        stop = stop_signal({signal.SIGTERM: options.shutdown_timeout, signal.SIGINT: STOP_S})
        app, address = App(scheduler, keys=keys, limits=limits), (options.host, options.port)
        number = options.shared_port
        shared = SharedPort(number, scheduler.placer.models) if number else None
        async with listening(app, limits, address, tls, shared) as listener:
            scheme = "http" if tls is None else "https"
            host, own = listener.address
            clients = f"{scheme}://[{host}]:{own}" if ":" in host else f"{scheme}://{host}:{own}"
            clients += f" and port {number}" if number else ""
            gc.freeze()
            gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
            _log.info("clients: %s  instances: %s", clients, scheduler.monitor.address)
            listener.stop_s = await stop
            _log.info("stopping: requests in flight have %g s to end", listener.stop_s)

    configure_logging(options.log_level)
    secrets, tls, policy = keys_of(options), tls_of(options), WatchPolicy(options.flip)
    num_connections, num_flows = _shares_of_files(options.max_connections)
    limits = Limits(
        connections=num_connections,
        body_bytes=options.max_body_bytes,
        bodies_bytes=most_bodies_bytes(options.max_body_bytes),
    )
    # The limit of open files is often 1,024, and every connection needs one.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    keys, is_off = Keys(secrets), policy is WatchPolicy.OFF
    by_role = {role: each for role in ROLES if (each := getattr(options, role)) is not None}
    config = replace(
        config_of(options, secrets),
        first_byte_s=options.first_byte_timeout,
        max_flows=num_flows,
        num_clients=keys.num_clients,
        watcher=None if is_off else Watcher(policy, options.flip_after, by_role),
        is_watcher_dry=options.flip_dry_run,
        mode=Mode(options.mode),
        lease=lease_of(options.flip_lease),
        resumes_anywhere=options.resume_anywhere,
        moves=options.moves == "on",
        mirror_every=options.mirror or 0,
        tracing=Tracing(collector) if (collector := options.otlp_traces_endpoint) else None,
    )
    uvloop.run(serve())
    return 0


def stop_signal(times: dict[signal.Signals, float]) -> asyncio.Future[float]:
    """Return a future that the first of these signals resolves to its time for requests to end;
    the next signal ends this process at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[float] = loop.create_future()

    def on_signal(seconds: float) -> None:
        stop.set_result(seconds)
        for number in times:
            loop.remove_signal_handler(number)

    for number, seconds in times.items():
        loop.add_signal_handler(number, on_signal, seconds)
    return stop


def config_of(options: argparse.Namespace, secrets: tuple[str, ...]) -> RouterConfig:
    """Return what the options say that every command has which places requests; `secrets` are the
    API keys. ConfigError if they contradict each other."""
    from vllm_tetri.router.scheduler import RouterConfig

    return RouterConfig(
        control=options.control,
        silent_after_s=options.silent_after,
        max_in_flight_each=options.max_in_flight or inf,
        max_queue_delay_s=options.max_queue_delay,
        authorization=instance_key_of(secrets),
        objective=objective_of(options),
        refuses_late=options.refuse_late,
        secret=read_secret(secret_file_of(options.secret_file)),
    )


def objective_of(options: argparse.Namespace) -> Objective:
    """Return what clients are promised; ConfigError if `--refuse-late` has no target."""
    if options.refuse_late and options.ttft_slo == options.tpot_slo == inf:
        raise ConfigError("--refuse-late needs a target: give --ttft-slo or --tpot-slo")
    return Objective(options.ttft_slo, options.tpot_slo)


def _shares_of_files(num_connections: int | None) -> tuple[int, int]:
    """Return how many clients the limit of open files allows, unless that is given, and how many
    streams may flow then. A connection needs one, every request in flight one for its instance, or
    two during a hand-over, and a flow two more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = sys.maxsize if hard == resource.RLIM_INFINITY else hard - _OTHER_FILES
    num_connections = num_connections or max(1, files // 3)
    return num_connections, max(0, (2 * files - 5 * num_connections) // 4)


def most_bodies_bytes(body_bytes: int) -> int:
    """Return how many bytes all bodies may have together: an eighth of the memory of this machine,
    or of the container."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the file is not there, or says "max"
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(size // 8, 4 * body_bytes)
