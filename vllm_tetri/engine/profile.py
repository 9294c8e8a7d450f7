"""What an engine measured of itself, remembered from one start to the next.

One JSON file per set of conditions, in `${TETRI_CACHE}/profiles`, by
default `~/.cache/vllm-tetri/profiles`. Deleting any of them only costs the
seconds of measuring anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_tetri.engine.cache import cache_folder, replace_file
from vllm_tetri.policy.cost import CurvePoint, StepCost

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step of `num_decodes` requests with `context_tokens` each takes `seconds`."""

    num_decodes: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What the steps of one model cost on one device.

    Attributes:
        curve: Prefill steps without context, by rising size.
        decodes: Steps of decodes only; none when they were not asked for.
        chunk_tokens: The chunk that saturates the device (paper section 3.3.3).
        tile_tokens: Steps are filled in multiples of this.
        cost: The model fitted to all of it.
        took_s: How long measuring took.
    """

    curve: tuple[CurvePoint, ...]
    decodes: tuple[DecodePoint, ...]
    chunk_tokens: int
    tile_tokens: int
    cost: StepCost
    took_s: float


class ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    """A profile and what it was measured under."""

    format: int
    conditions: dict[str, str]
    profile: Profile

    def encode(self) -> bytes:
        """As it stands in a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def decodes_by_context(self) -> dict[int, list[DecodePoint]]:
        """Decode steps by their context, by rising number of requests."""
        found: dict[int, list[DecodePoint]] = {}
        for point in self.profile.decodes:
            found.setdefault(point.context_tokens, []).append(point)
        return found


def profile_folder() -> Path:
    """Where profiles are kept; need not exist."""
    return cache_folder("profiles")


class ProfileStore:
    """The remembered profile of one set of conditions.

    Args:
        folder: Where the files are.
        conditions: Whatever changes what a step costs, by name.
    """

    def __init__(self, folder: Path, conditions: dict[str, str]) -> None:
        self._conditions = conditions
        key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{key[:16]}.json"

    def load(self) -> Profile | None:
        """The remembered profile; None when there is none that can be used."""
        try:
            found = read_file(self.path)
            if found.conditions != self._conditions:
                raise ValueError("it was measured under other conditions")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored: %s; measuring anew", self.path, error)
            return None
        return found.profile

    def save(self, profile: Profile) -> None:
        """Remember a profile, or log why that was not possible."""
        content = ProfileFile(FORMAT, self._conditions, profile).encode()
        try:
            replace_file(self.path, content)
        except OSError as error:
            logger.warning("the profile cannot be remembered: %s", error)


def read_file(path: Path) -> ProfileFile:
    """A profile with its conditions.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no profile of this version.
    """
    found = msgspec.json.decode(path.read_bytes(), type=ProfileFile)
    if found.format != FORMAT:
        raise ValueError(f"it has format {found.format}, not {FORMAT}")
    if not _is_sane(found.profile):
        raise ValueError("its numbers cannot be right")
    return found


def _is_sane(profile: Profile) -> bool:
    cost = profile.cost
    seconds = [point.seconds for point in (*profile.curve, *cost.curve)]
    seconds += [point.seconds for point in profile.decodes]
    rates = (cost.context_s, cost.base_s, cost.request_s, cost.token_s, cost.shared_s)
    sizes = [point.tokens for point in cost.curve]
    return (
        bool(sizes)
        and sizes == sorted(set(sizes))
        and min(sizes[0], profile.chunk_tokens, profile.tile_tokens) > 0
        and all(math.isfinite(value) and value > 0 for value in seconds)
        and all(math.isfinite(value) and value >= 0 for value in rates)
    )


def summary(profile: Profile) -> str:
    """One line: the curve, the choice, and what a step costs."""
    curve = ", ".join(f"{p.tokens}: {p.tokens_per_s:.0f}" for p in profile.curve)
    cost = profile.cost
    text = f"prefill tokens/s by chunk {{{curve}}}; saturated at {profile.chunk_tokens} tokens"
    if profile.decodes:
        text += (
            f"; a decode step takes {cost.base_s * 1e3:.1f} ms + {cost.request_s * 1e3:.2f} ms "
            f"a request + {cost.token_s * 1e6:.1f} us a token of context"
        )
    return text
