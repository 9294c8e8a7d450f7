"""What steps cost on some devices, and profiles from files."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.types import StepCoefficients

VERSION = 1
PROFILES = {
    # SmolLM2 135M, bfloat16; measured on cores of a Xeon.
    "smollm2-1core": StepCoefficients(0.013, 0.00061, 2.9e-6, 0.00055, 3.5e-7, confidence=1.0),
    "smollm2-2cores": StepCoefficients(0.0095, 0.00038, 1.7e-6, 0.00031, 2e-7, confidence=1.0),
    # An estimate from memory bandwidth and peak arithmetic, measured nowhere: a model of
    # 8B parameters on a GPU of the H100 class.
    "estimate-h100-8b": StepCoefficients(0.008, 2e-5, 4e-8, 2.5e-5, 3e-9, confidence=1.0),
}
_NAMES = tuple(field.name for field in fields(StepCoefficients) if field.name != "confidence")


def profile(name: str) -> StepCoefficients:
    """A built-in profile, or one out of a JSON file.

    The file holds `version`, which is 1, and `base_s`, `request_s`, `token_s`, `prompt_s`
    and `context_s`, in seconds.

    Raises:
        ConfigError: There is none of that name, or the file holds something else.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(f"no profile {name!r}; there are {', '.join(PROFILES)}, and *.json files")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}") from error
    return _parse(path, raw)


def _parse(path: Path, raw: object) -> StepCoefficients:
    if not isinstance(raw, dict) or set(raw) != {"version", *_NAMES}:
        raise ConfigError(f"profile {path}: write an object of version, {', '.join(_NAMES)}")
    if type(raw["version"]) is not int or raw["version"] != VERSION:
        raise ConfigError(f"profile {path}: version {raw['version']!r}; this is for {VERSION}")
    for name in _NAMES:
        value = raw[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"profile {path}: {name} is {value!r}; write seconds, 0 or more")
    if not raw["base_s"] + raw["prompt_s"] or not raw["base_s"] + raw["request_s"]:
        raise ConfigError(f"profile {path}: steps that take no time")
    return StepCoefficients(**{name: float(raw[name]) for name in _NAMES}, confidence=1.0)
