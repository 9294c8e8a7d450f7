"""The routes of vLLM 0.32 that are not split (docs/api.md is the same as a table)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.passthrough import Manner, Passthrough

_GENERATION = (
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/v1/systemone",
    "/cohere/v2/chat",
    "/generative_scoring",
    "/inference/v1/generate",
)
_POOLING = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
_AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")  # forms, not JSON
_TEXT = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    *(
        f"{path}/{verb}"
        for path in ("/v1/chat/completions", "/v1/completions")
        for verb in ("render", "derender")
    ),
    "/v1/messages/render",
    "/v1/responses/render",
    "/cohere/v2/chat/render",
)
_FACTS = ("/version", "/tokenizer_info")
_RESPONSE = "/v1/responses/{response_id:[A-Za-z0-9._:-]{1,256}}"
# These act on the one instance that they are sent to, or tell about it.
_ONE_ONLY = (
    "/load",
    "/kv_event_sources",
    "/server_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/release_kv_cache_memory",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/abort_requests",
    "/inference/v1/abort_requests",
)
_NO_SUCH = {
    **dict.fromkeys(
        _ONE_ONLY,
        "this route concerns one instance; ask that instance itself "
        "(GET /tetri/v1/instances tells their addresses)",
    ),
    "/v1/realtime": "WebSockets are not relayed; connect to an instance itself "
    "(GET /tetri/v1/instances tells their addresses)",
    "/invocations": "this route may stand for any other; use the one that you mean",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_whole_routes(router: web.UrlDispatcher, passthrough: Passthrough) -> None:
    """Let one instance answer what is not split, and say why of what is not served."""

    def passed(manner: Manner) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            return await passthrough.serve(request, manner)

        return serve

    kept, free = Manner(is_kept=True), Manner(generates=False)
    facts = Manner(generates=False, has_body=False)  # some are open to everybody
    for path in (*_GENERATION, *_POOLING):
        router.add_post(path, passed(Manner()))
    for path in _AUDIO:
        router.add_post(path, passed(Manner(has_json=False)))
    for path in _TEXT:
        router.add_post(path, passed(free))
    for path in _FACTS:
        router.add_get(path, passed(facts), allow_head=False)
    router.add_post("/v1/responses", passed(kept))
    router.add_get(_RESPONSE, passed(kept), allow_head=False)
    router.add_post(_RESPONSE + "/cancel", passed(kept))
    for path in _NO_SUCH:
        router.add_route("*", path, _refuse)


async def _refuse(request: web.Request) -> web.StreamResponse:
    path = request.path
    raise Refusal(404, f"{request.method} {path}: {_NO_SUCH[path]}")
