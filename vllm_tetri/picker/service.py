"""The gRPC services of the picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

from collections.abc import Mapping

from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.server import Stream

from vllm_tetri.picker.exchange import Exchange
from vllm_tetri.router.scheduler import GlobalScheduler

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVENESS, _READINESS = "liveness", "readiness"


class Picker:
    """Names endpoints for the requests of gateways."""

    def __init__(self, scheduler: GlobalScheduler, num_fallbacks: int) -> None:
        self._scheduler, self._num_fallbacks = scheduler, num_fallbacks

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the methods, as grpclib asks for them."""
        kind = Cardinality.STREAM_STREAM
        method = Handler(self._process, kind, ProcessingRequest, ProcessingResponse)
        return {f"/{PROCESSOR}/Process": method}

    async def _process(self, stream: Stream[ProcessingRequest, ProcessingResponse]) -> None:
        exchange = Exchange(self._scheduler, self._num_fallbacks)
        try:
            async for message in stream:
                for answer in await exchange.on(message):
                    await stream.send_message(answer)
        finally:
            exchange.close()


class HealthService(HealthBase):
    """Says whether there is an instance to name, until the picker `is_stopping`."""

    def __init__(self, scheduler: GlobalScheduler) -> None:
        self._scheduler, self.is_stopping = scheduler, False

    async def Check(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:
        """Answer one check, of the picker or of a service; NOT_FOUND for an unknown service."""
        request = await stream.recv_message()
        service = request.service if request is not None else ""
        if service not in ("", PROCESSOR, _READINESS, _LIVENESS):
            raise GRPCError(Status.NOT_FOUND, f"there is no service {service!r}")
        is_ready = not self.is_stopping and bool(self._scheduler.placer.models())
        is_fine = is_ready or service == _LIVENESS
        status = HealthCheckResponse.SERVING if is_fine else HealthCheckResponse.NOT_SERVING
        await stream.send_message(HealthCheckResponse(status=status))

    async def Watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:
        """Refuse to: checks are cheap."""
        raise GRPCError(Status.UNIMPLEMENTED, "use Check")
