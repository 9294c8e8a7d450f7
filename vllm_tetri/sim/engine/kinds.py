"""Kinds of engines, as values of a `Shape`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm_tetri.errors import ConfigError

STOCK_BUDGET_TOKENS = 2048
USUAL_WINDOW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Tetri:
    """With this package: ordered prompts in chunks, KV that arrives, admission. Its numbers
    and policies are those of the shape."""


TETRI = Tetri()


@dataclass(frozen=True, slots=True)
class Unchunked:
    """Takes and gives KV too, but computes prompts whole, and before it lets decodes in:
    those that fit into the shape's `chunk_tokens` together, or a longer one alone. What
    DistServe and Splitwise are made of."""


@dataclass(frozen=True, slots=True)
class _Counts:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                name = field.name.replace("_", " ")
                raise ConfigError(f"{name}: {value} must be at least 1")


@dataclass(frozen=True, slots=True)
class Stock(_Counts):
    """vLLM as it comes; with a small budget Sarathi-Serve.

    Attributes:
        budget_tokens: Of a step; decodes and prompts share them.
    """

    budget_tokens: int = STOCK_BUDGET_TOKENS


@dataclass(frozen=True, slots=True)
class PromptsFirst(_Counts):
    """vLLM of 2023: a step is either prompts, whole, or decodes.

    Attributes:
        most_prompts: In a step.
        most_tokens: Of its prompts together, or of one that is alone.
    """

    most_prompts: int = 16
    most_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Orca(_Counts):
    """Iterations with whole prompts, and KV reserved for the longest request.

    Attributes:
        window_tokens: Prompt and answer of that.
    """

    window_tokens: int = USUAL_WINDOW_TOKENS


@dataclass(frozen=True, slots=True)
class Static(_Counts):
    """A batch is computed to the end of its longest request before the next one begins.

    Attributes:
        window_tokens: As for `Orca`.
    """

    window_tokens: int = USUAL_WINDOW_TOKENS


Engine = Tetri | Unchunked | Stock | PromptsFirst | Orca | Static
