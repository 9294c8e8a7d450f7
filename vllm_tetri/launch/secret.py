"""`vllm-tetri secret`, and the secret that `up` makes for its own cluster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vllm_tetri.launch.in_memory import in_memory
from vllm_tetri.secret import VARIABLE, Secret, read_secret, secret_file_of, write_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `secret`."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="where to put it; must not be there yet"
    )


def run(options: argparse.Namespace) -> int:
    """Make a secret and say what to do with it.

    Raises:
        ConfigError: The file cannot be made.
    """
    write_secret(options.file)
    print(
        f"{options.file} holds a new secret; only you may read it. Give it to every process of "
        f"the cluster:\n"
        f"  vllm serve MODEL --role ... --tetri-secret-file {options.file}\n"
        f"  vllm-tetri router --secret-file {options.file}\n"
        f"or all of them {VARIABLE}={options.file}. Copy it to other hosts by a way that nobody "
        "listens to."
    )
    return 0


def share_secret(given: str | None) -> str:
    """Let all children of this process find a secret: the given one, else that of the
    environment, else a new one that nobody keeps.

    A new one lies in memory under a path below /proc that only this user can open, and is
    gone with this process, however it ends.

    Returns:
        Its path.

    Raises:
        ConfigError: The file is none, or not private.
    """
    path = secret_file_of(given) or in_memory("tetri-secret", Secret.make().text)
    read_secret(path)
    os.environ[VARIABLE] = path
    return path
