"""How instances of one CPU host share its cores: remembered, or tried out now.

What was measured is kept in `${TETRI_CACHE}/placement`, one JSON file per set of
conditions. Deleting any of them only costs the seconds of measuring anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from vllm_tetri import __version__
from vllm_tetri.engine.cache import cache_folder, replace_file
from vllm_tetri.errors import TetriError
from vllm_tetri.launch.machine import cpu_name
from vllm_tetri.launch.trial import Trial, measure, trial_placements
from vllm_tetri.policy.placement import (
    DEFAULT_SHARING,
    Machine,
    Measured,
    Sharing,
    choose_sharing,
)
from vllm_tetri.types import Role

FORMAT = 1
# A trial says nothing when others take more than this part of the cores.
MAX_OTHERS_PART = 0.1
_THREAD_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "LD_PRELOAD")

Measure = Callable[[Sequence[Role], Machine, str], Awaitable[Trial]]


async def best_sharing(
    roles: Sequence[Role],
    machine: Machine,
    dtype: str,
    say: Callable[[str], None],
    measure: Measure = measure,
) -> Sharing:
    """The better way for these instances. Never fails: where nothing can be measured,
    or others disturb it, it is the default.

    Args:
        roles: Of all instances; at least two.
        machine: With a core for each of them.
        dtype: Name of the torch dtype that they compute in.
        say: Shows a line to the user.
        measure: Tries both ways.
    """
    conditions = conditions_of(roles, machine, dtype)
    trial, origin = recall(conditions), "remembered"
    if trial is None:
        say("measuring how instances share cores ...")
        try:
            trial, origin = await measure(roles, machine, dtype), "measured"
        except (TetriError, OSError) as error:
            say(f"cores: {DEFAULT_SHARING.value}; measuring was not possible: {error}")
            return DEFAULT_SHARING
        if trial.others_part > MAX_OTHERS_PART:
            say(
                f"cores: {DEFAULT_SHARING.value}, and measured again at the next start: other "
                f"processes took {trial.others_part:.0%} of the cores meanwhile"
            )
            return DEFAULT_SHARING
        remember(conditions, trial, say)
    sharing, reason = choose_sharing(trial.split, trial.shared)
    say(f"cores: {sharing.value} ({origin}): {reason}")
    return sharing


def conditions_of(roles: Sequence[Role], machine: Machine, dtype: str) -> dict[str, str]:
    """Everything that changes what a trial measures, by name."""
    placements = trial_placements(roles, machine)
    plain = {
        "vllm_tetri": __version__,
        "torch": _version_of("torch"),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "cores": machine.cores,
        "dtype": dtype,
        "settings": {
            name: value for name, value in os.environ.items() if name.startswith(_THREAD_SETTINGS)
        },
        **{f"{way.value} pair": [asdict(one) for one in placements[way]] for way in placements},
    }
    return {name: json.dumps(value, sort_keys=True) for name, value in plain.items()}


def recall(conditions: dict[str, str]) -> Trial | None:
    """What was measured under these conditions; None if nothing usable was."""
    try:
        content = json.loads(_path(conditions).read_bytes())
        if (content["format"], content["conditions"]) != (FORMAT, conditions):
            return None
        row = content["trial"]
        trial = Trial(Measured(**row["split"]), Measured(**row["shared"]), row["others_part"])
        figures = (*asdict(trial.split).values(), *asdict(trial.shared).values())
        is_sane = all(math.isfinite(figure) and figure > 0 for figure in figures)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return trial if is_sane else None


def remember(conditions: dict[str, str], trial: Trial, say: Callable[[str], None]) -> None:
    """Keep what was measured, or say why that was not possible."""
    content = {"format": FORMAT, "conditions": conditions, "trial": asdict(trial)}
    try:
        replace_file(_path(conditions), json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        say(f"what was measured cannot be remembered: {error}")


def _path(conditions: dict[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return cache_folder("placement") / f"{key[:16]}.json"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
