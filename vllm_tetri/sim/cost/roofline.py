"""What steps take by data sheets: an estimate, measured nowhere.

A device does its published arithmetic and reads its published bandwidth, each by a factor
less; weights and KV are 16 bits wide and cut evenly over the devices of an instance.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.architecture import WEIGHT_BYTES, Model
from vllm_tetri.sim.cost.step_cost import Roofline

# Parts of published figures that engines reach in big matrix products and in long reads.
# These and the times below are round guesses for vLLM with CUDA graphs.
ARITHMETIC_PART = 0.6
BANDWIDTH_PART = 0.8
# Of memory, for weights and KV: vLLM's default of 0.92 less activations and graphs.
MEMORY_PART = 0.9
OVERHEAD_S = 0.003
ALL_REDUCE_S = 1e-5  # to begin one; there are two in a layer
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, by its data sheet.

    Attributes:
        flops: Of 16-bit matrix products, dense, per second.
        bandwidth: Bytes of its memory per second.
        memory_bytes: Its size.
        link: Bytes per second to the others of its instance, in one direction.
    """

    name: str
    flops: float
    bandwidth: float
    memory_bytes: int
    link: float


# NVIDIA's data sheets, SXM variants; NVLink counts both directions there.
GPUS = {
    each.name: each
    for each in (
        Gpu("v100-32g", 125e12, 0.9e12, 32 * _GIB, 300e9 / 2),
        Gpu("a100-80g", 312e12, 2.039e12, 80 * _GIB, 600e9 / 2),
        Gpu("h100-80g", 989e12, 3.35e12, 80 * _GIB, 900e9 / 2),
        Gpu("h200", 989e12, 4.8e12, 141 * _GIB, 900e9 / 2),
    )
}


def gpu(name: str) -> Gpu:
    """A device by its name, or by the beginning of exactly one: `h100`.

    Raises:
        ConfigError: There is none.
    """
    found = [each for each in GPUS.values() if name and each.name.startswith(name.lower())]
    if len(found) != 1:
        raise ConfigError(f"no GPU {name!r}; there are {', '.join(GPUS)}")
    return found[0]


def roofline(model: Model, device: Gpu, parallel: int) -> Roofline:
    """Steps of an instance of so many devices (tensor parallel).

    Raises:
        ConfigError: Its heads cannot be cut into so many parts.
    """
    if parallel < 1 or model.heads % parallel or _parts(model, parallel) is None:
        raise ConfigError(f"{model.name} has {model.heads} heads, not to be cut into {parallel}")
    flops = device.flops * ARITHMETIC_PART * parallel
    bandwidth = device.bandwidth * BANDWIDTH_PART * parallel
    num_reduces = 2 * model.layers if parallel > 1 else 0
    # Every device sends and gets all but its part twice (ring).
    reduced_bytes = num_reduces * model.hidden * WEIGHT_BYTES * 2 * (parallel - 1) / parallel
    return Roofline(
        overhead_s=OVERHEAD_S + num_reduces * ALL_REDUCE_S,
        weights_s=model.step_parameters * WEIGHT_BYTES / bandwidth,
        token_s=2 * model.step_parameters / flops,
        kv_s=_kv_bytes(model, parallel) / bandwidth,
        attention_s=model.attention_operations / flops,
        link_s=reduced_bytes / (device.link * BANDWIDTH_PART),
    )


def kv_tokens(model: Model, device: Gpu, parallel: int) -> int:
    """Whose KV fits beside the weights of an instance.

    Raises:
        ConfigError: None does.
    """
    usable = device.memory_bytes * MEMORY_PART * parallel - model.parameters * WEIGHT_BYTES
    tokens = int(usable // _kv_bytes(model, parallel))
    if tokens < 1:
        raise ConfigError(
            f"{model.name} has {model.parameters * WEIGHT_BYTES / _GIB:.0f} GiB of weights, too "
            f"many for {parallel} {device.name}; cut it over more with :N"
        )
    return tokens


def _parts(model: Model, parallel: int) -> int | None:
    """Heads of KV on each device: with fewer heads than devices they have copies."""
    if parallel >= model.kv_heads:
        return 1 if parallel % model.kv_heads == 0 else None
    return model.kv_heads // parallel if model.kv_heads % parallel == 0 else None


def _kv_bytes(model: Model, parallel: int) -> int:
    """Of a token, on all devices together."""
    parts = _parts(model, parallel)
    assert parts is not None
    return model.kv_token_bytes * parts * parallel // model.kv_heads
