"""KV that arrived is decoded at the next step, whatever prompts are under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import Engine
from tests.engine.pair import CHUNK, Pair, prompt
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.transport.native import SlotState
from vllm_tetri.types import Role

LONG = 500


@pytest.mark.parametrize("order", list(ORDERS))
def test_kv_that_arrives_during_a_prompt_of_many_chunks_does_not_wait_for_it(
    order: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    pair.decode.close()
    pair.decode = decode = Engine(
        tmp_path, Role.DECODE, chunk_size=CHUNK, prefill_policy=order, arena_bytes=1 << 20
    )
    pair.prefill.sees(pair.prefill, decode)
    names = {f"short-{index}": prompt(40 + index, seed=index + 5) for index in range(3)}
    for name, tokens in names.items():
        pair.send(name, tokens)
    transfers = {name: pair.prefilled(name).transfer for name in names}
    decode.add("long", prompt(LONG))
    decode.step()
    for name, tokens in names.items():
        pair.receive(name, tokens, transfers[name])
        pair.prefill.run_until(lambda transfer=transfers[name]: has_arrived(decode, transfer))

    scheduled = decode.step().num_scheduled_tokens

    assert scheduled == {"long": CHUNK, **dict.fromkeys(names, 1)}
    assert set(decode.outputs) == set(names)
    decode.run_until(lambda: {*names, "long"} <= set(decode.finished))
    pair.settle()
    pair.close()


def has_arrived(engine: Engine, transfer: str) -> bool:
    seen = engine.endpoint.receives._receiver.find(transfer)
    return seen is not None and seen.state is SlotState.ARRIVED
