"""In which order a prefill instance computes its prompts (paper section 3.3.1).

Two queues: *raw* holds prompts as they came, *scheduled* those that were taken from it, at most a
batch at a time (PrefillSchedBatch), and ordered. A prompt is *started* once some of it was
computed. `fcfs`, `sjf` and `ljf` never interrupt a started prompt, and take the next batch when the
last one has been started: a prompt waits for at most one batch besides what came before it.

`srtf` orders again at every chunk border what is scheduled and what is started, shortest remaining
prompt first, and keeps that set filled up to a batch. Ageing keeps long prompts from starving.
Measure time by the prompt tokens that the instance computes, and let A be what first come first
served would compute until a prompt is done. It is *due* as soon as later ones overtook it by
(`SRTF_BOUND` - 1) * A tokens and a batch of chunks. Due prompts go first, in order of arrival:
among prompts of the same priority, every one is done after at most SRTF_BOUND * A tokens and
`sched_batch` + 2 chunks (one in which it becomes due, and the last one, which it may share).
`tests/policy/test_order.py` checks it.

`mlfq` is `srtf` by levels, with the same bound: the first has prompts of which less than
`LEVEL_TOKENS` are left, each further one those of up to twice as many, in order of arrival. So a
prompt is interrupted by much shorter ones only. It is FastServe's feedback queue as far as prompts
go: they join the level of their length, and none sinks, since what is left only shrinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SRTF_BOUND = 2
LEVEL_TOKENS = 64


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is not computed to its end."""

    id: str  # that of its request
    arrival: int  # grows by one with every prompt
    remaining_tokens: int  # to be computed; prefix-cache hits do not count
    num_tokens: int  # all of it
    priority: int  # the smaller goes first within a batch, as in vLLM
    fcfs_tokens: int  # tokens until it would be done under first come first served
    computed_before_tokens: int  # what the instance had computed when it came
    is_due: bool = False  # whether nothing that came later may go before it any more
    key: Any = ()  # by its order, as it is now; anything that sorts


@dataclass(frozen=True, slots=True)
class Order:
    """An order of prompts: the smallest key goes first. If it is preemptive, prompts are ordered
    again at every chunk border, started ones included, which may pause these; its key must then
    put prompts with `is_due` first. A key is asked for when a prompt has changed, and kept."""

    key: Callable[[Prompt], Any]
    is_preemptive: bool = False


def _due_first(entry: Prompt, size: int) -> tuple[int, ...]:
    if entry.is_due:
        return (entry.priority, 0, entry.arrival)
    return (entry.priority, 1, size, entry.arrival)


ORDERS: dict[str, Order] = {
    "fcfs": Order(lambda entry: (entry.priority, entry.arrival)),
    "sjf": Order(lambda entry: (entry.priority, entry.remaining_tokens, entry.arrival)),
    "ljf": Order(lambda entry: (entry.priority, -entry.remaining_tokens, entry.arrival)),
    "srtf": Order(lambda entry: _due_first(entry, entry.remaining_tokens), is_preemptive=True),
    "mlfq": Order(
        lambda entry: _due_first(entry, (entry.remaining_tokens // LEVEL_TOKENS).bit_length()),
        is_preemptive=True,
    ),
}
