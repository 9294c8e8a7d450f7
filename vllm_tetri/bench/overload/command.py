"""`vllm-tetri bench overload`: ten times what a cluster can serve, for two minutes.

`vllm-tetri up` runs prefill and decode instances. Some clients that ask without a pause find
how many requests a second they serve; half of that is normal service. Then ten times as many
arrive, and at once after that half again. The end is a table of promises, and status 1 if
one was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_tetri.bench import setting
from vllm_tetri.bench.overload.report import plain, show
from vllm_tetri.bench.overload.run import Plan, Seen, overload
from vllm_tetri.bench.overload.talker import Talker
from vllm_tetri.bench.promise import BROKEN
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.errors import INTERRUPTED, ConfigError
from vllm_tetri.launch.machine import require_vllm, vllm_version
from vllm_tetri.types import Mode

_REFRESH_S = 1.0
_LEAST = {
    "times": 1, "minutes": 0.1, "clients": 1, "prompt": 1, "answer": 2, "prefill": 1, "decode": 1,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a model")
    add("--times", type=float, default=10.0, metavar="N", help="what can be served (10)")
    add("--minutes", type=float, default=2.0, metavar="N", help="of overload (2)")
    add(
        "--clients",
        type=int,
        default=32,
        metavar="N",
        help="that ask without a pause, to find what can be served (32)",
    )
    add("--prompt", type=int, default=200, metavar="TOKENS", help="of a request (200)")
    add("--answer", type=int, default=64, metavar="TOKENS", help="of a request, at least 2 (64)")
    add("--prefill", type=int, default=1, metavar="N", help="prefill instances (1)")
    add("--decode", type=int, default=1, metavar="N", help="decode instances (1)")
    add(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.SPLIT.value,
        help="how the router serves requests (split)",
    )
    add("--max-in-flight", type=int, metavar="N", help="of the router, per instance (its own)")
    add(
        "--ttft-slo",
        type=float,
        metavar="SECONDS",
        help="have the router refuse what is expected to miss this time to the first token "
        "(--refuse-late)",
    )
    add(
        "--keys",
        action="store_true",
        help="two clients with a key each: beside the greedy one another that asks for a fifth "
        "of what can be served",
    )
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (0)")
    add("--json", action="store_true", help="print the numbers as JSON instead of tables")
    add(
        "--output",
        type=Path,
        default=Path("bench-overload"),
        metavar="FOLDER",
        help="where overload.json and the logs of all processes go (bench-overload)",
    )


def run(options: argparse.Namespace) -> int:
    """Overload, print and write overload.json; 1 if a promise was broken, 130 when
    interrupted."""
    plan = _plan(options)
    console = Console(stderr=True) if options.json else setting.console()
    seen = Seen()
    keys = _write_keys(options.output, plan.keys)
    words = _words(options, keys)
    try:
        with _Line(console) as line:
            talker = Talker(options.output / "client.log")
            try:
                cluster = Cluster(options.model, words, options.output)
            except BaseException:
                talker.close()
                raise
            asyncio.run(overload(cluster, talker, plan, seen, line.tell))
    except KeyboardInterrupt:
        console.print("stopped; the cluster has ended")
        return INTERRUPTED
    finally:
        if keys is not None:
            keys.unlink(missing_ok=True)
    found = plain(plan, seen, _conditions(options))
    setting.write_json(options.output / "overload.json", found)
    if options.json:
        print(json.dumps(found))
    is_kept = show(Console(quiet=True) if options.json else console, plan, seen)
    return 0 if is_kept else BROKEN


def _plan(options: argparse.Namespace) -> Plan:
    setting.at_least(options, _LEAST)
    for name in ("max_in_flight", "ttft_slo"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    require_vllm()
    setting.make_output(options)
    return Plan(
        times=options.times,
        seconds=60 * options.minutes,
        clients=options.clients,
        prompt_tokens=options.prompt,
        answer_tokens=options.answer,
        keys=[secrets.token_hex(32) for _ in range(2)] if options.keys else [],
        seed=options.seed,
    )


def _words(options: argparse.Namespace, keys: Path | None) -> list[str]:
    """Options of `up`: roles stay, since a flip would change what can be served."""
    words = ["--mode", options.mode, "--flip", "off"]
    words += ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    if options.max_in_flight is not None:
        words += ["--max-in-flight", str(options.max_in_flight)]
    if options.ttft_slo is not None:
        words += ["--ttft-slo", str(options.ttft_slo), "--refuse-late"]
    if keys is not None:
        words += ["--api-key-file", str(keys)]
    return [*words, "--", *options.tail]


def _write_keys(folder: Path, keys: Sequence[str]) -> Path | None:
    """A new file, which nobody else may read."""
    if not keys:
        return None
    file, path = tempfile.mkstemp(prefix="keys-", dir=folder)
    with os.fdopen(file, "w") as written:
        written.write("".join(f"{key}\n" for key in keys))
    return Path(path)


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    names = ("times", "minutes", "clients", "prompt", "answer", "prefill", "decode", "mode")
    more = ("max_in_flight", "ttft_slo", "keys", "seed")
    return {
        "model": setting.model_name(options),
        "device": setting.device(),
        "cores": len(os.sched_getaffinity(0)),
        "vllm": vllm_version(),
        **{name: getattr(options, name) for name in (*names, *more)},
        "options": options.tail,
    }


class _Line:
    """What happens, on a terminal; elsewhere a line for every new thing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._newest = ""
        self._progress = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=1 / _REFRESH_S,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def tell(self, text: str) -> None:
        """What happens now."""
        self._progress.update(self._task, description=text)
        kind = text.partition(";")[0]
        if not self._console.is_terminal and kind != self._newest:
            self._newest = kind
            self._console.print(kind, markup=False)

    def __enter__(self) -> _Line:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
