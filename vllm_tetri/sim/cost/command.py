"""`vllm-tetri sim profile`: what a profile says, as Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vllm_tetri.sim.cost import opt13b
from vllm_tetri.sim.cost.profiles import NAMES_OF_ROOFLINES, PROFILES, Profile, profile
from vllm_tetri.sim.cost.step_cost import Roofline, linear

_MS = 1e3
_CONTEXT_TOKENS = 512
# Decodes and prompt tokens of some steps.
_STEPS = ((1, 0), (16, 0), (64, 0), (256, 0), (0, 128), (0, 512), (0, 2048), (64, 512))
_FITTED = "opt-13b-2xv100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(PROFILES)}, {NAMES_OF_ROOFLINES}, or *.json"
    )


def run(options: argparse.Namespace) -> int:
    """Print it."""
    print("\n".join(markdown(profile(options.name))))
    return 0


def markdown(known: Profile) -> list[str]:
    """What it holds, what some steps take, and for the paper's what that states."""
    lines = [f"{known.name}: {known.source}", "", *_facts(known), "", *_steps(known)]
    if known.name == _FITTED:
        lines += ["", *opt13b.markdown(known.cost)]
    return lines


def _facts(known: Profile) -> Iterator[str]:
    yield "| what | |"
    yield "|---|--:|"
    yield f"| {'estimate' if known.is_estimate else 'measured'} | yes |"
    yield f"| devices of an instance | {known.num_devices} |"
    yield f"| KV pool, tokens | {_count(known.kv_tokens)} |"
    yield f"| before and behind the engine, ms | {known.front_s * 1e3:.3g} |"
    yield f"| KV of a token, bytes | {_count(known.kv_token_bytes)} |"
    if isinstance(known.cost, Roofline):
        yield f"| tokens from which arithmetic is longer | {known.cost.ridge_tokens:.0f} |"


def _count(number: int | None) -> str:
    return "not known" if number is None else f"{number:,}"


def _steps(known: Profile) -> Iterator[str]:
    about, is_bent = linear(known.cost), isinstance(known.cost, Roofline)
    yield f"| decodes of {_CONTEXT_TOKENS} tokens | prompt tokens | ms |" + (
        " linear, ms |" if is_bent else ""
    )
    yield "|--:|--:|--:|" + ("--:|" if is_bent else "")
    for decodes, tokens in _STEPS:
        step = (decodes, decodes * _CONTEXT_TOKENS, tokens, max(0, tokens - 1) / 2)
        line = f"| {decodes} | {tokens} | {known.cost.step_s(*step) * _MS:.1f} |"
        yield line + (f" {about.step_s(*step) * _MS:.1f} |" if is_bent else "")
