"""What the simulator needs to know of a device and a model, built in or from files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.hardware import GPUS, MODELS, gpu, kv_tokens, model, roofline
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.types import StepCoefficients

VERSION = 1
ROOFLINE = "roofline"
NAMES_OF_ROOFLINES = f"{ROOFLINE}:MODEL:GPU[:DEVICES]"


@dataclass(frozen=True, slots=True)
class Profile:
    """An instance's device and model.

    Attributes:
        source: Where its numbers come from.
        is_estimate: Whether they were calculated, not measured.
        num_devices: GPUs of an instance (tensor parallel).
        kv_tokens: Size of its KV pool; None if unknown.
        kv_token_bytes: KV of a token; None if unknown.
        front_s: From a request's arrival until its instance has it, and back with the first
            token: HTTP, tokenizing, a router.
    """

    name: str
    cost: StepCost
    source: str
    is_estimate: bool
    num_devices: int = 1
    kv_tokens: int | None = None
    kv_token_bytes: int | None = None
    front_s: float = 0.0

    def kv_blocks(self, block_size: int) -> int | None:
        """Size of its KV pool in blocks; None if unknown."""
        return None if self.kv_tokens is None else max(1, self.kv_tokens // block_size)


_MEASURED = "measured: SmolLM2 135M in bfloat16 on cores of a Xeon"
_H100 = "an estimate from bandwidth and peak arithmetic: 8B parameters on an H100-class GPU"
_PAPER = "an estimate: proportions fitted to what the paper states, scale from data sheets"
# Model, source, devices, KV pool, and seconds in the order of `StepCoefficients`.
_BUILT_IN = {
    "smollm2-1core": (
        "smollm2-135m",
        _MEASURED,
        1,
        None,
        (0.013, 0.00061, 2.9e-6, 0.00055, 3.5e-7),
    ),
    "smollm2-2cores": (
        "smollm2-135m",
        _MEASURED,
        1,
        None,
        (0.0095, 0.00038, 1.7e-6, 0.00031, 2e-7),
    ),
    "estimate-h100-8b": ("llama-3-8b", _H100, 1, None, (0.008, 2e-5, 4e-8, 2.5e-5, 3e-9)),
    "opt-13b-2xv100": (
        "opt-13b",
        _PAPER,
        2,
        kv_tokens(MODELS["opt-13b"], GPUS["v100-32g"], 2),
        (0.0214, 0.000245, 8.41e-7, 0.000164, 5.46e-9),
    ),
}
PROFILES = {
    name: Profile(
        name,
        StepCoefficients(*seconds, confidence=1.0),
        source,
        source is not _MEASURED,
        devices,
        pool,
        MODELS[model_name].kv_token_bytes,
    )
    for name, (model_name, source, devices, pool, seconds) in _BUILT_IN.items()
}
_SECONDS = tuple(field.name for field in fields(StepCoefficients) if field.name != "confidence")
_COUNTS = ("kv_tokens", "kv_token_bytes")


def profile(name: str) -> Profile:
    """Return a built-in profile, `roofline:MODEL:GPU[:DEVICES]`, or one from a JSON file.

    The file holds `version`, which is 1, and `base_s`, `request_s`, `token_s`, `prompt_s` and
    `context_s`, in seconds. It may hold `front_s`, `kv_tokens` and `kv_token_bytes`.

    Raises:
        ConfigError: There is none of that name, or the file holds something else.
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
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    return _parse(path, raw)


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
    )


def _parse(path: Path, raw: object) -> Profile:
    where, values = f"profile {path}", raw if isinstance(raw, dict) else {}
    version = values.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"{where}: version {version!r}; this is for {VERSION}")
    if set(values) - {"front_s", *_COUNTS} != {"version", *_SECONDS}:
        more = f"front_s, {' and '.join(_COUNTS)}"
        raise ConfigError(
            f"{where}: write an object of version, {', '.join(_SECONDS)}, and if you like {more}"
        )
    for name in (*_SECONDS, "front_s"):
        value = values.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {name} is {value!r}; write seconds, 0 or more")
    for name in _COUNTS:
        if name in values and (type(values[name]) is not int or values[name] < 1):
            raise ConfigError(f"{where}: {name} is {values[name]!r}; write a whole number from 1")
    if not values["base_s"] + values["prompt_s"] or not values["base_s"] + values["request_s"]:
        raise ConfigError(f"{where}: steps that take no time")
    return Profile(
        path.stem,
        StepCoefficients(**{name: float(values[name]) for name in _SECONDS}, confidence=1.0),
        f"the file {path}",
        is_estimate=False,
        kv_tokens=values.get("kv_tokens"),
        kv_token_bytes=values.get("kv_token_bytes"),
        front_s=float(values.get("front_s", 0.0)),
    )
