"""What the simulator needs to know of a device and a model, built in or from files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost import opt13b
from vllm_tetri.sim.cost.architecture import MODELS, model
from vllm_tetri.sim.cost.roofline import GPUS, gpu, kv_tokens, roofline
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.types import StepCoefficients

VERSION = 1
ROOFLINE = "roofline"
NAMES_OF_ROOFLINES = f"{ROOFLINE}:MODEL:GPU[:DEVICES]"


@dataclass(frozen=True, slots=True)
class Profile:
    """An instance's device and model.

    Attributes:
        cost: What steps take.
        source: Where its numbers come from.
        is_estimate: Whether they were calculated, not measured.
        num_devices: Of an instance (tensor parallel).
        kv_tokens: That its KV pool holds; None where that is not known.
        kv_token_bytes: KV of a token; None likewise.
        front_s: From a request's arrival until its instance knows of it, and back with the
            first token: HTTP, tokens, a router.
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
        """Of so many tokens, in its pool."""
        return None if self.kv_tokens is None else max(1, self.kv_tokens // block_size)


_SMOLLM2 = "measured: SmolLM2 135M in bfloat16 on cores of a Xeon"
_SMOLLM2_KV_BYTES = MODELS["smollm2-135m"].kv_token_bytes
_V100 = GPUS["v100-32g"]
PROFILES = {
    each.name: each
    for each in (
        Profile(
            "smollm2-1core",
            StepCoefficients(0.013, 0.00061, 2.9e-6, 0.00055, 3.5e-7, confidence=1.0),
            _SMOLLM2,
            is_estimate=False,
            kv_token_bytes=_SMOLLM2_KV_BYTES,
        ),
        Profile(
            "smollm2-2cores",
            StepCoefficients(0.0095, 0.00038, 1.7e-6, 0.00031, 2e-7, confidence=1.0),
            _SMOLLM2,
            is_estimate=False,
            kv_token_bytes=_SMOLLM2_KV_BYTES,
        ),
        Profile(
            "estimate-h100-8b",
            StepCoefficients(0.008, 2e-5, 4e-8, 2.5e-5, 3e-9, confidence=1.0),
            "an estimate from bandwidth and peak arithmetic: 8B parameters on an H100-class GPU",
            is_estimate=True,
            kv_token_bytes=MODELS["llama-3-8b"].kv_token_bytes,
        ),
        Profile(
            "opt-13b-2xv100",
            opt13b.COST,
            "an estimate: proportions fitted to what the paper states, scale from data sheets",
            is_estimate=True,
            num_devices=opt13b.PARALLEL,
            kv_tokens=kv_tokens(MODELS["opt-13b"], _V100, opt13b.PARALLEL),
            kv_token_bytes=MODELS["opt-13b"].kv_token_bytes,
        ),
    )
}
_SECONDS = tuple(field.name for field in fields(StepCoefficients) if field.name != "confidence")
_COUNTS = ("kv_tokens", "kv_token_bytes")
_FRONT = "front_s"


def profile(name: str) -> Profile:
    """A built-in profile, a roofline, or one out of a JSON file.

    A roofline is called `roofline:MODEL:GPU` or `roofline:MODEL:GPU:DEVICES`; a model is one
    of `architecture.MODELS` or a folder with a `config.json`.

    The file holds `version`, which is 1, and `base_s`, `request_s`, `token_s`, `prompt_s`
    and `context_s`, in seconds. It may hold `front_s`, `kv_tokens` and `kv_token_bytes`.

    Raises:
        ConfigError: There is none of that name, or the file holds something else.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name.split(":")[0] == ROOFLINE:
        return _roofline(name)
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(
            f"no profile {name!r}; there are {', '.join(PROFILES)}, {NAMES_OF_ROOFLINES}, and "
            "*.json files"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    return _parse(path, raw)


def roofline_profile(model_name: str, gpu_name: str, parallel: int = 1) -> Profile:
    """An estimate from data sheets.

    Raises:
        ConfigError: There is no such model or GPU, or the one does not fit on so many of the
            other.
    """
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


def _roofline(name: str) -> Profile:
    parts = name.split(":")[1:]
    parallel = 1
    if len(parts) > 2 and parts[-1].isdecimal() and len(parts[-1]) < 4:
        parallel = int(parts.pop())
    if len(parts) < 2:
        raise ConfigError(f"profile {name!r}: write {NAMES_OF_ROOFLINES}, llama-3-8b:h100 say")
    return roofline_profile(":".join(parts[:-1]), parts[-1], parallel)


def _parse(path: Path, raw: object) -> Profile:
    version = raw.get("version", VERSION) if isinstance(raw, dict) else VERSION
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"profile {path}: version {version!r}; this is for {VERSION}")
    if not isinstance(raw, dict) or set(raw) - {_FRONT, *_COUNTS} != {"version", *_SECONDS}:
        raise ConfigError(
            f"profile {path}: write an object of version, {', '.join(_SECONDS)}, and if you like "
            f"{_FRONT}, {' and '.join(_COUNTS)}"
        )
    for name in (*_SECONDS, _FRONT):
        value = raw.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"profile {path}: {name} is {value!r}; write seconds, 0 or more")
    if not raw["base_s"] + raw["prompt_s"] or not raw["base_s"] + raw["request_s"]:
        raise ConfigError(f"profile {path}: steps that take no time")
    cost = StepCoefficients(**{name: float(raw[name]) for name in _SECONDS}, confidence=1.0)
    return Profile(
        path.stem,
        cost,
        f"the file {path}",
        is_estimate=False,
        kv_tokens=_count(path, raw, "kv_tokens"),
        kv_token_bytes=_count(path, raw, "kv_token_bytes"),
        front_s=float(raw.get(_FRONT, 0.0)),
    )


def _count(path: Path, raw: dict[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if name in raw and (type(value) is not int or value < 1):
        raise ConfigError(f"profile {path}: {name} is {value!r}; write a whole number from 1")
    return value
