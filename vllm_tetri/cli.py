"""The `vllm-tetri` command.

A command is a module with ``add_arguments(parser)`` and ``run(options) -> int``; where a module has
several, these are ``add_NAME_arguments`` and ``run_NAME``. Only the module of the command that is
run gets imported; `completion` imports all of them.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from vllm_tetri import __version__
from vllm_tetri.errors import INTERRUPTED, ConfigError, TetriError

PROGRAM = "vllm-tetri"
USAGE_ERROR = 2
_SERVE_OPTIONS = "OPTIONS OF vllm serve"


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str  # one word or two
    group: str  # its heading in `vllm-tetri --help`; empty: not listed there
    module: str  # or ``module:NAME``
    summary: str
    example: str
    tail: str = ""  # what may follow a bare `--`


COMMANDS = (
    Command("up", "Run", "vllm_tetri.launch.up", "run a cluster on this machine",
            "up MODEL --prefill 1 --decode 1 -- --max-model-len 4096", _SERVE_OPTIONS),
    Command("router", "Run", "vllm_tetri.router.command", "run the OpenAI-compatible HTTP server",
            "router --port 8000"),
    Command("picker", "Run", "vllm_tetri.picker.command",
            "choose endpoints for an Envoy gateway (Gateway API inference extension)",
            "picker --port 9002"),
    Command("status", "Look", "vllm_tetri.admin:status", "show the instances of a router",
            "status --url http://127.0.0.1:8000"),
    Command("explain", "Look", "vllm_tetri.admin:explain",
            "say where the time of a request went", "explain cmpl-5f3a2c"),
    Command("top", "Look", "vllm_tetri.top", "watch requests and instances of a router", "top"),
    Command("doctor", "Look", "vllm_tetri.launch.doctor",
            "explain what this machine can run, and how it serves a model",
            "doctor MODEL -- --kv-cache-dtype fp8", _SERVE_OPTIONS),
    Command("flip", "Change", "vllm_tetri.admin:flip",
            "change the role of a running instance", "flip decode-1 prefill"),
    Command("drain", "Change", "vllm_tetri.admin:drain",
            "let an instance finish its requests and leave the cluster",
            "drain decode-1 --deadline 60"),
    Command("mode", "Change", "vllm_tetri.admin:mode",
            "serve requests split, aggregated, or as suits each", "mode adaptive"),
    Command("bench", "Measure", "vllm_tetri.bench",
            "measure this package and a stock server under the same load",
            "bench MODEL --num-prompts 64 --request-rate 1 -- --max-model-len 4096",
            _SERVE_OPTIONS),
    Command("sim", "Measure", "vllm_tetri.sim.command", "simulate a cluster of any size",
            "sim --mode split whole --prefill 1 --decode 1 --kind mixed --rate 1"),
    Command("regret", "Measure", "vllm_tetri.regret",
            "say what the last requests of a router would have cost otherwise", "regret"),
    Command("secret", "Set up", "vllm_tetri.cli:secret",
            "make the secret that the processes of a cluster share", "secret cluster.secret"),
    Command("completion", "Set up", "vllm_tetri.cli:completion",
            "print a script that completes commands and options",
            "completion bash > ~/.local/share/bash-completion/completions/vllm-tetri"),
    Command("sim plan", "", "vllm_tetri.sim.plan.command",
            "find how many prefill and decode instances serve most, or that one kind is better",
            "sim plan --model llama-3-8b --gpu h100 --gpus 8 --ttft-slo 0.4 --tpot-slo 0.03"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for wrong use, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    try:
        command = _find(words)
        return _run(command, words[len(command.name.split()) :])
    except (TetriError, OSError) as error:
        print(f"{PROGRAM}: {str(error) or type(error).__name__}", file=sys.stderr)
        return error.exit_status if isinstance(error, TetriError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def overview() -> str:
    """The text of `vllm-tetri --help`."""
    lines = [f"usage: {PROGRAM} COMMAND [OPTIONS]", "", "Disaggregated prefill and decode on vLLM."]
    for group in dict.fromkeys(command.group for command in COMMANDS if command.group):
        members = [command for command in COMMANDS if command.group == group]
        lines += ["", f"{group}:", *(f"  {each.name:<11} {each.summary}" for each in members)]
    return "\n".join([
        *lines,
        "",
        f"`{PROGRAM} COMMAND --help` explains one command. An instance is a `vllm serve MODEL",
        "--role prefill|decode|both`, which `vllm serve --help=role` explains.",
    ])  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Suggests an option where an unknown one was given."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        if unknown.startswith("-"):
            close = get_close_matches(unknown.partition("=")[0], self._option_string_actions, n=1)
            message += f"; did you mean {close[0]}?" if close else f"; see {self.prog} --help"
            if "[-- " in (self.usage or ""):
                message += "; options of `vllm serve` follow a bare --"
        super().error(message)


def add_secret_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `secret`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="new file for the secret")


def run_secret(options: argparse.Namespace) -> int:
    """Write a new secret, and say what to do with it."""
    from vllm_tetri.security import VARIABLE, write_secret

    write_secret(options.file)
    print(
        f"{options.file} holds a new secret that only you may read. Give it to every process "
        f"of the cluster:\n"
        f"  vllm serve MODEL --role ... --tetri-secret-file {options.file}\n"
        f"  {PROGRAM} router --secret-file {options.file}\n"
        f"or set {VARIABLE}={options.file} for all of them. Copy it to other hosts over an "
        "encrypted connection."
    )
    return 0


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `completion`."""
    parser.add_argument("shell", choices=["bash", "zsh"], help="shell that runs the script")


def run_completion(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    root = argparse.ArgumentParser(prog=PROGRAM)
    commands = root.add_subparsers()
    for command in COMMANDS:
        if command.group:
            _declare(command, commands.add_parser(command.name, help=command.summary))
    print(shtab.complete(root, shell=options.shell))
    return 0


def parser_of(command: Command) -> tuple[argparse.ArgumentParser, Callable[..., int]]:
    """Return the parser of a command, and what runs it."""
    more = [each for each in COMMANDS if each.name.startswith(f"{command.name} ")]
    parser = _Parser(
        prog=f"{PROGRAM} {command.name}",
        description=command.summary[:1].upper() + command.summary[1:] + ".",
        epilog="\n".join([
            f"example:\n  {PROGRAM} {command.example}",
            *(f"\nsee also:\n  {PROGRAM} {each.name}  {each.summary}" for each in more),
        ]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    run = _declare(command, parser)
    if command.tail:
        parser.usage = f"{parser.format_usage()[len('usage: ') :].strip()} [-- {command.tail}]"
    return parser, run


def _declare(command: Command, parser: argparse.ArgumentParser) -> Callable[..., int]:
    """Add the options of a command, and return what runs it."""
    path, _, name = command.module.partition(":")
    module = importlib.import_module(path)
    getattr(module, f"add_{name}_arguments" if name else "add_arguments")(parser)
    run: Callable[..., int] = getattr(module, f"run_{name}" if name else "run")
    return run


def _find(words: Sequence[str]) -> Command:
    """The command with the longest name that the words begin with, or ConfigError."""
    by_name = {command.name: command for command in COMMANDS}
    found = by_name.get(" ".join(words[:2])) or by_name.get(words[0])
    if found is not None:
        return found
    listed = [command.name for command in COMMANDS if command.group]
    close = get_close_matches(words[0], listed, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}?" if close else f"{PROGRAM} --help lists them"
    raise ConfigError(f"unknown command {words[0]!r}; {hint}")


def _run(command: Command, words: list[str]) -> int:
    tail: list[str] = []
    if command.tail and "--" in words:
        cut = words.index("--")
        words, tail = words[:cut], words[cut + 1 :]
    parser, run = parser_of(command)
    # Like vLLM, `--max_in_flight` is `--max-in-flight`.
    words = [
        re.sub(r"^--[\w-]+(?==|$)", lambda name: name[0].replace("_", "-"), word) for word in words
    ]
    return run(parser.parse_args(words, argparse.Namespace(tail=tail)))


if __name__ == "__main__":
    sys.exit(main())
