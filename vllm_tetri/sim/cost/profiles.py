"""What the simulator needs to know of a device and a model, built in or from files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.hardware import GPUS, MODELS, Gpu, gpu, kv_tokens, model, roofline
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.types import StepCoefficients

VERSION = 1
ROOFLINE = "roofline"
NAMES_OF_ROOFLINES = f"{ROOFLINE}:MODEL:GPU[:DEVICES]"


@dataclass(frozen=True, slots=True)
class Profile:
    """An instance's device and model."""

    name: str
    cost: StepCost
    source: str  # where its numbers come from
    is_estimate: bool  # whether they were calculated, not measured
    num_devices: int = 1  # GPUs of an instance (tensor parallel)
    kv_tokens: int | None = None  # size of its KV pool; None if unknown
    kv_token_bytes: int | None = None  # KV of a token; None if unknown
    # From a request's arrival until its instance has it, and back with the first token: HTTP,
    # tokenizing, a router.
    front_s: float = 0.0
    gpu: Gpu | None = None  # its kind of GPU, if that is one of the data sheets
    price: float | None = None  # of a GPU hour, if known
    # Most tokens and requests of a step (on GPUs vLLM's for `vllm serve`), and tiles of kernels.
    most_tokens: int = 2048
    max_requests: int = 256
    tile_tokens: int = 16


class Least(StrEnum):
    """What is to be as little as possible; its value is an option's."""

    GPUS = "gpus"
    PRICE = "price"
    POWER = "power"
    SPACE = "space"

    @property
    def unit(self) -> str:
        """One of it."""
        names = {Least.PRICE: "unit of price", Least.POWER: "watt", Least.SPACE: "rack unit"}
        return names.get(self, "GPU")

    def of(self, profile: Profile) -> float:
        """What an instance of the profile takes; 0 if that is not known."""
        device = profile.gpu
        per_gpu = {
            Least.GPUS: 1.0,
            Least.PRICE: profile.price or 0.0,
            Least.POWER: device.watts if device else 0.0,
            Least.SPACE: device.rack_units if device else 0.0,
        }
        return per_gpu[self] * profile.num_devices


_MEASURED = "measured: SmolLM2 135M in bfloat16 on cores of a Xeon"
_H100 = "an estimate from bandwidth and peak arithmetic: 8B parameters on an H100-class GPU"
_PAPER = "an estimate: proportions fitted to what the paper states, scale from data sheets"
_CORES = ("smollm2-135m", _MEASURED, 1, None)
_PAPER_POOL = kv_tokens(MODELS["opt-13b"], GPUS["v100-32g"], 2)
# Model, source, devices, KV pool, and seconds in the order of `StepCoefficients`.
_BUILT_IN = {
    "smollm2-1core": (*_CORES, (0.013, 0.00061, 2.9e-6, 0.00055, 3.5e-7)),
    "smollm2-2cores": (*_CORES, (0.0095, 0.00038, 1.7e-6, 0.00031, 2e-7)),
    "estimate-h100-8b": ("llama-3-8b", _H100, 1, None, (0.008, 2e-5, 4e-8, 2.5e-5, 3e-9)),
    "opt-13b-2xv100": (
        "opt-13b", _PAPER, 2, _PAPER_POOL, (0.0214, 0.000245, 8.41e-7, 0.000164, 5.46e-9),
    ),
}  # fmt: skip
_DEVICES = {"estimate-h100-8b": GPUS["h100-80g"], "opt-13b-2xv100": GPUS["v100-32g"]}


def _limits(device: Gpu | None) -> dict[str, Any]:
    """Return what bounds the steps of an instance on a GPU, or on cores (None)."""
    if device is None:
        return {}
    is_large = device.memory_bytes >= 70 << 30 and not device.name.startswith("a100")
    tokens, requests = (8192, 1024) if is_large else (2048, 256)
    return {"most_tokens": tokens, "max_requests": requests, "tile_tokens": 128}


PROFILES = {
    name: Profile(
        name, StepCoefficients(*seconds, confidence=1.0), source, source is not _MEASURED,
        devices, pool, MODELS[model_name].kv_token_bytes, **_limits(_DEVICES.get(name)),
    )
    for name, (model_name, source, devices, pool, seconds) in _BUILT_IN.items()
}  # fmt: skip
_SECONDS = {field.name for field in fields(StepCoefficients)} - {"confidence"}
_COUNTS = ("kv_tokens", "kv_token_bytes", "most_tokens", "max_requests", "tile_tokens")


def profile(name: str) -> Profile:
    """Return a built-in profile, `roofline:MODEL:GPU[:DEVICES]`, or one from a JSON file.

    The file holds `version`, which is 1, and `base_s`, `request_s`, `token_s`, `prompt_s` and
    `context_s`, in seconds. It may hold `front_s`, `kv_tokens`, `kv_token_bytes`, `most_tokens`,
    `max_requests` and `tile_tokens`. Raises ConfigError if there is none of that name, or the file
    holds something else.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name.split(":")[0] == ROOFLINE:
        parts = name.split(":")[1:]
        has_parallel = len(parts) > 2 and parts[-1].isdecimal() and len(parts[-1]) < 4
        parallel = int(parts.pop()) if has_parallel else 1
        if len(parts) < 2:
            raise ConfigError(f"profile {name!r}: write {NAMES_OF_ROOFLINES}, llama-3-8b:h100 say")
        return roofline_profile(":".join(parts[:-1]), parts[-1], parallel)
    path = Path(name)
    if path.suffix != ".json":
        known = ", ".join((*PROFILES, NAMES_OF_ROOFLINES))
        raise ConfigError(f"no profile {name!r}; there are {known}, and *.json files")
    return _read(path)


def roofline_profile(model_name: str, gpu_name: str, parallel: int = 1) -> Profile:
    """Estimate a profile from data sheets; raises ConfigError if there is no such model or GPU, or
    the model does not fit."""
    what, device = model(model_name), gpu(gpu_name)
    return Profile(
        name=f"{ROOFLINE}:{what.name}:{device.name}:{parallel}",
        cost=roofline(what, device, parallel),
        source=f"an estimate from data sheets: {what.name} on {parallel} x {device.name}",
        is_estimate=True,
        num_devices=parallel,
        kv_tokens=kv_tokens(what, device, parallel),
        kv_token_bytes=what.kv_token_bytes,
        gpu=device,
        **_limits(device),
    )


def _read(path: Path) -> Profile:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, names = values.pop("version"), {*values}
        if version != VERSION or not _SECONDS <= names <= {*_SECONDS, "front_s", *_COUNTS}:
            raise ConfigError(
                f"profile {path}: write an object of version, which is {VERSION}, "
                f"{', '.join(sorted(_SECONDS))}, and if you like {', '.join(('front_s', *_COUNTS))}"
            )
        for name, value in values.items():
            least = 1 if name in _COUNTS else 0
            if not least <= value < math.inf:
                raise ConfigError(f"profile {path}: {name} is {value!r}, must be {least} or more")
        values |= {name: int(values[name]) for name in _COUNTS if name in values}
        cost = StepCoefficients(**{name: values.pop(name) for name in _SECONDS}, confidence=1.0)
    except ConfigError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error!r}") from error
    if not cost.base_s + min(cost.prompt_s, cost.request_s):
        raise ConfigError(f"profile {path}: steps that take no time")
    return Profile(path.stem, cost, f"the file {path}", is_estimate=False, **values)
