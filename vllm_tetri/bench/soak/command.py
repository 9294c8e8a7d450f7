"""`vllm-tetri bench soak`: a cluster under load that is broken again and again.

`vllm-tetri up` runs several prefill and decode instances and several routers. First each of
a few dozen greedy requests is answered alone, so that its answer is known. Then clients ask
for them without an end, streamed and not, some leave in the middle; and every few seconds a
fault of a seeded sequence hits an instance or a router, never the last one of its kind, an
engine behind its API server, or a predictor. Every few faults clients pause, and everything
has to be back and at rest. The end is a table of promises, and status 1 if one was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_tetri.bench import setting
from vllm_tetri.bench.promise import BROKEN
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.faults import PREDICTOR, ROUTER, Kind
from vllm_tetri.bench.soak.report import plain, show
from vllm_tetri.bench.soak.run import Plan, soak
from vllm_tetri.bench.soak.tally import End
from vllm_tetri.bench.soak.watch import Seen
from vllm_tetri.errors import INTERRUPTED, ConfigError
from vllm_tetri.launch.machine import require_vllm, vllm_version
from vllm_tetri.types import Mode

_LEAST = {
    "minutes": 0.1, "fault_every": 1, "rest_every": 1, "stop": 0.1, "clients": 1,
    "prefill": 1, "decode": 1, "routers": 1,
}  # fmt: skip
_REFRESH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a model with a chat template")
    add("--minutes", type=float, default=30.0, metavar="N", help="under faults (30)")
    add(
        "--fault-every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="between two faults, where somebody can be spared (10)",
    )
    add(
        "--faults",
        metavar="NAME,NAME",
        help=f"of {', '.join(Kind)} (all; those of predictors with --predictor only)",
    )
    add(
        "--rest-every",
        type=int,
        default=9,
        metavar="N",
        help="faults between two rests, at which clients pause until everything is back and "
        "nothing is left of any request; such time is none under faults (9)",
    )
    add("--stop", type=float, default=3.0, metavar="SECONDS", help="how long stopped ones stay (3)")
    add("--clients", type=int, default=8, metavar="N", help="requests at a time (8)")
    add("--prefill", type=int, default=2, metavar="N", help="prefill instances (2)")
    add("--decode", type=int, default=2, metavar="N", help="decode instances (2)")
    add("--routers", type=int, default=2, metavar="N", help="routers, asked in turn (2)")
    add(
        "--predictor",
        metavar="FOLDER",
        help="length predictor beside every prefill instance, as for up: what predictor train "
        "wrote, or oracle, which is no process (none)",
    )
    add(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.SPLIT.value,
        help="how the router serves requests (split)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of requests and faults (0)")
    add("--json", action="store_true", help="print the numbers as JSON instead of tables")
    add(
        "--output",
        type=Path,
        default=Path("bench-soak"),
        metavar="FOLDER",
        help="where soak.json and the logs of all processes go (bench-soak)",
    )


def run(options: argparse.Namespace) -> int:
    """Soak, print and write soak.json; 1 if a promise was broken, 130 when interrupted."""
    plan = _plan(options)
    console = Console(stderr=True) if options.json else setting.console()
    seen = Seen()
    try:
        with _Bar(console, plan, seen) as bar:
            cluster = Cluster(options.model, _words(options), options.output)
            asyncio.run(soak(cluster, plan, seen, bar.tell, options.output))
    except KeyboardInterrupt:
        console.print("stopped; the cluster has ended")
        return INTERRUPTED
    found = plain(seen, _conditions(options, plan))
    setting.write_json(options.output / "soak.json", found)
    if options.json:
        print(json.dumps(found))
    is_kept = show(Console(quiet=True) if options.json else console, seen)
    return 0 if is_kept else BROKEN


def _plan(options: argparse.Namespace) -> Plan:
    setting.at_least(options, _LEAST)
    kinds = _kinds(options)
    require_vllm()
    setting.make_output(options)
    return Plan(
        seconds=60 * options.minutes,
        every_s=options.fault_every,
        rest_every=options.rest_every,
        stop_s=options.stop,
        clients=options.clients,
        kinds=kinds,
        seed=options.seed,
    )


def _kinds(options: argparse.Namespace) -> list[Kind]:
    has_predictors = options.predictor not in (None, "none", "oracle")
    of_predictors = [kind for kind in Kind if kind.role == PREDICTOR]
    if options.faults is None:
        kinds = [kind for kind in Kind if has_predictors or kind not in of_predictors]
    else:
        kinds = [Kind(name) for name in setting.names(options.faults, "--faults", list(Kind))]
    hit = [kind for kind in kinds if kind in of_predictors]
    if hit and not has_predictors:
        raise ConfigError(
            f"--faults {hit[0]}: there is no predictor process; give --predictor FOLDER"
        )
    for role, option in (("prefill", "prefill"), ("decode", "decode"), (ROUTER, "routers")):
        hit = [kind for kind in kinds if kind.role == role]
        if hit and getattr(options, option) < 2:
            raise ConfigError(
                f"--{option} 1: {hit[0]} needs another {role} that stays; give --{option} 2, or "
                "choose other --faults"
            )
    if Kind.KILL_ENGINE in kinds and options.prefill < 2 and options.decode < 2:
        raise ConfigError(
            f"--prefill 1 --decode 1: {Kind.KILL_ENGINE} needs another instance that stays; give "
            "--decode 2, or choose other --faults"
        )
    return kinds


def _words(options: argparse.Namespace) -> list[str]:
    """Options of `up`: roles stay, so that a victim's name says what it is."""
    words = ["--mode", options.mode, "--flip", "off"]
    words += ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    words += ["--routers", str(options.routers)]
    if options.predictor is not None:
        words += ["--predictor", options.predictor]
    return [*words, "--", *options.tail]


def _conditions(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    names = ["minutes", "fault_every", "rest_every", "stop", "clients", "prefill", "decode"]
    names += ["routers", "predictor", "mode", "seed"]
    return {
        "model": setting.model_name(options),
        "device": setting.device(),
        "vllm": vllm_version(),
        **{name: getattr(options, name) for name in names},
        "faults": [kind.value for kind in plan.kinds],
        "options": options.tail,
    }


class _Bar:
    """What happens, on a terminal; elsewhere every fault is a line."""

    def __init__(self, console: Console, plan: Plan, seen: Seen) -> None:
        self._console = console
        self._seen = seen
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            refresh_per_second=1 / _REFRESH_S,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)
        self._plan = plan

    def tell(self, text: str) -> None:
        """What happens now."""
        if not self._console.is_terminal:
            if not text.startswith("answers before"):
                self._console.print(text, markup=False)
            return
        good, bad = self._seen.count(End.GOOD), len(self._seen.faults)
        self._progress.update(
            self._task,
            description=f"{text} ({good} answers, {bad} faults)",
            total=self._plan.faults,
            completed=bad,
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
