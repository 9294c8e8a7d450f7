"""A process that computes like an instance, for as long as it is told to.

``python -m vllm_tetri.launch.trial_work prompts|steps DTYPE`` says when it is ready and
then answers every line ``{"start": T, "seconds": S}`` with the seconds of each unit of
work between T (of the monotonic clock, which all processes share) and T + S. Both answers
say the CPU seconds that it has taken so far. A unit is one layer of a chunk for
``prompts``, and a step through all layers for ``steps``. The sizes are those of a small
model; the weights together exceed a core's caches, as in a real decode step. It ends
when its input does.

The only file of the launcher that imports torch, which `up` itself has no use for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

LAYERS = 8
HIDDEN = 576
INNER = 1536
CHUNK_TOKENS = 256
DECODES = 8
# What an engine does between two decode steps: scheduling and sending tokens out.
PAUSE_S = 0.001
_POLL_S = 0.001


def main(kind: str, dtype: str) -> None:
    """Serve standard input until it ends."""
    torch.set_grad_enabled(False)
    unit = _unit(kind, getattr(torch, dtype))
    pause_s = PAUSE_S if kind == "steps" else 0.0
    for _ in range(2 * LAYERS if kind == "prompts" else 2):
        unit()
    _say([])
    for line in sys.stdin:
        order = json.loads(line)
        took = _work(unit, order["start"], order["seconds"], pause_s)
        _say(took)


def _say(took: list[float]) -> None:
    print(json.dumps({"took": took, "cpu_s": time.process_time()}), flush=True)


def _unit(kind: str, dtype: torch.dtype) -> Callable[[], None]:
    """A function that does the next unit of work."""
    layers = [
        (torch.randn(HIDDEN, INNER).to(dtype), torch.randn(INNER, HIDDEN).to(dtype))
        for _ in range(LAYERS)
    ]
    tokens = CHUNK_TOKENS if kind == "prompts" else DECODES
    state = torch.randn(tokens, HIDDEN).to(dtype)
    turn = 0

    def one_layer() -> None:
        nonlocal turn
        into, out = layers[turn % LAYERS]
        turn += 1
        torch.nn.functional.silu(state @ into) @ out

    def all_layers() -> None:
        for _ in range(LAYERS):
            one_layer()

    return one_layer if kind == "prompts" else all_layers


def _work(unit: Callable[[], None], start: float, seconds: float, pause_s: float) -> list[float]:
    while time.monotonic() < start:
        time.sleep(_POLL_S)
    took: list[float] = []
    while not took or time.monotonic() < start + seconds:
        began = time.monotonic()
        unit()
        took.append(round(time.monotonic() - began, 6))
        if pause_s:
            time.sleep(pause_s)
    return took


if __name__ == "__main__":
    main(*sys.argv[1:])
