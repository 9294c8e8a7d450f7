"""The model's own hidden states, read in the worker without another forward pass.

A step's orders name the requests whose last position is to be read. The rows are gathered while
they are on the device, copied to host memory without waiting, and reported with the step that
finds the copy complete: on a CPU at once. Owner: the worker's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

from vllm_tetri.engine.compat import loaded_runners
from vllm_tetri.engine.step import States

_MARK = "_tetri_states"
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
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # with those of EAGLE 3
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
        states = hidden[torch.tensor(list(rows.values()), device=hidden.device)]
        is_host = states.device.type == "cpu"
        held = torch.empty(states.shape, dtype=torch.float32, pin_memory=not is_host)
        held.copy_(states, non_blocking=not is_host)
        event = None if is_host else torch.cuda.current_stream(states.device).record_event()
        self.copies.append((list(rows), held, event))

    def take(self) -> States:
        """Return what was read and is complete, in the order in which it was."""
        found: States = {}
        while self.copies and (self.copies[0][2] is None or self.copies[0][2].query()):
            requests, states, _ = self.copies.pop(0)
            found.update(zip(requests, states.numpy(), strict=True))
        return found


def watch_runners(reader: StateReader) -> None:
    """Let this process's model runners show their hidden states to a reader: V1's inside of the
    step's KV transfers, V2's before it samples. The last reader counts."""
    first, second = loaded_runners()
    if hasattr(first, "_model_forward"):
        forward = getattr(first._model_forward, _MARK, first._model_forward)

        def model_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = forward(runner, *args, **kwargs)
            names = runner.input_batch.req_ids
            reader.read(hidden, names, runner.query_start_loc.np[1 : len(names) + 1])
            return hidden

        setattr(model_forward, _MARK, forward)
        first._model_forward = model_forward
    if hasattr(second, "sample_tokens"):
        sample = getattr(second.sample_tokens, _MARK, second.sample_tokens)

        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if (state := runner.execute_model_state) is not None:
                batch = state.input_batch
                reader.read(state.hidden_states, batch.req_ids, batch.query_start_loc_np[1:])
            return sample(runner, *args, **kwargs)

        setattr(sample_tokens, _MARK, sample)
        second.sample_tokens = sample_tokens
