"""The model's own hidden states, read in the worker without another forward pass.

A layer in the middle tells more of an output's length than the last one (docs/predictor.md). vLLM
gives out its states, as for EAGLE 3, also from compiled graphs; else the last are read.

A step's orders name the requests whose last position is to be read. The rows are gathered while
they are on the device, copied to host memory without waiting, and reported with the step that
finds the copy complete: on a CPU at once. Owner: the worker's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_tetri.engine.compat import can_give_out_layers, loaded_runners
from vllm_tetri.engine.step import States

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIDDLE = 0.6  # of the layers
_NOT_THESE = ("do_not_compile", "_output_aux_hidden_states_kwargs")
_MARK = "_tetri_states"
_GIVES_OUT = "_tetri_gives_out"  # a runner whose model gives out a layer for us
_log = logging.getLogger(__name__)


class StateReader:
    """The requests to read in the step under way, and what was read."""

    def __init__(self) -> None:
        self._wanted: Collection[str] = ()
        self._is_off = False
        # Copies under way: requests, rows in host memory, and the event behind them.
        self.copies: list[tuple[list[str], torch.Tensor, Any]] = []

    def begin_step(self, wanted: Collection[str]) -> None:
        """Take a step's orders: the requests whose last state is to be read."""
        self._wanted = wanted

    def read(self, hidden: Any, names: Sequence[str], ends: Sequence[int]) -> None:
        """Read of a step's hidden states, (tokens, width), the rows before the ends of the named
        requests, in the order of the batch."""
        wanted, self._wanted = self._wanted, ()
        is_last = isinstance(hidden, torch.Tensor)  # of the pipeline's ranks
        if self._is_off or not wanted or not is_last:
            return
        try:
            self._copy(hidden, wanted, names, ends)
        except Exception as error:  # lengths are not worth an engine
            self._is_off = True
            _log.warning(
                "hidden states cannot be read here: %r. Output lengths are expected by the "
                "histogram; --tetri-predictor histogram does not try", error
            )  # fmt: skip

    def _copy(
        self,
        hidden: torch.Tensor,
        wanted: Collection[str],
        names: Sequence[str],
        ends: Sequence[int],
    ) -> None:
        ends_by_name = zip(names, ends, strict=False)
        rows = {name: int(end) - 1 for name, end in ends_by_name if name in wanted}
        if not rows:
            return
        is_host = hidden.device.type == "cpu"
        # From pinned memory: a copy from other memory waits for all that the device has to do.
        index = torch.tensor(list(rows.values()), pin_memory=not is_host)
        states = hidden[index.to(hidden.device, non_blocking=True)]
        held = torch.empty(states.shape, dtype=torch.float32, pin_memory=not is_host)
        held.copy_(states, non_blocking=not is_host)
        event = None if is_host else torch.cuda.current_stream(states.device).record_event()
        self.copies.append((list(rows), held, event))

    def take(self) -> States:
        """Return what was read and is complete, in the order in which it was."""
        found: States = {}
        while self.copies and (self.copies[0][2] is None or self.copies[0][2].query()):
            requests, states, _ = self.copies.pop(0)
            # Copies: a view of one row would keep the pinned memory of all.
            found.update(zip(requests, map(np.copy, states.numpy()), strict=True))
        return found


def middle_layer(config: VllmConfig) -> int | None:
    """Return after which of the model's layers states are to be read; None for the last. What
    drafts tokens, or divides the model, a prompt or a batch, has its own way with others."""
    parallel, model = config.parallel_config, config.model_config
    is_whole = (
        parallel.pipeline_parallel_size == parallel.prefill_context_parallel_size == 1
        and not parallel.use_ubatching
        and not config.cache_config.kv_sharing_fast_prefill
    )
    if config.speculative_config or not is_whole or model.runner_type != "generate":
        return None
    if not isinstance(config.additional_config, dict):
        return None
    num_layers = getattr(model.hf_text_config, "num_hidden_layers", None)
    return (int(MIDDLE * num_layers) or None) if isinstance(num_layers, int) else None


def give_out_layer(runner: Any, config: VllmConfig) -> None:
    """Let a model that has just been loaded, and neither ran nor was compiled, give out the states
    after its `middle_layer`, if it can."""
    if (layer := middle_layer(config)) is None:
        return
    model: Any = None
    try:
        model = runner.get_model()
        # One that is compiled itself is called past its hooks; Transformers' own collect states
        # by hooks that not all of their models have.
        is_other = any(hasattr(model, each) for each in _NOT_THESE)
        if is_other or not can_give_out_layers(model):
            return
        model.set_aux_hidden_state_layers((layer,))
        model.register_forward_hook(_with_others)
        # vLLM's cache of compiled graphs must not confuse this one with the usual one. Models with
        # several parts compile them with configurations of their own.
        held = (getattr(each, "vllm_config", None) for each in _modules(model))
        for each in filter(None, (config, *held)):
            each.additional_config = {**each.additional_config, "tetri_layer": layer}
    except Exception as error:  # lengths are not worth an engine
        for each in _modules(model):
            if hasattr(each, "aux_hidden_state_layers"):
                each.aux_hidden_state_layers = ()
        _log.warning("the model gives out no states of layer %d (%r), so output lengths are "
                     "predicted from its last ones, less well.", layer, error)  # fmt: skip
        return
    runner.use_aux_hidden_state_outputs = True
    setattr(runner, _GIVES_OUT, True)
    _log.info("output lengths are predicted from the hidden states after layer %d", layer)


def _modules(model: Any) -> list[Any]:
    return list(model.modules()) if isinstance(model, torch.nn.Module) else []


def _with_others(model: Any, given: Any, found: Any) -> Any:
    """Return what a runner expects of a model that says that it can give out layers, and does
    not: the Gemma 4 that shares KV, and others that override what they inherit."""
    return found if isinstance(found, tuple) else (found, [])


def _shown(runner: Any, last: Any, others: Sequence[Any] | None) -> Any:
    """Return the states to read of the last ones of a step and those that were given out."""
    return others[0] if others and getattr(runner, _GIVES_OUT, False) else last


def watch_runners(reader: StateReader) -> None:
    """Let this process's model runners show their hidden states to a reader: V1's inside of the
    step's KV transfers, V2's before it samples. The last reader counts."""
    first, second = loaded_runners()
    if hasattr(first, "_model_forward"):
        forward = getattr(first._model_forward, _MARK, first._model_forward)

        def model_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = forward(runner, *args, **kwargs)
            last, others = hidden if isinstance(hidden, tuple) else (hidden, None)
            names = runner.input_batch.req_ids
            ends = runner.query_start_loc.np[1 : len(names) + 1]
            reader.read(_shown(runner, last, others), names, ends)
            return hidden

        setattr(model_forward, _MARK, forward)
        first._model_forward = model_forward
    if hasattr(second, "sample_tokens"):
        sample = getattr(second.sample_tokens, _MARK, second.sample_tokens)

        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if (state := runner.execute_model_state) is not None:
                batch = state.input_batch
                hidden = _shown(runner, state.hidden_states, state.aux_hidden_states)
                reader.read(hidden, batch.req_ids, batch.query_start_loc_np[1:])
            return sample(runner, *args, **kwargs)

        setattr(sample_tokens, _MARK, sample)
        second.sample_tokens = sample_tokens
