"""Which cores, priority and GPUs each instance of one machine gets.

On a CPU host there are two ways. *Split* gives every instance cores of its own:
decoding is undisturbed, but an idle instance's cores stay idle. *Shared* lets
all instances use all cores, with prefill at a low priority and with threads
that sleep instead of spinning while they wait: spinning ones would hold the
cores that another instance needs. Which one is better depends on the machine, so
`up` tries both and `choose_sharing` compares. On a GPU host an instance owns GPUs
and the cores are left to the operating system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from vllm_tetri.types import Role


class Sharing(StrEnum):
    """How instances on one CPU host share its cores."""

    AUTO = "auto"
    SPLIT = "split"
    SHARED = "shared"


# What `auto` means where every instance can have a core of its own and nothing was measured.
DEFAULT_SHARING = Sharing.SPLIT

# Sharing must make lone prompts this much faster ...
MIN_PROMPT_GAIN = 1.2
# ... and may make decode steps beside a prompt this much slower, at the 99th percentile.
MAX_STEP_LOSS = 1.25

PREFILL_NICE = 15
MAX_KV_BYTES = 1 << 30
_KV_PART_OF_MEMORY = 8
_KV_GRAIN = 1 << 20

_BINDING = (("VLLM_CPU_OMP_THREADS_BIND", "nobind"),)
_PASSIVE = (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("KMP_BLOCKTIME", "0"))


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be handed out.

    Attributes:
        cores: Logical CPUs that this process may use, in order.
        gpus: Names for ``CUDA_VISIBLE_DEVICES``; empty on a CPU host.
        memory_bytes: Memory available for all instances together.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance runs.

    Attributes:
        cores: Logical CPUs it is pinned to; empty means no pinning.
        nice: Added to its scheduling priority; larger yields more.
        environment: Variables to set, as pairs.
        gpu_sharers: Instances on the same GPUs, this one included; 0 without GPUs.
    """

    cores: tuple[int, ...] = ()
    nice: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    gpu_sharers: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way of sharing did on this machine: prompts in one process, decode
    steps in another, each of them alone and beside the other.

    Attributes:
        prompt_alone_tokens_per_s: Prompt tokens while nobody decodes.
        prompt_beside_tokens_per_s: Prompt tokens while the other decodes.
        step_alone_p50_s: Median decode step while nobody computes prompts.
        step_alone_p99_s: The same, 99th percentile.
        step_beside_p50_s: Median decode step while the other computes prompts.
        step_beside_p99_s: The same, 99th percentile.
    """

    prompt_alone_tokens_per_s: float
    prompt_beside_tokens_per_s: float
    step_alone_p50_s: float
    step_alone_p99_s: float
    step_beside_p50_s: float
    step_beside_p99_s: float


def has_choice(roles: Sequence[Role], machine: Machine, sharing: Sharing) -> bool:
    """Whether a measurement could decide how these instances share the cores."""
    return sharing is Sharing.AUTO and not machine.gpus and 2 <= len(roles) <= len(machine.cores)


def extremes(roles: Sequence[Role]) -> tuple[Role, Role]:
    """The role that is nearest to computing prompts only, and the one nearest to
    decoding only. One instance of each stands for all when ways are compared."""
    ordered = sorted(roles, key=(Role.PREFILL, Role.BOTH, Role.DECODE).index)
    return ordered[0], ordered[-1]


def choose_sharing(split: Measured, shared: Measured) -> tuple[Sharing, str]:
    """The better way and, for the user, why.

    Instances share cores where that makes lone prompts much faster and decode steps
    beside a prompt hardly slower.
    """
    gain = shared.prompt_alone_tokens_per_s / split.prompt_alone_tokens_per_s
    loss = shared.step_beside_p99_s / split.step_beside_p99_s
    better = gain >= MIN_PROMPT_GAIN and loss <= MAX_STEP_LOSS
    reason = (
        f"shared cores give {gain:.2f} x the speed to lone prompts (at least "
        f"{MIN_PROMPT_GAIN} wanted) and {loss:.2f} x the time to decode steps beside them, "
        f"p99 (at most {MAX_STEP_LOSS})"
    )
    return Sharing.SHARED if better else Sharing.SPLIT, reason


def place(
    roles: Sequence[Role], machine: Machine, sharing: Sharing, *, gpus_each: int = 1
) -> list[Placement]:
    """Place instances on a machine, one placement per role in the same order.

    Raises:
        ValueError: The machine has too few cores or GPUs for what is asked; the
            message says how many and what to do.
    """
    if machine.gpus:
        return _on_gpus(len(roles), machine.gpus, gpus_each)
    if sharing is Sharing.AUTO:
        enough = len(roles) <= len(machine.cores)
        sharing = DEFAULT_SHARING if enough else Sharing.SHARED
    if sharing is Sharing.SHARED:
        return [_shared(role, machine.cores) for role in roles]
    return _split(len(roles), machine.cores)


def kv_bytes_each(instances: int, machine: Machine) -> int:
    """KV cache bytes per instance on a CPU host: at most 1 GiB, and all
    instances together at most an eighth of the memory."""
    part = machine.memory_bytes // (_KV_PART_OF_MEMORY * max(1, instances))
    return max(_KV_GRAIN, min(MAX_KV_BYTES, part // _KV_GRAIN * _KV_GRAIN))


def _split(instances: int, cores: Sequence[int]) -> list[Placement]:
    if instances > len(cores):
        raise ValueError(
            f"split placement of {instances} instances needs as many cores, this machine "
            f"has {len(cores)}; use --placement shared or fewer instances"
        )
    bounds = [len(cores) * index // instances for index in range(instances + 1)]
    return [
        Placement(cores=tuple(cores[start:end]), environment=_threads(end - start))
        for start, end in pairwise(bounds)
    ]


def _shared(role: Role, cores: Sequence[int]) -> Placement:
    return Placement(
        cores=tuple(cores),
        nice=PREFILL_NICE if role is Role.PREFILL else 0,
        environment=_threads(len(cores)) + _PASSIVE,
    )


def _threads(count: int) -> tuple[tuple[str, str], ...]:
    return (("OMP_NUM_THREADS", str(count)), *_BINDING)


def _on_gpus(instances: int, gpus: Sequence[str], gpus_each: int) -> list[Placement]:
    groups = len(gpus) // gpus_each
    if groups == 0:
        raise ValueError(
            f"an instance needs {gpus_each} GPUs (--tensor-parallel-size), "
            f"this machine offers {len(gpus)}"
        )
    placements = []
    for index in range(instances):
        group = index % groups
        visible = ",".join(gpus[group * gpus_each : (group + 1) * gpus_each])
        sharers = len(range(group, instances, groups))
        placements.append(
            Placement(environment=(("CUDA_VISIBLE_DEVICES", visible),), gpu_sharers=sharers)
        )
    return placements
