"""Values that every layer shares. Standard library only; everything is frozen.

Units are suffixes: `_tokens`, `_blocks`, `_bytes`, `_s` (seconds as float).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

InstanceId = NewType("InstanceId", str)
TransferId = NewType("TransferId", str)
RequestId = NewType("RequestId", str)


class Role(StrEnum):
    """What an instance prefers to do. Direction is per request, so a role is a
    preference of placement, never a limit of what the engine can do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Mode(StrEnum):
    """How a router serves the requests that two instances could share."""

    SPLIT = "split"  # prompt and answer on two instances
    ADAPTIVE = "adaptive"  # decided for every request
    WHOLE = "whole"  # each on one instance


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """What a step of an engine takes, in seconds.

    Attributes:
        base_s: Of any step.
        request_s: Per request that decodes.
        token_s: Per token of context of those.
        prompt_s: Per prompt token.
        context_s: Per prompt token and token of its context.
        confidence: From 0, a guess, to 1, measured and right.
    """

    base_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    prompt_s: float = 0.0
    context_s: float = 0.0
    confidence: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it says anything."""
        return self.base_s + self.request_s + self.prompt_s > 0

    def step_s(
        self, num_decodes: float, decode_context: float, prompt_tokens: float, prompt_context: float
    ) -> float:
        """A step of decodes with so many tokens of context together, and of prompt tokens
        with so many tokens before each in the mean, whether computed earlier or with it."""
        return (
            self.base_s
            + num_decodes * self.request_s
            + decode_context * self.token_s
            + prompt_tokens * (self.prompt_s + prompt_context * self.context_s)
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """A guess of how many tokens an answer will have (paper section 3.3.2).

    Bucket k of n, g tokens wide, means [k·g, (k+1)·g) tokens; the last one is open.

    Raises:
        ValueError: There is no such bucket.
    """

    bucket: int
    num_buckets: int
    granularity_tokens: int

    def __post_init__(self) -> None:
        if not (0 <= self.bucket < self.num_buckets and self.granularity_tokens > 0):
            raise ValueError(f"no bucket: {self}")

    @property
    def lower_tokens(self) -> int:
        """Where the bucket begins."""
        return self.bucket * self.granularity_tokens


class InstanceState(StrEnum):
    """Where an instance is in its life, as the cluster monitor sees it."""

    STARTING = "starting"  # announced, HTTP not yet answering
    READY = "ready"
    SILENT = "silent"  # no report for longer than the limit; not used
    REFUSED = "refused"  # its KV layout or version does not fit the cluster
    FLIPPING = "flipping"  # finishes what it has, gets nothing new, then has another role
    LEAVING = "leaving"  # finishes what it has, gets nothing new, then goes


class FlipStage(StrEnum):
    """How far a flip is."""

    DRAINING = "draining"  # the old role's work is being finished
    SWITCHING = "switching"  # the engine takes the new role at its next step
    DONE = "done"
    ROLLED_BACK = "rolled_back"  # the instance keeps its old role


@dataclass(frozen=True, slots=True)
class Flip:
    """What an instance says of its newest flip (paper section 3.5).

    Attributes:
        epoch: Number of the order that began it; an instance takes only higher ones.
        source: Role that the instance had.
        target: Role that it is to have, or has now.
        stage: How far it is.
        age_s: Since it reached that stage.
        drain_s: From the order to the end of the old role's work; 0 with `now`.
        commit_s: From the end of the drain, or the step boundary with `now`, until a
            router knew the new role.
        reason: Who wanted it and why.
        problem: Why it was rolled back.
        is_heard: Whether the instance said so itself. Until then the order is with one
            router only, and is lost with it.
    """

    epoch: int
    source: Role
    target: Role
    stage: FlipStage
    age_s: float = 0.0
    drain_s: float = 0.0
    commit_s: float = 0.0
    reason: str = ""
    problem: str = ""
    is_heard: bool = True

    @property
    def is_under_way(self) -> bool:
        """Whether the instance is about to have the target's role."""
        return self.stage in (FlipStage.DRAINING, FlipStage.SWITCHING)


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What an instance says of itself once, when it joins.

    Attributes:
        id: Unique name in the cluster, for example ``prefill-0``.
        url: Base URL of its HTTP server, without a trailing slash.
        role: Preference of placement.
        models: Names it serves; the first is the canonical one.
        kv_endpoint: ``host:port`` of its KV receiver.
        identity: What two instances must agree on to exchange KV blocks
            (model, dtype, block size, layout, ISA, vLLM version, ...).
        max_model_len: Longest prompt plus answer, in tokens.
        block_size: Tokens per KV block.
        pid: Process id of the engine, for operators.
        version: Version of this package in the instance.
        injects: Whether it goes on behind tokens that another instance sampled.
        injects_seeded: The same for requests with a seed of their own.
        reasons: Whether its API server takes reasoning out of chat answers.
        num_routers: How many it reports to.
        device: What it computes on. Instances of the same name share it; one without a
            name has it for itself.
    """

    id: InstanceId
    url: str
    role: Role
    models: tuple[str, ...]
    kv_endpoint: str
    identity: dict[str, str]
    max_model_len: int
    block_size: int
    pid: int
    version: str
    injects: bool = True
    injects_seeded: bool = True
    reasons: bool = False
    num_routers: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an instance reports every period.

    ``blocks_used`` leaves out blocks that only the prefix cache holds. ``held``
    counts slots of the receive arena: KV that arrives or waits for its request, and
    KV of preempted requests. ``heavy`` and ``light`` count the requests that decode
    here, running or waiting, by expected length (paper section 3.3.4), and
    ``remaining_tokens`` is what all of them are expected to write yet.
    ``reserved_blocks`` are kept for running requests beyond what they hold. Counters
    (``*_done``, ``preemptions``, ``flips``, ``cpu_s``) only grow. Speeds are measured from
    steps, the newest count most, and 0 before there was one: ``prefill_tokens_per_s`` of
    steps that compute prompts; a step that decodes n requests of usual context takes
    ``decode_base_s`` + n · ``decode_request_s``; ``cost`` says it for any step.
    ``context_tokens`` are those of all requests that decode, ``chunk_tokens`` what a step
    computes of prompts at most. KV of n tokens is at its decode instance ``handover_s`` +
    n · ``handover_token_s`` after the prompt is done, as far as this instance has seen.
    """

    running: int = 0
    waiting: int = 0
    held: int = 0
    queued_prefill_tokens: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    arena_used_bytes: int = 0
    arena_total_bytes: int = 0
    heavy: int = 0
    light: int = 0
    remaining_tokens: int = 0
    reserved_blocks: int = 0
    step_s: float = 0.0
    prefills_done: int = 0
    decodes_done: int = 0
    chunks_done: int = 0
    prompt_tokens_done: int = 0  # computed here
    answer_tokens_done: int = 0  # sampled here
    prefill_tokens_per_s: float = 0.0
    decode_base_s: float = 0.0
    decode_request_s: float = 0.0
    cost: StepCoefficients = StepCoefficients()
    context_tokens: int = 0
    chunk_tokens: int = 0
    handover_s: float = 0.0
    handover_token_s: float = 0.0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    kv_loads_failed: int = 0
    injected: int = 0  # requests continued behind given tokens
    recomputed: int = 0  # requests whose given tokens could not be taken
    dropped_messages: int = 0
    preemptions: int = 0
    swapped_out: int = 0  # of those: whose KV was kept in the arena
    swapped_in: int = 0  # of those: whose KV came back
    preemptions_recomputed: int = 0  # whose KV was not kept, or lost
    flips: int = 0
    cpu_s: float = 0.0
    threads: int = 0
    predictions_made: int = 0
    predictions_missed: int = 0  # not there when the first chunk was done
    predictions_refused: int = 0  # the predictor's queue was full
    predictions_failed: int = 0  # the predictor was away, died or erred
    # Tokens of an answer by predicted bucket, at the end without a prediction, as seen
    # here; empty before the first answer ended.
    bucket_tokens: tuple[int, ...] = ()
    # What is there although no request is, in words (`engine.audit`).
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance as others see it: what it said, and how old that is.

    ``seq`` numbers the load report; it grows by one with every report of an agent.
    ``flip`` is its newest flip, if it ever had one.
    """

    info: InstanceInfo
    state: InstanceState
    load: InstanceLoad
    age_s: float
    seq: int = 0
    flip: Flip | None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A snapshot of all instances that one router knows.

    Attributes:
        router: Which router sent it.
        seq: Grows by one with every broadcast of that router.
        instances: Every instance that is not gone, in any state.
    """

    router: str = ""
    seq: int = 0
    instances: tuple[InstanceView, ...] = field(default=())
