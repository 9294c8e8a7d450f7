"""A prefill and a decode engine without models, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import Engine
from vllm_tetri.handover import (
    DecodeParams,
    Prefilled,
    PrefillParams,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.types import RequestId, Role, TransferId

CHUNK = 64


class Pair:
    """A prefill and a decode engine that know each other."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.prefill = Engine(folder, Role.PREFILL, **{"chunk_size": CHUNK, **options})
        self.decode = Engine(folder, Role.DECODE, **options)
        self.prefill.sees(self.prefill, self.decode)

    def send(self, name: str, tokens: list[int]) -> None:
        params = PrefillParams(TransferId(f"t-{name}"), RequestId(name))
        self.prefill.add(name, tokens, params=to_params(params))

    def prefilled(self, name: str) -> Prefilled:
        self.prefill.run_until(lambda: name in self.prefill.finished)
        prefilled = from_params(self.prefill.finished[name])
        assert isinstance(prefilled, Prefilled)
        return prefilled

    def receive(
        self,
        name: str,
        tokens: list[int],
        transfer: TransferId | None = None,
        *,
        digest: str = "",
        is_early: bool = False,
        **options: Any,
    ) -> Any:
        name_of_it, digest = transfer or TransferId(f"t-{name}"), digest or digest_of(tokens)
        params = DecodeParams(name_of_it, digest, is_early=is_early)
        return self.decode.add(name, tokens, params=to_params(params), **options)

    def sent(self, name: str, tokens: list[int]) -> Prefilled:
        """The prompt is computed, and all its KV has left."""
        self.send(name, tokens)
        response = self.prefilled(name)
        self.prefill.run_until(lambda: self.prefill.is_at_rest)
        return response

    def decoding(self, name: str, tokens: list[int], *options: Any, **more: Any) -> Any:
        """The decode request has its first token, and its KV is right."""
        request = self.receive(name, tokens, *options, **more)
        self.decode.run_until(lambda: name in self.decode.outputs)
        assert self.decode.holds(request, len(tokens))
        return request

    def end(self, name: str) -> None:
        """The decode request ends, and nothing is left."""
        self.decode.run_until(lambda: name in self.decode.finished)
        self.settle()

    def settle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.run_until(lambda engine=engine: engine.is_at_rest)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def prompt(num_tokens: int, seed: int = 3) -> list[int]:
    return [(seed * i * i + 5 * i + seed) % 120 for i in range(num_tokens)]
