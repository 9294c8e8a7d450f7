"""Values that every layer shares. Standard library only; everything is frozen.

Units are suffixes: `_tokens`, `_blocks`, `_bytes`, `_s` (seconds as float).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from operator import le
from typing import Annotated, Literal, NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
TransferId = NewType("TransferId", str)
RequestId = NewType("RequestId", str)

NUM_LENGTHS = 10  # of a predicted distribution: its quantiles at 5, 15, ... and 95 %

_RANK = re.compile(r"-dp\d+$")


def rank_name(server: str, rank: int) -> str:
    """Return the name of an instance that is one rank of a data-parallel server."""
    return f"{server}-dp{rank}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; False for a name other than localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_name(instance: str) -> str:
    """Return the name of the server of an instance: without the rank, if it has one."""
    return _RANK.sub("", instance)


class Role(StrEnum):
    """What an instance prefers to do; the engine can always do both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Mode(StrEnum):
    """How a router serves the requests that two instances could share."""

    SPLIT = "split"  # prompt and output on two instances
    ADAPTIVE = "adaptive"  # decided for every request
    WHOLE = "whole"  # aggregated: each on one instance


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The cost of an engine step, in seconds per unit of work."""

    base_s: float = 0.0  # of any step
    request_s: float = 0.0  # per request that decodes
    token_s: float = 0.0  # per token of context of the requests that decode
    prompt_s: float = 0.0  # per prompt token
    context_s: float = 0.0  # per prompt token and token of its context
    confidence: float = 0.0  # from 0, a guess, to 1, measured and right

    @property
    def is_known(self) -> bool:
        """Whether any cost is known."""
        return self.base_s + self.request_s + self.prompt_s > 0

    def step_s(
        self, num_decodes: float, decode_context: float, prompt_tokens: float, prompt_context: float
    ) -> float:
        """Duration of a step: decodes with `decode_context` tokens of context together, and
        prompt tokens with `prompt_context` tokens before each on average."""
        return (
            self.base_s
            + num_decodes * self.request_s
            + decode_context * self.token_s
            + prompt_tokens * (self.prompt_s + prompt_context * self.context_s)
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The distribution of a request's output length: `lengths` in tokens that are equally likely,
    ascending. `NUM_LENGTHS`, or one that is known. ValueError if they are something else."""

    lengths: tuple[float, ...]

    @classmethod
    def of_bucket(cls, bucket: int, granularity_tokens: int) -> Prediction:
        """Spread the lengths over a bucket of a classifier (paper section 3.3.2): bucket k, g
        tokens wide, means [k·g, (k+1)·g) tokens. ValueError if there is no such bucket."""
        if bucket < 0 or granularity_tokens < 1:
            raise ValueError(f"no bucket {bucket} of {granularity_tokens} tokens")
        parts = (bucket + index / (NUM_LENGTHS - 1) for index in range(NUM_LENGTHS))
        return cls(tuple(max(1.0, part * granularity_tokens) for part in parts))

    def __post_init__(self) -> None:
        lengths = self.lengths
        is_sound = len(lengths) in (1, NUM_LENGTHS) and lengths[0] >= 0 and lengths[-1] < 1 << 53
        if not (is_sound and all(map(le, lengths, lengths[1:]))):
            raise ValueError(f"no ascending lengths: {lengths}")

    @property
    def median_tokens(self) -> float:
        """Return the length that half of such outputs exceed."""
        lengths = self.lengths
        return (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2


class InstanceState(StrEnum):
    """The state of an instance, as the cluster monitor sees it."""

    STARTING = "starting"  # announced, HTTP not answering
    READY = "ready"
    SILENT = "silent"  # no report for longer than the limit; not used
    FLIPPING = "flipping"  # finishes its requests, gets no new ones, then has another role
    DRAINING = "draining"  # finishes its requests, gets no new ones, then leaves


MAX_CHOICES = 128  # outputs of one request that move together
FLIP_DEADLINE_S = 60.0  # in which an instance must have drained to change its role, by default


class FlipStage(StrEnum):
    """How far a flip is."""

    DRAINING = "draining"  # the old role's work is being finished
    SWITCHING = "switching"  # the engine takes the new role at its next step
    DONE = "done"
    ROLLED_BACK = "rolled_back"  # the instance keeps its old role


@dataclass(frozen=True, slots=True)
class Flip:
    """An instance's newest change of role (paper section 3.5), as it reports it."""

    epoch: int  # number of the order that began it; an instance takes only higher ones
    source: Role
    target: Role
    stage: FlipStage
    age_s: float = 0.0  # since it reached that stage
    drain_s: float = 0.0  # from the order to the end of the old role's work; 0 with `now`
    # From the end of the drain, or the step boundary with `now`, until a router knew the new role.
    commit_s: float = 0.0
    reason: str = ""  # who ordered it and why
    problem: str = ""  # why it was rolled back
    is_heard: bool = True  # False while only one router knows of the order

    @property
    def is_under_way(self) -> bool:
        """Whether the instance is about to have the target's role."""
        return self.stage in (FlipStage.DRAINING, FlipStage.SWITCHING)

    @property
    def has_ended(self) -> bool:
        """Whether nothing about it changes any more."""
        return self.stage is FlipStage.ROLLED_BACK or self.commit_s > 0


class Adapter(NamedTuple):
    """A LoRA adapter that an instance has: where from, and the digest of its files."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What an instance tells of itself once, when it joins; routers add its adapters."""

    id: InstanceId  # unique in the cluster, for example ``prefill-0``
    url: str  # base URL of its HTTP server, without a trailing slash
    role: Role
    models: tuple[str, ...]  # served names of the base; the first is the canonical one
    kv_endpoint: str  # ``host:port`` of its KV receiver
    # What two instances must agree on to exchange KV blocks: model, weights, dtype, layout, ...
    identity: dict[str, str]
    max_model_len: int  # longest prompt plus output, in tokens
    block_size: int  # tokens per KV block
    pid: int  # of the engine
    root: str  # the model as its server was told, by which clients find its tokenizer
    continues: bool = True  # it continues after output tokens of another instance
    continues_seeded: bool = True  # also for requests with a seed of their own
    reasons: bool = False  # its API server takes reasoning out of chat responses
    num_routers: int = 1  # it reports to
    arena_tokens: int = 1 << 40  # longest prompt whose KV its receive arena holds
    sizes_chunks: bool = False  # by what steps cost, for every step anew
    # Most tokens and requests of a step, and of how many tokens kernels compute whole tiles.
    step_limits: tuple[int, int, int] = 2048, 256, 16
    device: str = ""  # shared by instances with equal names; an unnamed one is not shared
    checkpoint: str = ""  # where its weights come from, for people; `identity` names them
    alone: str = ""  # why it exchanges KV with no other instance, in words; empty if it may
    # Of several engines behind one URL (data parallelism), which one; requests for it name it.
    rank: int | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)  # of LoRA, by name

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for what it serves."""
        return (*self.models, *self.adapters)


@dataclass(frozen=True, slots=True)
class Number:
    """Describe one number of a load report: the only place where its meaning is written.

    A counter only grows while the instance lives; a `value` is no Prometheus metric. The unit is
    the plural noun of what one counts, or `seconds`.
    """

    kind: Literal["gauge", "counter", "value"]
    help: str
    unit: str


_gauge = partial(Number, "gauge")
_counter = partial(Number, "counter")


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an instance reports every period.

    `/metrics` and `/tetri/v1/instances` are derived from these fields. A field without a `Number`
    is for routers and dispatchers only. Adding a number takes two edits: the field here and its
    value in `engine/load.py`.
    """

    running: Annotated[int, _gauge("Requests in the running batch.", "requests")] = 0
    waiting: Annotated[int, _gauge("Requests in the waiting queue.", "requests")] = 0
    held: Annotated[int, _gauge("Slots of the receive arena in use.", "slots")] = 0
    queued_prefill_tokens: Annotated[int, _gauge("Prompt tokens not computed yet.", "tokens")] = 0
    queued_context: float = 0.0  # `policy.step_cost.context_sum` of these
    blocks_used: Annotated[int, _gauge("KV blocks in use, without cached ones.", "blocks")] = 0
    blocks_total: Annotated[int, _gauge("KV blocks of the instance.", "blocks")] = 0
    arena_used_bytes: Annotated[int, _gauge("Bytes used in the receive arena.", "bytes")] = 0
    arena_total_bytes: Annotated[int, _gauge("Size of the receive arena.", "bytes")] = 0
    # Decode requests, running or waiting, by expected output (paper section 3.3.4).
    heavy: Annotated[float, _gauge("Decode requests expected over 128 tokens.", "requests")] = 0.0
    light: Annotated[float, _gauge("Decode requests expected up to 128 tokens.", "requests")] = 0.0
    remaining_tokens: Annotated[int, _gauge("Output tokens expected to follow.", "tokens")] = 0
    reserved_blocks: Annotated[int, _gauge("KV blocks kept for running requests.", "blocks")] = 0
    step_s: Annotated[float, _gauge("Seconds of the last engine step.", "seconds")] = 0.0
    prefills_done: Annotated[int, _counter("Prompts computed for hand-over.", "requests")] = 0
    decodes_done: Annotated[int, _counter("Decode requests finished.", "requests")] = 0
    chunks_done: Annotated[int, _counter("Prompt chunks computed for hand-over.", "chunks")] = 0
    prompt_tokens_done: Annotated[int, _counter("Prompt tokens computed here.", "tokens")] = 0
    output_tokens_done: Annotated[int, _counter("Output tokens decoded here.", "tokens")] = 0
    cost: Annotated[StepCoefficients, Number("value", "Fitted cost of a step.", "seconds")] = (
        StepCoefficients()
    )
    context_tokens: Annotated[int, _gauge("Context of all decode requests together.", "tokens")] = 0
    chunk_tokens: Annotated[int, _gauge("Prompt tokens of a step without decodes.", "tokens")] = 0
    next_chunk_tokens: Annotated[
        int, _gauge("Prompt tokens of a step if one more came.", "tokens")
    ] = 0
    # KV of n tokens is at its decode instance handover_s + n * handover_token_s after the prompt.
    handover_s: Annotated[float, _gauge("Seconds from a prompt's end to its KV.", "seconds")] = 0.0
    handover_token_s: Annotated[float, _gauge("Seconds more per prompt token.", "seconds")] = 0.0
    kv_bytes_sent: Annotated[int, _counter("KV bytes sent.", "bytes")] = 0
    kv_bytes_received: Annotated[int, _counter("KV bytes loaded from the arena.", "bytes")] = 0
    kv_loads_failed: Annotated[int, _counter("Loads of KV that failed.", "loads")] = 0
    kv_bytes_kept: Annotated[int, _counter("KV bytes not sent: held by the receiver.", "bytes")] = 0
    kv_gone: Annotated[int, _counter("Hand-overs whose kept prefix was lost.", "requests")] = 0
    fetched_tokens: Annotated[int, _counter("Prompt tokens whose KV was fetched.", "tokens")] = 0
    fetches_failed: Annotated[int, _counter("Fetches of a prefix that failed.", "fetches")] = 0
    kv_pool_blocks: Annotated[int, _gauge("KV blocks in the pool.", "blocks")] = 0
    kv_pool_total_blocks: Annotated[int, _gauge("KV blocks that fit into the pool.", "blocks")] = 0
    kv_pool_hit_tokens: Annotated[int, _counter("Prompt tokens with KV of the pool.", "tokens")] = 0
    kv_pool_evictions: Annotated[int, _counter("Blocks that the pool dropped.", "blocks")] = 0
    kv_pool_bytes_saved: Annotated[int, _counter("KV bytes copied to the pool.", "bytes")] = 0
    kv_pool_bytes_loaded: Annotated[int, _counter("KV bytes loaded from the pool.", "bytes")] = 0
    continued: Annotated[int, _counter("Requests continued after prior output.", "requests")] = 0
    recomputed: Annotated[int, _counter("Outputs that could not be continued.", "requests")] = 0
    dropped_messages: Annotated[int, _counter("Control messages dropped here.", "messages")] = 0
    preemptions: Annotated[int, _counter("Requests that lost their KV blocks.", "requests")] = 0
    flips: Annotated[int, _counter("Role changes of the instance.", "flips")] = 0
    cpu_s: Annotated[float, _counter("CPU seconds of engine and API server.", "seconds")] = 0.0
    threads: Annotated[int, _gauge("Python threads of the engine process.", "threads")] = 0
    predictions_made: Annotated[int, _counter("Output lengths predicted.", "predictions")] = 0
    predictions_missed: Annotated[int, _counter("Predictions that were late.", "predictions")] = 0
    predictions_refused: Annotated[int, _counter("Predictions not queued.", "predictions")] = 0
    predictions_failed: Annotated[int, _counter("Predictions that failed.", "predictions")] = 0
    length_states: Annotated[int, _gauge("Hidden states that the head learns from.", "states")] = 0
    length_error: Annotated[float, _gauge("Mean error of the length head.", "tokens")] = 0.0
    length_usual_error: Annotated[float, _gauge("Mean error of usual lengths.", "tokens")] = 0.0
    length_coverage: Annotated[
        float, _gauge("Share of outputs between the predicted 5 and 95 %.", "ratio")
    ] = 0.0
    usual_tokens: int = 0  # mean output that ended here; 0 before the first one
    leftovers: Annotated[
        tuple[str, ...], _gauge("Kinds of resources held while no request is here.", "kinds")
    ] = ()


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance as others see it: its report number `seq`, and how old that is."""

    info: InstanceInfo
    state: InstanceState
    load: InstanceLoad
    age_s: float
    seq: int = 0
    flip: Flip | None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What one router knows of all instances, in any state."""

    router: str = ""
    seq: int = 0  # grows by one with every broadcast of that router
    instances: tuple[InstanceView, ...] = ()
