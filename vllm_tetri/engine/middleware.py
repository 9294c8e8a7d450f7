"""ASGI middleware of an instance's API server.

Tells who answers: `GET /tetri/v1/instance`, which names its LoRA adapters, too, and
an `x-tetri-instance` header on every response, so that a router (or a person) can
check that a port belongs to the instance they mean. Routers also learn from a header
whether streams count tokens.
On SIGTERM it lets the instance drain before vLLM ends. vLLM's metrics count a split
request once.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import vllm_tetri
from vllm_tetri.config import TetriConfig, decode_config
from vllm_tetri.engine.compat import (
    EngineCoreOutput,
    FinishReason,
    IterationStats,
    OutputProcessor,
    RequestState,
)
from vllm_tetri.engine.identity import adapter_digest
from vllm_tetri.engine.roles import CONFIG_KEY
from vllm_tetri.handover import INSTANCE_PATH, RANK_DRAINED, USAGE_HEADER, Prefilled, from_params

_MARGIN_S = 1.0

_log = logging.getLogger(__name__)


class TetriMiddleware:
    """Pure ASGI: adds nothing to streamed bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._who: dict[str, str] = {}  # read from the first request's application
        self._headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            # No argument of vLLM's chooses the class, and nothing has been counted yet.
            scope["app"].state.engine_client.output_processor.__class__ = CountsOnce
            server = scope["app"].state.server
            if multiprocessing.parent_process() is None:
                drain_on_sigterm(server, _config_of(scope).drain_s)
            else:  # one of several: `vllm serve` waits for it, for --shutdown-timeout at most
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._who:
            instance = _config_of(scope).instance
            self._who = {"id": instance, "version": vllm_tetri.__version__}
            self._headers = [(b"x-tetri-instance", instance.encode())]
            if scope["app"].state.args.enable_force_include_usage:
                self._headers.append((USAGE_HEADER.encode(), b"1"))
        if scope["path"] == INSTANCE_PATH:
            loaded = getattr(scope["app"].state, "openai_serving_models", None)
            adapters = dict(loaded.lora_requests) if loaded is not None else {}
            told = {name: (each.lora_path, adapter_digest(each)) for name, each in adapters.items()}
            await JSONResponse({**self._who, "adapters": told})(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_header)


class CountsOnce(OutputProcessor):
    """Counts a request that one instance begins and another one continues as one: the first
    token where it was computed, later ones and the end where it ends."""

    _goes_on = False  # of the output in hand

    def _update_stats_from_output(
        self,
        req_state: RequestState,
        engine_core_output: EngineCoreOutput,
        engine_core_timestamp: float | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        was_prefilling, stats = req_state.is_prefilling, engine_core_output.prefill_stats
        super()._update_stats_from_output(
            req_state, engine_core_output, engine_core_timestamp, iteration_stats
        )
        prefilled = from_params(engine_core_output.kv_transfer_params)
        self._goes_on = isinstance(prefilled, Prefilled) and not prefilled.is_final
        if iteration_stats is None or not was_prefilling or stats is None:
            return
        if stats.num_prompt_tokens == 0:  # `Continuations.show` has put prior output in front
            counted = iteration_stats.prompt_token_stats
            counted.cached_tokens -= stats.num_cached_tokens
            counted.local_cache_hit -= stats.num_local_cached_tokens
            counted.external_kv_transfer -= stats.num_external_cached_tokens
            iteration_stats.time_to_first_tokens_iter.pop()
            iteration_stats.num_generation_tokens -= len(engine_core_output.new_token_ids) - 1

    def _update_stats_from_finished(
        self,
        req_state: RequestState,
        finish_reason: FinishReason | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        if self._goes_on and iteration_stats is not None:
            self.lora_states.request_finished(req_state.request_id, req_state.lora_name)
        else:
            super()._update_stats_from_finished(req_state, finish_reason, iteration_stats)


def drain_on_sigterm(server: Any, drain_s: float) -> None:
    """Let this instance finish its requests after SIGTERM, within `drain_s`.

    vLLM has set its handlers when the application starts. It keeps that of SIGINT, which ends the
    engine at once: the drained engine, the second SIGTERM and a drain that takes too long raise
    it; the latter two also end connections whose clients still wait for a response.
    """
    loop = asyncio.get_running_loop()
    is_draining, num_drained = False, 0

    def end() -> None:
        server.force_exit = True  # uvicorn's, which else waits for all connections
        signal.raise_signal(signal.SIGINT)

    def on_sigterm() -> None:
        nonlocal is_draining
        engines = _engines()
        if is_draining or not engines:
            end()
            return
        is_draining = True
        _log.info("SIGTERM: requests have %g s to end; a second SIGTERM ends them at once", drain_s)
        for engine in engines:
            os.kill(engine, signal.SIGUSR1)  # `Endpoint` has a handler
        loop.call_later(drain_s + _MARGIN_S, end)

    def on_rank_drained() -> None:
        nonlocal num_drained
        num_drained += 1
        if num_drained >= len(_engines()):
            signal.raise_signal(signal.SIGINT)
        else:
            _log.info("a data-parallel rank has drained; the others go on")

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(RANK_DRAINED, on_rank_drained)
    # The loop takes its handlers along; a process that ends already keeps its status.
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _engines() -> list[int]:
    children = multiprocessing.active_children()
    return [each.pid for each in children if each.name.startswith("EngineCore") and each.pid]


def _config_of(scope: Scope) -> TetriConfig:
    extra = scope["app"].state.args.kv_transfer_config.kv_connector_extra_config
    return decode_config(extra[CONFIG_KEY])
