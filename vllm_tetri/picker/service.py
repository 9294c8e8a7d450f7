"""The gRPC services of the picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

import ssl
from argparse import Namespace
from pathlib import Path
from typing import Any

import grpc
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from vllm_tetri.picker.exchange import Exchange
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.incoming import BodyReader
from vllm_tetri.router.scheduler import GlobalScheduler

PROCESSOR, HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
LIVENESS, READINESS = "liveness", "readiness"  # the protocol's names for health checks
_LIMITS = Limits()
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _LIMITS.body_bytes + (1 << 16)),
)
_PINGS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
_PING_MS = 10_000  # until a silent gateway is pinged, and until it must have responded


def server_for(
    scheduler: GlobalScheduler, num_fallbacks: int, limits: Limits = _LIMITS
) -> grpc.aio.Server:
    """Build the server, without a port, that names endpoints for the requests of gateways."""
    bodies = BodyReader(limits)

    async def process(_: object, stream: Any) -> None:
        exchange = Exchange(scheduler, num_fallbacks, bodies)
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                for answer in await exchange.on(message):
                    await stream.write(answer)
        finally:  # also when the gateway cuts the stream, which cancels this
            exchange.close()

    async def check(request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """Say whether there is an instance to name."""
        if request.service not in ("", PROCESSOR, READINESS, LIVENESS):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        is_fine = request.service == LIVENESS or scheduler.placer.models()
        states = HealthCheckResponse
        return states(status=states.SERVING if is_fine else states.NOT_SERVING)

    processing = grpc.stream_stream_rpc_method_handler(process, ProcessingRequest.FromString, bytes)
    checking = grpc.unary_unary_rpc_method_handler(
        check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    services = {PROCESSOR: {"Process": processing}, HEALTH: {"Check": checking}}
    server = grpc.aio.server(options=(*_OPTIONS, *((name, _PING_MS) for name in _PINGS)))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(*each) for each in services.items()]
    )
    return server


def listen(server: grpc.aio.Server, host: str, port: int, credentials: Any) -> int:
    """Open a port of the server, with TLS if there are credentials; returns its number. OSError if
    that cannot be."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(f"port {address} cannot be opened: {error}") from error


def credentials_of(options: Namespace) -> grpc.ServerCredentials | None:
    """Read the files of `tls_of`, which has tried them; None without TLS."""
    if not options.ssl_certfile:
        return None
    key, certificate = options.ssl_keyfile or options.ssl_certfile, options.ssl_certfile
    authorities = Path(options.ssl_ca_certs).read_bytes() if options.ssl_ca_certs else None
    return grpc.ssl_server_credentials(
        [(Path(key).read_bytes(), Path(certificate).read_bytes())],
        authorities,
        require_client_auth=options.ssl_cert_reqs == ssl.CERT_REQUIRED,
    )
