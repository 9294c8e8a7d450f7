"""A prefill and a decode engine without models, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.engine.harness import Engine
from vllm_tetri.handover import (
    DecodeParams,
    Prefilled,
    PrefillParams,
    PriorOutput,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.types import RequestId, Role, TransferId

CHUNK = 64


class Pair:
    """A prefill and a decode engine that know each other, alike unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int | tuple[int, int] = 1,
        decode: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        ranks = num_ranks if isinstance(num_ranks, tuple) else (num_ranks, num_ranks)
        own = {"chunk_size": CHUNK, "num_ranks": ranks[0]}
        self.prefill = Engine(folder, Role.PREFILL, **{**own, **options})
        options = {"num_ranks": ranks[1], **options, **(decode or {})}
        self.decode = Engine(folder, Role.DECODE, **options)
        self.prefill.sees(self.prefill, self.decode)

    def send(self, name: str, tokens: list[int], *, held: int = 0, **options: Any) -> None:
        """The decode instance is believed to hold the first `held` tokens."""
        at_decode = {self.decode.info.id: held} if held else {}
        params = PrefillParams(TransferId(f"t-{name}"), RequestId(name), held=at_decode)
        self.prefill.add(name, tokens, params=to_params(params), **options)

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
        prior_output: PriorOutput | None = None,
        is_early: bool = False,
        cached_tokens: int = 0,
        held_tokens: int = 0,
        **options: Any,
    ) -> Any:
        name_of_it, digest = transfer or TransferId(f"t-{name}"), digest or digest_of(tokens)
        params = DecodeParams(
            name_of_it,
            digest,
            prior_output,
            is_early=is_early,
            cached_tokens=cached_tokens,
            held_tokens=held_tokens,
        )
        return self.decode.add(name, tokens, params=to_params(params), **options)

    def sent(self, name: str, tokens: list[int], **options: Any) -> Prefilled:
        """The prompt is computed, and all its KV has left."""
        self.send(name, tokens, **options)
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


def random_prompt(seed: int | str, num_tokens: int) -> list[int]:
    return Random(seed).choices(range(997), k=num_tokens)


def prompt(num_tokens: int, seed: int = 3) -> list[int]:
    return [(seed * i * i + 5 * i + seed) % 120 for i in range(num_tokens)]
