"""Requests: how long, when, and with which prediction.

A class of requests has light or heavy prompts and light or heavy outputs (TetriInfer, section
5.1.1); `mixed` takes each of the four equally often.

Recorded requests come from files. A `.csv` file is one of Azure's LLM inference traces, with the
columns `TIMESTAMP` (a date and time, or seconds), `ContextTokens` and `GeneratedTokens`. A
`.jsonl` file is one of Mooncake's, with `timestamp` in milliseconds, `input_length` and
`output_length`, and `hash_ids`, which name the blocks of a prompt for prefix caches. Others are
ignored.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Prediction

GRANULARITY_TOKENS = 200
NUM_BUCKETS = 10
NAME_TOKENS = 512  # that a block name of Mooncake's traces stands for
LIGHT_PROMPT, HEAVY_PROMPT = (16, 511), (512, 1536)
LIGHT_OUTPUT, HEAVY_OUTPUT = (8, 127), (129, 512)
CLASSES = {
    "lpld": (LIGHT_PROMPT, LIGHT_OUTPUT),
    "lphd": (LIGHT_PROMPT, HEAVY_OUTPUT),
    "hpld": (HEAVY_PROMPT, LIGHT_OUTPUT),
    "hphd": (HEAVY_PROMPT, HEAVY_OUTPUT),
}
KINDS = (*CLASSES, "mixed")
_AZURE, _MOONCAKE = ("ContextTokens", "GeneratedTokens"), ("input_length", "output_length")

Lengths = tuple[int, int]
"""Tokens of a prompt and of its output."""
Arrival = tuple[float, int, int]
"""Seconds at which a request arrives, and its lengths."""
Names = tuple[int, ...]
"""Names of a request's whole blocks of `NAME_TOKENS` tokens, prompt and output; each stands for all
tokens before it as well. Empty, or as many as the prompt has at least."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request before it arrives; no policy may read `output_tokens`."""

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted: Prediction | None = None
    names: Names = ()

    @property
    def prompt_names(self) -> Names:
        """The names of what a prefix cache can have of the prompt: its last token is computed."""
        return self.names[: (self.prompt_tokens - 1) // NAME_TOKENS]


def above_0(**given: float | None) -> None:
    """Raise ConfigError if a number is not above 0, or not finite; None is not given."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name.replace('_', ' ')}: {value:g} must be above 0")


def variation_of(arrivals: str) -> float | None:
    """Read `poisson`, `gamma:CV` or `at-once`, as `variation` of `draw`; raises ConfigError if it
    is something else."""
    if arrivals in ("poisson", "at-once"):
        return 1.0 if arrivals == "poisson" else None
    name, _, number = arrivals.partition(":")
    try:
        variation = float(number if name == "gamma" else "")
    except ValueError:
        variation = 0.0
    if not 0 < variation < math.inf:
        raise ConfigError(f"arrivals {arrivals!r}: write poisson, at-once or gamma:3 for example")
    return variation


def draw(
    kind: str,
    count: int,
    rate: float,
    seed: int,
    *,
    accuracy: float = 1.0,
    known: Sequence[Lengths] | None = None,
    variation: float | None = 1.0,
) -> list[RequestSpec]:
    """Draw requests of one kind.

    Args:
        kind: One of `KINDS`; ignored with `known`.
        rate: Arrivals per second.
        accuracy: Share of right predictions.
        known: Lengths to draw from.
        variation: Coefficient of variation of the times between arrivals, which are
            gamma-distributed as in BurstGPT and ServeGen: 1 is Poisson, more comes in bursts;
            None: all at once. Lengths do not depend on it.
    """
    rng, bursts = Random(f"{kind} {seed}"), Random(f"arrivals {seed}")

    def drawn() -> Iterator[Arrival]:
        now = 0.0
        for _ in range(count):
            gap_s = rng.expovariate(rate)
            if variation is None:
                gap_s = 0.0
            elif variation != 1.0:
                gap_s = bursts.gammavariate(variation**-2, variation**2 / rate)
            now += gap_s
            yield now, *(_lengths(kind, rng) if known is None else rng.choice(known))

    return predicted(drawn(), accuracy, seed)


def _lengths(kind: str, rng: Random) -> Lengths:
    classes = [CLASSES[kind]] if kind in CLASSES else list(CLASSES.values())
    (low, high), outputs = rng.choice(classes)
    if low == LIGHT_PROMPT[0]:
        prompt = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
    else:
        prompt = rng.randint(low, high)
    return prompt, rng.randint(*outputs)


def predicted(arrivals: Iterable[Arrival], accuracy: float, seed: int) -> list[RequestSpec]:
    """Make requests whose length buckets are predicted, a share of them right and the others as a
    neighbouring bucket; raises ConfigError if the accuracy is not from 0 to 1."""
    if not 0 <= accuracy <= 1:
        raise ConfigError(f"an accuracy of {accuracy:g}: must be from 0 to 1")
    rng, specs = Random(f"predictions {seed}"), []
    for number, (at_s, prompt, output) in enumerate(arrivals):
        bucket = min(output // GRANULARITY_TOKENS, NUM_BUCKETS - 1)
        is_right, step = rng.random() < accuracy, rng.choice((-1, 1))
        if not is_right:
            bucket += step if 0 <= bucket + step < NUM_BUCKETS else -step
        guess = Prediction.of_bucket(bucket, GRANULARITY_TOKENS)
        specs.append(RequestSpec(number, at_s, prompt, output, guess))
    return specs


# -- files ---------------------------------------------------------------------------------


def read_trace(path: Path, *, has_times: bool = True) -> list[Arrival]:
    """Read all requests of a file, the first one at 0 s; raises ConfigError if it cannot be read,
    holds something else, or is not in order of time."""
    return [arrival for arrival, _ in _read(path, has_times)]


def _read(path: Path, has_times: bool) -> list[tuple[Arrival, Names]]:
    found: list[tuple[Arrival, Names]] = []
    is_csv, first_s, newest_s = path.suffix == ".csv", 0.0, -math.inf
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file) if is_csv else map(json.loads, filter(str.strip, file))
            for row in rows:
                at_s = _seconds(row, is_csv=is_csv) if has_times else 0.0
                columns = _AZURE if "ContextTokens" in row else _MOONCAKE
                prompt, output = (int(row[name]) for name in columns)
                if min(prompt, output) < 1:
                    raise ValueError("lengths in tokens begin at 1")
                if not newest_s <= at_s < math.inf:
                    raise ValueError("it is earlier than the line before; sort")
                newest_s, first_s = at_s, first_s if found else at_s
                count, ids = prompt // NAME_TOKENS, () if is_csv else row.get("hash_ids") or ()
                names = tuple(map(int, ids[:count])) if count <= len(ids) else ()
                found.append(((at_s - first_s, prompt, output), names))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        where = f"{path}, row {len(found) + 1}: wrong time or lengths"
        raise ConfigError(f"{where}: {error}") from error
    if not found:
        raise ConfigError(f"{path}: it holds no requests")
    return found


def read_lengths(path: Path) -> list[Lengths]:
    """Read only the lengths; raises ConfigError as `read_trace`."""
    return [(prompt, output) for _, prompt, output in read_trace(path, has_times=False)]


def with_names(specs: Sequence[RequestSpec], path: Path) -> list[RequestSpec]:
    """Name the blocks of requests as a trace does those of its first ones; raises ConfigError as
    `read_trace`.

    A trace names no blocks of outputs. The next prompt with the last whole block of this one, if
    no other prompt ends with that and it has room for the output behind it, is taken to go on
    after the output: its names there are those of the output's blocks.
    """
    rows, named = _read(path, has_times=False)[: len(specs)], list[RequestSpec]()
    ends = Counter(names[-1] for _, names in rows if names)
    following: dict[int, int] = {}  # the next row that has a name, by name
    for number in reversed(range(len(rows))):
        (_, prompt, output), names = rows[number]
        known = dict.fromkeys(names, number)
        if names and ends[names[-1]] == 1 and names[-1] in following:
            (_, next_prompt, _), next_names = rows[following[names[-1]]]
            if next_prompt >= prompt + output:
                names += next_names[len(names) : (prompt + output) // NAME_TOKENS]
        following.update(known)
        named.append(replace(specs[number], names=names))
    return named[::-1]


def _seconds(row: dict[str, Any], *, is_csv: bool) -> float:
    """Read the time of a row; a date and time without a zone is in UTC."""
    if not is_csv:
        return float(row["timestamp"]) / 1e3
    try:
        return float(row["TIMESTAMP"])
    except ValueError:
        moment = datetime.fromisoformat(row["TIMESTAMP"])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
