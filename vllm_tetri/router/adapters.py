"""LoRA adapters, which instances load and unload while they serve.

What an instance has is asked of it: before it is used, after every order, and when a request names
a model that no instance is known to have (it may have been loaded without this router).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from math import inf

import msgspec

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import INSTANCE_PATH
from vllm_tetri.router.errors import JSON_ERRORS, NOT_OFFERED, Refusal
from vllm_tetri.router.replies import Response
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import Adapter, InstanceInfo, InstanceState

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# States in which an instance has requests.
SERVING = (InstanceState.READY, InstanceState.FLIPPING, InstanceState.DRAINING)
_ORDER_S, _ASK_S = 120.0, 2.0  # longest wait for one instance
_NO_RESPONSE = 504
_ASK_AGAIN_S = 1.0
_KEPT = ("authorization",)  # headers of the newest order, by which instances that join are asked

_log = logging.getLogger(__name__)


class _Order(msgspec.Struct):
    """What is read of an order's body; vLLM checks it."""

    lora_name: str = ""
    load_inplace: bool = False


class _Who(msgspec.Struct):
    adapters: dict[str, Adapter] = {}


class Adapters:
    """Passes orders on to all instances, and records who has which adapter. Owned by the event
    loop. An instance that joins is told to load what was loaded through this router."""

    def __init__(self, monitor: Monitor, upstream: Upstream) -> None:
        self._monitor, self._upstream = monitor, upstream
        self._loaded: dict[str, bytes] = {}  # orders by name of the adapter
        self._headers = {"content-type": "application/json"}
        self._turn = asyncio.Lock()  # of orders
        self._asked_s = self._welcomed_s = -inf
        self._looking: asyncio.Task[None] | None = None

    async def order(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Let every instance load or unload an adapter; the response is vLLM's where all agree. An
        order goes on when its client leaves. Raises `Refusal`: no instance is ready, or some did
        not load it, which is undone."""
        return await asyncio.shield(self._order(path, body, headers))

    async def _order(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        try:
            order = msgspec.json.decode(body, type=_Order)
        except JSON_ERRORS:
            order = _Order()  # vLLM says what is wrong
        async with self._turn:
            self._refuse_if_silent()
            self._headers.update({name: headers[name] for name in _KEPT if name in headers})
            former = self._loaded.pop(order.lora_name, None)
            if path == LOAD:
                self._loaded[order.lora_name] = body
            infos = list({each.url: each for each in self._serving()}.values())
            answers = await asyncio.gather(*(self._post(each, path, body) for each in infos))
            done = [each for each, (status, _) in zip(infos, answers, strict=True) if status == 200]
            failed = {
                info.id: (status, text)
                for info, (status, text) in zip(infos, answers, strict=True)
                if status != 200 and not (path == UNLOAD and status == 404 and done)
            }
            if failed or not infos:
                self._loaded.pop(order.lora_name, None)
                if former is not None:
                    self._loaded[order.lora_name] = former
                if path == LOAD and not order.load_inplace:
                    undo = msgspec.json.encode({"lora_name": order.lora_name})
                    await asyncio.gather(*(self._post(each, UNLOAD, undo) for each in done))
            await self._learn_all()
        if not infos:
            raise Refusal(503, "no instance is ready; try again")
        if failed and done:
            words = "; ".join(f"{name}: {text.decode()}" for name, (_, text) in failed.items())
            raise Refusal(502, f"{path} failed at {len(failed)} of {len(infos)} instances: {words}")
        status, text = next(iter(failed.values())) if failed else answers[0]
        if text == NOT_OFFERED:
            how = "start instances with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
            raise Refusal(404, f"no instance offers {path}: {how}")
        kind = "application/json" if text.startswith(b"{") else "text/plain"
        return Response(text, status, {"content-type": kind})

    async def welcome(self, info: InstanceInfo) -> None:
        """Let an instance that joins load what others have, and learn what it has. Orders meanwhile
        go to those in use alone, so it gets what they changed until nothing has."""
        given: dict[str, bytes] = {}
        async with self._turn:
            if time.monotonic() - self._welcomed_s > _ASK_AGAIN_S:  # many join a new router
                self._welcomed_s = time.monotonic()
                await asyncio.gather(*map(self._learn, self._serving()))
            missing = self._common(info).keys() - await self._learn(info) - self._loaded.keys()
        while True:
            async with self._turn:
                common = self._common(info).items()
                wanted = {name: each for name, each in common if name in missing} | self._loaded
                if wanted == given:
                    await self._learn(info)
                    return
            for name in given.keys() - wanted.keys():
                await self._post(info, UNLOAD, msgspec.json.encode({"lora_name": name}))
            for name, body in wanted.items():
                if given.get(name) == body:
                    continue
                status, text = await self._post(info, LOAD, body)
                if status != 200 and b"already been loaded" not in text:
                    _log.warning("%s did not load adapter %r: %s", info.id, name, text.decode())
                if status == _NO_RESPONSE:  # nor would it to the others
                    break
            given = wanted

    def _common(self, info: InstanceInfo) -> dict[str, bytes]:
        """Return orders to load what all others of a model have: maybe another router, or this one
        before it was started again, has loaded it."""
        others = [each.adapters for each in self._serving() if each.models == info.models]
        first = others[0] if others else {}
        return {
            name: msgspec.json.encode({"lora_name": name, "lora_path": adapter.path})
            for name, adapter in first.items()
            if all(each.get(name) == adapter for each in others)
        }

    async def look_again(self) -> None:
        """Learn what all instances have, unless that was done just now."""
        if self._looking is None or self._looking.done():
            if time.monotonic() - self._asked_s <= _ASK_AGAIN_S:
                return
            self._looking = asyncio.create_task(self._learn_all())
        await asyncio.shield(self._looking)

    async def has(self, info: InstanceInfo, name: str) -> bool:
        """Ask an instance whether it has an adapter."""
        return name in await self._learn(info)

    async def _learn_all(self) -> None:
        self._asked_s = time.monotonic()
        await asyncio.gather(*map(self._learn, self._serving()))

    async def _learn(self, info: InstanceInfo) -> Mapping[str, Adapter]:
        """Record which adapters an instance has; they are as before if it does not say so."""
        found = await self._upstream.ask(info.url, INSTANCE_PATH, _ASK_S)
        try:
            who = msgspec.json.decode(found[1], type=_Who) if found is not None else None
        except JSON_ERRORS:
            who = None
        if who is None:
            return info.adapters
        self._monitor.members.record_adapters(info, who.adapters)
        for name in info.adapters.keys() - who.adapters.keys():  # unloaded by another router
            self._loaded.pop(name, None)
        return who.adapters

    def _refuse_if_silent(self) -> None:
        """Raise `Refusal` 503 while an instance is silent: it would come back without the order."""
        views, is_doubted = self._monitor.view().instances, self._monitor.members.is_doubted
        silent = [
            each.info.id
            for each in views
            if each.state is InstanceState.SILENT or is_doubted(each.info)
        ]
        if silent:
            names = ", ".join(silent)
            raise Refusal(503, f"{names} is silent; try again when it is back, or has left")

    def _serving(self) -> list[InstanceInfo]:
        return [each.info for each in self._monitor.view().instances if each.state in SERVING]

    async def _post(self, info: InstanceInfo, path: str, body: bytes) -> tuple[int, bytes]:
        found = await self._upstream.ask(info.url, path, _ORDER_S, self._headers, body)
        if found is None:
            return _NO_RESPONSE, b"it does not respond"
        return found[0].status, found[1]
