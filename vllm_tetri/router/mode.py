"""``vllm-tetri mode``: how a running router serves requests."""

from __future__ import annotations

import argparse
import sys

from vllm_tetri.router import admin
from vllm_tetri.types import Mode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "mode",
        nargs="?",
        choices=[mode.value for mode in Mode],
        help="prompt and answer on two instances (split), each request on one (whole), or decided "
        "for every request (adaptive); without one, the present mode is shown",
    )
    admin.add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Show or change it; returns the exit status."""
    try:
        print(admin.mode(args.url, args.mode))
    except admin.AdminError as error:
        print(f"vllm-tetri mode: {error}", file=sys.stderr)
        return 1
    return 0
