"""Plans of `up` for machines that do not exist."""

from __future__ import annotations

import argparse
from dataclasses import replace

from vllm_tetri.launch import plan, up
from vllm_tetri.launch.machine import Machine, serve_options_in

CPU = Machine(cores=((0,), (1,)), gpus=(), memory_bytes=32 << 30)
GPU = Machine(cores=((0,), (1,)), gpus=("0",), memory_bytes=32 << 30)
GPUS = Machine(cores=((0,), (1,)), gpus=("0", "1", "2", "3"), memory_bytes=32 << 30)


def options(*words: str, tail: tuple[str, ...] = ()) -> argparse.Namespace:
    """In mode split, unless the words name another one."""
    return parsed("--mode=split", *words, tail=tail)


def parsed(*words: str, tail: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    namespace = parser.parse_args(["model", "--port=0", *words])
    namespace.tail = list(tail)
    return namespace


def make_plan(
    given: argparse.Namespace,
    machine: Machine,
    gpus_each: int = 1,
    *,
    may_take_default: bool = True,
) -> plan.LaunchPlan:
    serve = replace(serve_options_in(given.tail), num_workers=gpus_each)
    return plan.make_plan(given, machine, serve, may_take_default=may_take_default)
