"""The `vllm-tetri` command.

A command is a module with ``add_arguments(parser)`` and ``run(options) -> int``.
Only the module of the command that is run gets imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from vllm_tetri import __version__
from vllm_tetri.errors import INTERRUPTED, TetriError

PROGRAM = "vllm-tetri"
USAGE_ERROR = 2


class CommandModule(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """One entry of the overview; ``name`` may have two words."""

    name: str
    module: str
    summary: str
    example: str
    tail: str = ""  # what follows a bare `--`, if anything may


COMMANDS = (
    Command(
        "up",
        "vllm_tetri.launch.up",
        "run a whole cluster on this machine",
        "up MODEL --prefill 1 --decode 1 -- --max-model-len 4096",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "router",
        "vllm_tetri.router.command",
        "run the OpenAI-compatible front door",
        "router --port 8000",
    ),
    Command(
        "secret",
        "vllm_tetri.launch.secret",
        "make the secret that the processes of a cluster share",
        "secret cluster.secret",
    ),
    Command(
        "status",
        "vllm_tetri.router.status",
        "show the instances that a router knows",
        "status --url http://127.0.0.1:8000",
    ),
    Command(
        "flip",
        "vllm_tetri.router.flip",
        "give an instance another role while it serves",
        "flip decode-1 prefill",
    ),
    Command(
        "mode",
        "vllm_tetri.router.mode",
        "serve requests split, whole, or as suits each",
        "mode adaptive",
    ),
    Command(
        "leave",
        "vllm_tetri.router.leave",
        "let an instance finish what it has and go",
        "leave decode-1 --deadline 60",
    ),
    Command(
        "sim plan",
        "vllm_tetri.sim.plan.command",
        "find how many prefill and decode instances serve most, or none",
        "sim plan --model llama-3-8b --gpu h100 --gpus 8 --kind mixed --ttft 0.4 --tpot 0.03",
    ),
    Command(
        "sim profile",
        "vllm_tetri.sim.cost.command",
        "show what the simulator takes for the cost of steps",
        "sim profile roofline:llama-3-8b:h100",
    ),
    Command(
        "sim",
        "vllm_tetri.sim.command",
        "simulate clusters of any size on this machine",
        "sim --mode split whole --prefill 1 --decode 1 --kind mixed --rate 1",
    ),
    Command(
        "doctor",
        "vllm_tetri.launch.doctor",
        "explain what this machine can run",
        "doctor",
    ),
    Command(
        "predictor collect",
        "vllm_tetri.predictor.collect",
        "record how long a model's answers to prompts are",
        "predictor collect sharegpt.json --url http://127.0.0.1:8000",
    ),
    Command(
        "predictor train",
        "vllm_tetri.predictor.train",
        "train a classifier of answer lengths on what was recorded",
        "predictor train answers.jsonl --output predictor",
    ),
    Command(
        "predictor eval",
        "vllm_tetri.predictor.evaluate",
        "compare predictors with trivial guesses on held-out prompts",
        "predictor eval answers.jsonl predictor --output eval",
    ),
    Command(
        "predictor serve",
        "vllm_tetri.predictor.serve",
        "answer an instance's questions about lengths",
        "predictor serve FOLDER --tokenizer MODEL --address ipc:///tmp/predictor",
    ),
    Command(
        "bench suite",
        "vllm_tetri.bench.suite.command",
        "run every experiment of the paper and its rivals, one after the other",
        "bench suite MODEL --quick",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench report",
        "vllm_tetri.bench.report.command",
        "make one page of what a suite has found, beside the paper's numbers",
        "bench report bench-suite",
    ),
    Command(
        "bench paper",
        "vllm_tetri.bench.paper.command",
        "simulate what the paper and its rivals measured",
        "bench paper --quick",
    ),
    Command(
        "bench order",
        "vllm_tetri.bench.order",
        "measure prefill latency under every order of prompts",
        "bench order --lengths sharegpt.csv --scale 0.25",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench interference",
        "vllm_tetri.bench.interference",
        "measure how prompts that come together slow each other down",
        "bench interference --counts 1,7,31",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench budget",
        "vllm_tetri.bench.budget",
        "measure stalls and first tokens under an SLO beside fixed token budgets",
        "bench budget MODEL --slo 0.15",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench handover",
        "vllm_tetri.bench.handover",
        "measure first and second tokens beside a single instance",
        "bench handover MODEL",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench admission",
        "vllm_tetri.bench.admission",
        "measure policies of decode admission with too little KV memory",
        "bench admission MODEL --kv-tokens 8192",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench dispatch",
        "vllm_tetri.bench.dispatch",
        "measure how policies spread requests over decode instances",
        "bench dispatch MODEL --instances 2,4",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench flip",
        "vllm_tetri.bench.flip.command",
        "measure policies that flip roles under a load that swings",
        "bench flip MODEL --systems 2P1D,balance",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench fit",
        "vllm_tetri.bench.fit",
        "measure what an instance's steps cost, for the simulator",
        "bench fit MODEL --cores 2",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench modes",
        "vllm_tetri.bench.modes.command",
        "measure our modes beside stock vLLM and replicas, on the same cores",
        "bench modes MODEL --rival ~/.local/bin/vllm-router",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench router",
        "vllm_tetri.bench.router.command",
        "measure what the router adds to first tokens, and how much it moves",
        "bench router --streams 1,64",
    ),
    Command(
        "bench soak",
        "vllm_tetri.bench.soak.command",
        "break a cluster under load again and again, and see what it keeps",
        "bench soak MODEL --minutes 30",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench overload",
        "vllm_tetri.bench.overload.command",
        "ask a cluster for ten times what it can serve, and see what it keeps",
        "bench overload MODEL --minutes 2",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench decisions",
        "vllm_tetri.bench.decisions",
        "measure what a dispatch and a step of admission cost",
        "bench decisions",
    ),
    Command(
        "bench predictor",
        "vllm_tetri.bench.predictor",
        "measure what a length predictor costs the prompts beside it",
        "bench predictor MODEL PREDICTOR --requests 64",
        "OPTIONS OF vllm serve",
    ),
    Command(
        "bench transfer",
        "vllm_tetri.transport.bench",
        "measure KV transfer beside memcpy and plain sockets",
        "bench transfer",
    ),
    Command(
        "bench saturation",
        "vllm_tetri.bench.saturation",
        "find the chunk that saturates this device, and draw it",
        "bench saturation MODEL --output saturation.svg",
        "OPTIONS OF vllm serve",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for wrong use, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    command = _find(words)
    if command is None:
        return _explain(words)
    rest = words[len(command.name.split()) :]
    try:
        return _run(command, rest)
    except TetriError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def overview(group: str = "") -> str:
    """The text of `vllm-tetri --help`, or of `vllm-tetri GROUP --help`."""
    commands = [command for command in COMMANDS if not group or _group(command) == group]
    width = max(len(command.name) for command in commands)
    lines = [
        f"usage: {PROGRAM} {group or 'COMMAND'} {'COMMAND ' if group else ''}[OPTIONS]",
        "",
        "Disaggregated prefill and decode on stock vLLM.",
        "",
        "commands:",
        *(f"  {command.name:<{width}}  {command.summary}" for command in commands),
        "",
        "examples:",
        *(f"  {PROGRAM} {command.example}" for command in commands),
        "",
        f"{PROGRAM} COMMAND --help explains one command. A single instance is a stock",
        "`vllm serve MODEL --role prefill|decode|both`; see `vllm serve --help=role`.",
    ]
    return "\n".join(lines)


def _find(words: Sequence[str]) -> Command | None:
    for command in COMMANDS:
        name = command.name.split()
        if list(words[: len(name)]) == name:
            return command
    return None


def _group(command: Command) -> str:
    """The first of two words."""
    return command.name.partition(" ")[0] if " " in command.name else ""


def _explain(words: Sequence[str]) -> int:
    """There is no such command, unless the first word begins several."""
    group = words[0] if words[0] in {_group(command) for command in COMMANDS} else ""
    if group and words[1:2] in ([], ["-h"], ["--help"]):
        print(overview(group))
        return 0 if words[1:] else USAGE_ERROR
    asked, where = (" ".join(words[:2]), f"{group} ") if group else (words[0], "")
    return _complain(f"unknown command {asked!r}; {PROGRAM} {where}--help lists them")


def _run(command: Command, words: list[str]) -> int:
    tail: list[str] = []
    if command.tail and "--" in words:
        cut = words.index("--")
        words, tail = words[:cut], words[cut + 1 :]
    module = cast(CommandModule, importlib.import_module(command.module))
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {command.name}",
        description=command.summary[:1].upper() + command.summary[1:] + ".",
        epilog=f"example:\n  {PROGRAM} {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    if command.tail:
        parser.usage = f"{parser.format_usage()[len('usage: ') :].strip()} [-- {command.tail}]"
    options = parser.parse_args(words)
    if command.tail:
        options.tail = tail
    return module.run(options)


def _complain(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
