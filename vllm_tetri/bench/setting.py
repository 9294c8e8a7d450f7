"""What the benchmarks of whole engines share: the model, the core, where results go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_tetri.bench.picture import require_pictures
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import require_vllm

# The same for every system: vLLM's executor in the engine's own process, which for
# stock vLLM on a CPU is faster than its default one.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
KV_BYTES = 1 << 30
MAX_NUM_SEQS = 128
_FILE_COLUMNS = 150
SMALL = "a random Llama (4 layers, 128 wide, float32)"

_SMALL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def add_arguments(parser: argparse.ArgumentParser, name: str, *, repeats: int) -> None:
    """Model, chunk, repeats, cores, seed and output folder."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"folder or name; default: {SMALL}"
    )
    parser.add_argument(
        "--chunk", type=int, default=256, metavar="N", help="our tokens per step (256)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help=f"repeats; systems take turns in each, in random order ({repeats})",
    )
    add_place(parser, name, cores=1)


def add_place(parser: argparse.ArgumentParser, name: str, *, cores: int) -> None:
    """Cores, seed and output folder."""
    text = "the last one" if cores == 1 else f"at most {cores}"
    parser.add_argument(
        "--cores", type=int, default=cores, metavar="N", help=f"logical CPUs to use ({text})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(f"bench-{name}"),
        metavar="FOLDER",
        help=f"where {name}.json and {name}.svg go (bench-{name})",
    )


def check(options: argparse.Namespace, **least: float) -> None:
    """Refuse wrong values before anything slow is started, and make the output folder.

    Args:
        least: Smallest value of numbers, by option.

    Raises:
        ConfigError: One line naming the option and its range.
        UnsupportedError: vLLM or matplotlib is not installed.
    """
    at_least(options, {"repeats": 1, "cores": 1, **least})
    require_vllm()
    require_pictures()
    make_output(options)


def at_least(options: argparse.Namespace, least: Mapping[str, float]) -> None:
    """Refuse numbers that are too small, or none.

    Args:
        least: Smallest value, by option.

    Raises:
        ConfigError: One line naming the option and its range.
    """
    for name, smallest in least.items():
        for value in _values(getattr(options, name)):
            if not value >= smallest:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} {value:g}: must be at least {smallest:g}")


def make_output(options: argparse.Namespace) -> None:
    """Make the output folder.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error}") from error


def numbers(text: str) -> list[int]:
    """``1,2,3``, for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of whole numbers such as 1,2,3"
        ) from None


def decimals(text: str) -> list[float]:
    """``1,1.5``, for argparse."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,1.5") from None


def names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """``a,b`` as a list.

    Raises:
        ConfigError: One of them is not known.
    """
    found = text.split(",")
    for name in found:
        if name not in known:
            raise ConfigError(f"{option} {text}: {name!r} is none of {', '.join(known)}")
    return found


def model_name(options: argparse.Namespace) -> str:
    """Of the model, without the folders that lead to it."""
    return SMALL if options.model is None else Path(options.model).name


def cores(options: argparse.Namespace) -> tuple[int, ...]:
    """The last ones of those this process may use: the first one often serves interrupts."""
    return tuple(sorted(os.sched_getaffinity(0)))[-options.cores :]


@dataclass(frozen=True, slots=True)
class Engines:
    """Options of `vllm serve` for the systems that are compared."""

    stock: tuple[str, ...]
    ours: tuple[str, ...]


def engines(options: argparse.Namespace) -> Engines:
    """What all systems have in common, and what makes one ours."""
    model, *loading = _model(options)
    stock = [*serve_options(model, MAX_NUM_SEQS), *loading, *options.tail]
    ours = ["--role", "prefill", "--tetri-chunk-size", str(options.chunk)]
    return Engines(tuple(stock), (*stock, *ours, "--tetri-arena-bytes", "16M"))


def serve_options(model: str, max_num_seqs: int) -> list[str]:
    """What every system gets alike."""
    words = [model, "--enforce-eager", "--distributed-executor-backend", UNIPROC]
    words += ["--max-num-seqs", str(max_num_seqs)]
    return [*words, "--kv-cache-memory-bytes", str(KV_BYTES)]


def device() -> str:
    """The CPU's model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def console() -> Console:
    """Wide enough for the tables where it is not a terminal, but a file."""
    found = Console()
    return found if found.is_terminal else Console(width=_FILE_COLUMNS)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One key per line at the top, the rest compact: readable, and not too long. What was there
    stays whole until all is written."""
    lines = [f"{json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in content.items()]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def _model(options: argparse.Namespace) -> Sequence[str]:
    if options.model is not None:
        return (options.model, "--skip-tokenizer-init")
    folder = options.output / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SMALL_CONFIG))
    dummy = ("--load-format", "dummy", "--dtype", "float32")
    return (str(folder.resolve()), "--skip-tokenizer-init", *dummy)


def _values(value: Any) -> Sequence[float]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _rounded(value: Any) -> Any:
    """Times to a microsecond."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value
