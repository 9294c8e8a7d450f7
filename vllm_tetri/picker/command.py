"""``vllm-tetri picker``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from dataclasses import replace

from vllm_tetri.errors import ConfigError
from vllm_tetri.logs import configure_logging
from vllm_tetri.router.auth import Keys, Limits, keys_of, tls_of
from vllm_tetri.router.command import (
    STOP_S,
    add_cluster_options,
    add_placement_options,
    config_of,
    count,
    most_bodies_bytes,
    port,
    stop_signal,
)
from vllm_tetri.types import Mode

_MISSING = "the picker needs more packages: pip install '.[picker]' in the clone"

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    # fmt: off
    add("--host", default="127.0.0.1", help="address for gateways (default: %(default)s)")
    add("--port", type=port, default=9002,
        help="port for gateways: gRPC, Envoy's ext_proc and gRPC's health checks; 0 for any free "
        "one (default: %(default)s)")
    add("--http-port", type=port, default=8000,
        help="port for operators: `vllm-tetri status` and Prometheus (default: %(default)s)")
    add("--fallbacks", type=count, default=0, metavar="N",
        help="endpoints to name after the chosen one, for gateways that try several in turn "
        "(default: %(default)s)")
    # fmt: on
    add_cluster_options(parser)
    add_placement_options(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    import uvloop

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are told here
    try:
        from vllm_tetri.picker.service import credentials_of, listen, server_for
    except ImportError as error:
        raise ConfigError(f"{_MISSING} ({error})") from error
    from vllm_tetri.router.app import App
    from vllm_tetri.router.scheduler import GlobalScheduler
    from vllm_tetri.router.server import listening

    async def serve() -> None:
        scheduler = GlobalScheduler(config)
        limits = Limits(bodies_bytes=most_bodies_bytes(Limits().body_bytes))
        stop = stop_signal({signal.SIGTERM: options.shutdown_timeout, signal.SIGINT: STOP_S})
        app = App(scheduler, keys=keys, limits=limits, relays=False)
        async with listening(app, limits, (options.host, options.http_port), tls) as http:
            server = server_for(scheduler, options.fallbacks, limits)
            port = listen(server, options.host, options.port, credentials)
            await server.start()
            try:
                names = (options.host, port, *http.address, scheduler.monitor.address)
                _log.info("gateways: %s:%d  operators: http://%s:%d  instances: %s", *names)
                stop_s = await stop
                _log.info("stopping: requests in flight have %g s to end", stop_s)
                await server.stop(stop_s)
            finally:
                await server.stop(None)

    configure_logging(options.log_level)
    secrets, tls, credentials = keys_of(options), tls_of(options), credentials_of(options)
    keys = Keys(secrets)
    config = replace(config_of(options, secrets), mode=Mode.WHOLE, moves=False)
    uvloop.run(serve())
    return 0
