"""Lets servers of end-to-end tests fork their engine process, as vLLM does on GPUs by default.

vLLM's CPU platform spawns it, and a spawned process imports everything once more: 10 of the 28
seconds of CPU time that a server of a tiny model takes to start on a busy machine. Workers are
spawned as ever. Active in processes that have this folder in PYTHONPATH.
"""

from __future__ import annotations

import multiprocessing


def fork_engines() -> None:
    """Replace the start method of engine processes."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
