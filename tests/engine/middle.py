"""`python -m tests.engine.middle MODEL` reads a prompt's state of the middle layer in an engine,
and prints it, and how far it is from what that layer and the last one returned. A second argument
is a folder for the graphs of a compiled model, whose layers cannot be asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from vllm_tetri.engine.compat import WorkerWrapperBase
from vllm_tetri.engine.states import StateReader, give_out_layer, middle_layer, watch_runners


class Reader(StateReader):
    """Reads of every request, after every step."""

    def read(self, hidden: Any, names: Sequence[str], ends: Collection[int]) -> None:
        self.begin_step(names)
        super().read(hidden, names, [*ends])


def main(model: str, graphs: str = "") -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "none"}
    if graphs:
        os.environ["VLLM_CACHE_ROOT"] = graphs
    from vllm import LLM, SamplingParams

    def load_model(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapper.worker.load_model(*args, **kwargs)
        give_out_layer(wrapper.worker.model_runner, wrapper.vllm_config)
        return found

    WorkerWrapperBase.load_model = load_model
    llm = LLM(model, dtype="float32", max_model_len=128, enforce_eager=not graphs,
              kv_cache_memory_bytes=1 << 24)  # fmt: skip
    layer, reader, returned = middle_layer(llm.llm_engine.vllm_config), Reader(), []
    assert layer is not None

    def keep(module: Any, given: Any, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        returned.append(found[0] + found[1])

    for index in () if graphs else (layer - 1, -1):
        llm.apply_model(lambda each, at=index: each.model.layers[at].register_forward_hook(keep))
    watch_runners(reader)
    llm.generate({"prompt_token_ids": list(range(5, 40))}, SamplingParams(max_tokens=1))
    [state] = reader.take().values()
    print("state", *state.tolist())
    for name, each in zip(("middle", "last"), returned, strict=False):
        print(name, float(abs(each[34] - torch.tensor(state)).max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
