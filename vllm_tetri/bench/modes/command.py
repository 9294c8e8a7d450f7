"""`vllm-tetri bench modes`: ways to serve on the same cores, by classes of requests.

Stock vLLM with three token budgets, two replicas of it behind a router, a pair of it that
hands KV over by its own means, and a cluster of ours in its modes take turns. First stock
says how much it answers of each class: rates are parts of that. Then, in each repeat,
systems come in random order; one starts, is asked every class at every rate in random
order, and ends. Every cell goes to disk when it is done.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_tetri.bench import fleet, setting
from vllm_tetri.bench.modes import load as modes_load
from vllm_tetri.bench.modes import simulated as modes_simulated
from vllm_tetri.bench.modes.cells import Raw
from vllm_tetri.bench.modes.figures import LOOSE, STRICT, Results, slos
from vllm_tetri.bench.modes.load import CLASSES, RATES, Load
from vllm_tetri.bench.modes.picture import draw
from vllm_tetri.bench.modes.report import markdown, show
from vllm_tetri.bench.modes.run import CELLS, HEAD, Run, blocks, estimate_s
from vllm_tetri.bench.modes.systems import (
    DEFAULT,
    NIXL,
    OWN_OPTIONS,
    REPLICAS,
    SYSTEMS,
    Site,
    missing,
)
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import vllm_version
from vllm_tetri.launch.plan import given_options
from vllm_tetri.sim.cost.profiles import profile

_REPORT = "report.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="folder or name of a model")
    add(
        "--rival",
        metavar="PROGRAM",
        help=f"path of an installed vllm-router; without it there are no systems {REPLICAS} and "
        f"{NIXL}, and {NIXL} also needs the Python package nixl",
    )
    choices = {"systems": (SYSTEMS, "all but whole"), "classes": (CLASSES, "all")}
    for name, (names, default) in {**choices, "rates": (RATES, "all")}.items():
        add(f"--{name}", metavar="NAME,NAME", help=f"of {', '.join(names)} ({default})")
    add("--requests", type=int, default=128, metavar="N", help="per cell (128)")
    add("--repeats", type=int, default=3, metavar="N", help="with other requests each (3)")
    for name, factors in (("loose", LOOSE), ("strict", STRICT)):
        add(
            f"--{name}",
            type=setting.decimals,
            metavar="TTFT,TPOT",
            help=f"{name} SLO in seconds; default: {factors[0]:g} and {factors[1]:g} times what "
            "stock takes for one request at a time",
        )
    add(
        "--add",
        action="store_true",
        help="continue a run under the same conditions in the output folder, or add to it",
    )
    add("--report", type=Path, metavar="FOLDER", help="only report what a folder holds")
    add(
        "--simulate",
        nargs=2,
        metavar=("ALL", "HALF"),
        help="report also how far the simulator is off, with profiles (`bench fit`) of all the "
        "cores and of half of them",
    )
    setting.add_place(parser, "modes", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write report.md and pictures."""
    _check_slos(options)
    console = setting.console()
    if options.report is not None:
        return _report(options, console, options.report, _read(options.report))
    site, systems, loads = _check(options, console)
    raw = _raw(options)
    try:
        _measure(options, site, raw, systems, loads, console)
    except KeyboardInterrupt:
        console.print(f"stopped; --add goes on with {options.output}")
        raise
    return _report(options, console, options.output, raw)


# -- options -----------------------------------------------------------------------


def _check_slos(options: argparse.Namespace) -> None:
    for name in ("loose", "strict"):
        value = getattr(options, name)
        if value is not None and (len(value) != 2 or min(value) <= 0):
            raise ConfigError(f"--{name}: two numbers of seconds above 0, such as 2,0.1")


def _check(options: argparse.Namespace, console: Console) -> tuple[Site, list[str], list[Load]]:
    if options.model is None:
        raise ConfigError("give MODEL to measure, or --report FOLDER")
    if options.rival is not None and shutil.which(options.rival) is None:
        raise ConfigError(f"--rival {options.rival}: no program")
    systems = _systems(options, console)
    classes = _names(options, "classes", CLASSES, CLASSES)
    rates = _names(options, "rates", RATES, RATES)
    loads = modes_load.loads(classes, rates)
    if not loads:
        raise ConfigError(f"--rates: {modes_load.SWING} has only {modes_load.KNEE}")
    for name in OWN_OPTIONS:
        if given_options(options.tail) & {name, f"no-{name}"}:
            raise ConfigError(f"--{name} cannot be given after --; every system has its own")
    setting.check(options, requests=3, cores=2)
    cores = setting.cores(options)
    if len(cores) < 2:
        raise ConfigError("--cores: two systems need two cores, and there is one")
    return Site(options.model, options.tail, cores, options.rival, options.output), systems, loads


def _systems(options: argparse.Namespace, console: Console) -> list[str]:
    """Those that were asked for; else all of the usual ones that can be started here, and a
    line about each of the others."""
    found = []
    for name in _names(options, "systems", SYSTEMS, DEFAULT):
        lack = missing(name, options.rival)
        if lack and options.systems is not None:
            raise ConfigError(f"--systems {name}: {lack}")
        if lack:
            console.print(f"{name}: left out, it {lack}", markup=False, highlight=False)
        else:
            found.append(name)
    return found


def _names(
    options: argparse.Namespace, name: str, known: Iterable[str], default: Iterable[str]
) -> list[str]:
    given = getattr(options, name)
    found = setting.names(given, f"--{name}", list(known)) if given else list(default)
    return [each for each in known if each in found]


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": setting.model_name(options),
        "device": setting.device(),
        "vllm": vllm_version(),
        "cores": len(setting.cores(options)),
        "requests": options.requests,
        "seed": options.seed,
        "options": options.tail,
        "kv_bytes": setting.KV_BYTES,
        "max_num_seqs": setting.MAX_NUM_SEQS,
        "window_tokens": modes_load.WINDOW_TOKENS,
        "rates": RATES,
    }


# -- measuring ---------------------------------------------------------------------


def _measure(
    options: argparse.Namespace,
    site: Site,
    raw: Raw,
    systems: Sequence[str],
    loads: Sequence[Load],
    console: Console,
) -> None:
    left = blocks(systems, loads, options.repeats, options.seed, raw.cells)
    # Drawn once a second: the progress bar runs on the cores that are measured.
    with Progress(console=console, refresh_per_second=1) as progress:
        running = Run(site, raw, progress, count=options.requests, seed=options.seed)
        running.measure_first([name for name, _ in loads])
        running.promise(slos(raw.head["lone"], options.loose, options.strict).strict)
        cells = sum(len(block.loads) for block in left)
        minutes = estimate_s(left, options.requests, raw.head["capacities"]) / 60
        console.print(
            f"{cells} cells, {len(left)} starts: about {minutes // 60:.0f} h {minutes % 60:.0f} min"
            " if all are as fast as stock"
        )
        running.measure(left)


# -- results -----------------------------------------------------------------------


def _raw(options: argparse.Namespace) -> Raw:
    """What there is already with `--add`, else nothing."""
    fresh = {"conditions": _conditions(options), "capacities": {}, "lone": {}, "foreign": 0.0}
    raw = Raw(fleet.kept(options, options.output / HEAD, fresh))
    cells = options.output / CELLS
    if raw.head is fresh:
        cells.unlink(missing_ok=True)
    raw.load(cells)
    return raw


def _read(folder: Path) -> Raw:
    path = folder / HEAD
    try:
        raw = Raw(json.loads(path.read_text()))
        raw.load(folder / CELLS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--report {folder}: {error}") from error
    return raw


def _report(options: argparse.Namespace, console: Console, folder: Path, raw: Raw) -> int:
    if not raw.cells:
        raise ConfigError(f"{folder}: no cell is done")
    results = Results(
        list(raw.cells.values()), slos(raw.head["lone"], options.loose, options.strict)
    )
    text = markdown(raw, results)
    if options.simulate is not None:
        profiles = modes_simulated.Profiles(*(profile(each) for each in options.simulate))
        cells = sorted(raw.cells.values(), key=lambda cell: cell.key)
        text += "\n" + modes_simulated.markdown(modes_simulated.beside(cells, profiles))
    (folder / _REPORT).write_text(text)
    pictures = draw(results, folder)
    show(console, raw, results)
    console.print(f"written: {folder / _REPORT}, {', '.join(pictures)}")
    return 0
