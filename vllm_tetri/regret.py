"""`vllm-tetri regret`: what the last requests of a router would have cost served otherwise.

The requests that a router remembers are simulated as they arrived, on its instances with the step
costs that these have learnt, in every mode and with other chunk sizes. A way of serving costs the
geometric mean of its mean TTFT and its mean JCT; regret is the part by which the router's own way,
simulated, costs more than the best. How far that simulation is from what was measured says how
much to believe of it. With `--every` the router is told, for its metrics, and with `--set-mode` it
is ordered to serve in the mode that costs least, as long as that proves itself.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vllm_tetri.admin import AdminError, Row, add_url, call
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.command import add_options, empty_table, show
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, InstanceConfig
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.workload import RequestSpec, above_0
from vllm_tetri.types import InstanceId, Mode, Prediction, Role, StepCoefficients

_LEAST_REQUESTS = 20
_CHUNKS = 256, 512, 1024  # that are compared, in tokens
_TIMES = ("ttft_mean_s", "ttft_p99_s", "jct_mean_s", "jct_p99_s")
_MOST_ERROR = 0.25  # of a simulation that is believed
_LEAST_REGRET = 0.05  # for which a mode is changed
_MOST_WORSE = 0.1  # of what is measured after a change
_JUDGED_REQUESTS = 100  # after a change: the mean of fewer is chance
_BARRED_LOOKS = 12  # in which a mode that was worse is not tried again

Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `regret`."""
    parser.add_argument("--requests", type=int, metavar="N", help="only the N that ended last")
    parser.add_argument(
        "--every", type=float, metavar="S",
        help="look again every S seconds until this is ended, and tell the router for its metrics",
    )  # fmt: skip
    parser.add_argument(
        "--set-mode", action="store_true",
        help="with --every: let the router serve in another mode if two looks in a row say that "
        "this costs at least 5 %% less, and in the one before if it proves worse",
    )  # fmt: skip
    add_options(parser, "results", json=None)
    add_url(parser)


def run(options: argparse.Namespace) -> int:
    """Print what the last requests cost, and what they would have cost otherwise."""
    above_0(requests=options.requests, every=options.every)
    if options.set_mode and options.every is None:
        raise ConfigError("--set-mode needs --every: a mode has to prove itself")
    if options.set_mode and (options.requests or _JUDGED_REQUESTS) < _JUDGED_REQUESTS:
        raise ConfigError(f"--set-mode needs --requests {_JUDGED_REQUESTS} or more, or none")
    if options.every is not None:
        _Watch(options).run()
    shown = compare(call(options.url, "/tetri/v1/history"), options.requests or 0)
    table = empty_table(
        ("", "TTFT\nmean", "TTFT\np99", "JCT\nmean", "JCT\np99", "split", "regret"),
        title=f"{shown['num_requests']} requests that ended at {options.url}",
        caption="times in ms; all but the first row are simulated",
    )
    for row in shown["systems"]:
        times = [f"{row[name] * 1e3:.0f}" for name in _TIMES]
        regret = f"{row['regret']:+.1%}" if "regret" in row else ""
        table.add_row(row["system"], *times, f"{row['split']:.0%}", regret)
    show(options.json, shown, table, verdict(shown))
    return 0


class _Watch:
    """Looks again and again at what a router served since its mode was changed last."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._tuner = options, Tuner()

    def run(self) -> NoReturn:
        """Look until this is ended; raises `AdminError` if there is no router at first."""
        os.nice(10)  # simulations leave the cores to what serves
        options = self._options
        call(options.url, "/tetri/v1/history")
        while True:
            try:
                found, words = self._look()
                if options.json != "-":
                    print(words, flush=True)
                show(options.json, found)
            except ConfigError as error:  # too little is known yet, or the disk is full
                print(f"{error}", flush=True)
            except AdminError as error:  # it may restart, in another mode
                self._tuner = Tuner()
                print(f"{error}", flush=True)
            time.sleep(options.every)

    def _look(self) -> tuple[dict[str, Any], str]:
        """Return what was found, told to the router and done, and that in words."""
        options, url = self._options, self._options.url
        found = compare(call(url, "/tetri/v1/history"), options.requests or 0)
        call(url, "/tetri/v1/regret", {"regret": found["regret"], "error": _error(found)})
        words = verdict(found).replace("\n", "; ")
        if options.set_mode and (change := self._tuner.decide(found)) is not None:
            call(url, "/tetri/v1/mode", {"mode": change.mode})
            words += f"\nmode {found['mode']} -> {change.mode}: {change.reason}"
        return found, words


class ModeChange(NamedTuple):
    """An order to serve in another mode, and why."""

    mode: str
    reason: str


class Tuner:
    """Decides when a router serves in another mode, look by look. Pure.

    A simulation that is far from what was measured changes nothing. What is measured after a
    change must not be worse than what the mode before would have cost with the same requests:
    simulated, times what it had cost beyond its simulation. Else that mode returns.
    """

    def __init__(self) -> None:
        self._candidate = ""  # the best mode of the last look
        # The mode before the last change, and its measured cost by the simulated one.
        self._before: tuple[str, float] | None = None
        self._barred: dict[str, int] = {}  # for how many looks

    def decide(self, found: dict[str, Any]) -> ModeChange | None:
        """Return the mode to serve in from now on, if it is another one, for what `compare` says
        of the requests that were served in the present one."""
        mode, measured = found["mode"], cost(found["systems"][0])
        self._barred = {name: left - 1 for name, left in self._barred.items() if left > 1}
        usual = {row["mode"]: cost(row) for row in found["systems"][1:] if row["is_usual"]}
        if self._before is not None and self._before[0] in usual:
            own = found["systems"][0]
            if found["num_requests"] < _JUDGED_REQUESTS or found["mode_s"] < 2 * own["jct_p99_s"]:
                return None  # what ended so far are the short ones
            (before, ratio), self._before = self._before, None
            worse = measured / (usual[before] * ratio) - 1
            if worse > _MOST_WORSE:
                self._barred[mode], self._candidate = _BARRED_LOOKS, ""
                return ModeChange(before, f"{mode} cost {worse:.0%} more when measured")
        if mode not in usual or _error(found) > _MOST_ERROR:
            self._candidate = ""
            return None
        able = {name: each for name, each in usual.items() if name not in self._barred}
        best = min(able, key=able.__getitem__, default=mode)
        saved = 1 - usual[best] / usual[mode]
        is_worth = usual[mode] / usual[best] - 1 >= _LEAST_REGRET
        last, self._candidate = self._candidate, best if is_worth else ""
        if not is_worth or last != best:
            return None
        self._before = mode, measured / usual[mode]
        return ModeChange(best, f"simulated, it costs {saved:.0%} less")


def compare(history: Row, most: int = 0) -> dict[str, Any]:
    """Simulate what `GET /tetri/v1/history` returned, or the newest ones of it, `most` at most;
    raises ConfigError if that is too little."""
    # Models share neither instances nor a queue: that with the most requests.
    models = Counter(each["model"] for each in history["requests"])
    model = max(models, key=models.__getitem__, default="")
    requests = [each for each in history["requests"] if each["model"] == model][-most:]
    if len(requests) < _LEAST_REQUESTS:
        raise ConfigError(
            f"{len(requests)} requests ended well there of which the router knows all lengths; "
            f"{_LEAST_REQUESTS} are needed"
        )
    first_s = min(each["arrival_s"] for each in requests)
    specs = [
        RequestSpec(
            number,
            each["arrival_s"] - first_s,
            max(1, each["prompt_tokens"] - each["cached_tokens"]),
            max(1, each["output_tokens"]),
            Prediction((float(each["predicted"]),)) if each["predicted"] else None,
        )
        for number, each in enumerate(requests)
    ]
    front_s = float(np.median([each["front_s"] for each in requests]))
    usual = _cluster([each for each in history["instances"] if each["model"] == model], front_s)
    own = {"system": f"measured, {history['mode']}", **_measured(requests)}
    modes = list(Mode) if len(usual.instances) > 1 else [Mode.WHOLE]
    rows: list[dict[str, Any]] = []
    for mode in sorted(modes, key=lambda mode: mode != history["mode"]):
        for words, config in _ways(usual).items():
            outcome = simulate(replace(config, mode=mode.value), specs)
            found = figures(outcome.served, NO_OBJECTIVE, outcome.refused)
            kept = {name: found[name] for name in (*_TIMES, "split")}
            names = {"system": f"{mode.value}{words}", "mode": mode.value, "is_usual": not words}
            rows.append({**names, **kept})
    least = min(map(cost, rows))
    for row in rows:
        row["regret"] = cost(row) / least - 1
    errors = {name: rows[0][name] / own[name] - 1 for name in ("ttft_mean_s", "jct_mean_s")}
    return {
        "systems": [own, *rows],
        "mode": history["mode"],
        "num_requests": len(specs),
        "mode_s": history["mode_s"],
        "regret": rows[0]["regret"],
        "errors": errors,
    }


def verdict(found: dict[str, Any]) -> str:
    """Return the regret in words, and how far the simulation is from what was measured."""
    rows, errors = found["systems"][1:], found["errors"]
    best = min(rows, key=lambda row: row["regret"])
    words = f"regret: {found['regret']:.1%}"
    words += "; no other way would have cost less" if best is rows[0] else (
        f"; {best['system']} would have cost least"
    )  # fmt: skip
    words += (
        f"\nsimulated, {rows[0]['system']} is {errors['ttft_mean_s']:+.0%} from its measured mean "
        f"TTFT and {errors['jct_mean_s']:+.0%} from its mean JCT"
    )
    if _error(found) > _MOST_ERROR:
        words += ": too far for the regret to be believed"
    return words


def _error(found: dict[str, Any]) -> float:
    errors: Figures = found["errors"]
    return max(map(abs, errors.values()))


def cost(row: Figures) -> float:
    """Return what a way of serving costs."""
    return sqrt(row["ttft_mean_s"] * row["jct_mean_s"])


def _measured(requests: Sequence[Row]) -> Figures:
    ttft, jct = (np.array([each[name] for each in requests]) for name in ("ttft_s", "jct_s"))
    return {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "jct_mean_s": float(jct.mean()),
        "jct_p99_s": float(np.quantile(jct, 0.99)),
        "split": sum(each["route"] == "split" for each in requests) / len(requests),
    }


def _cluster(rows: Sequence[Row], front_s: float) -> ClusterConfig:
    """Return instances as they are now; raises ConfigError if none has learnt its step costs. One
    that has served nothing yet has those of another one."""
    instances = []
    known = [row["load"]["cost"] for row in rows if row["load"]["cost"]["confidence"]]
    if not known:
        raise ConfigError("no instance knows its step costs yet; serve requests first")
    for row in rows:
        load, (most_tokens, max_requests, tile_tokens) = row["load"], row["step_limits"]
        if min(row["step_limits"]) < 1:
            raise ConfigError(f"{row['id']} tells impossible step limits: {row['step_limits']}")
        step = StepCoefficients(**(load["cost"] if load["cost"]["confidence"] else known[0]))
        engine = EngineConfig(
            step, load["blocks_total"], row["block_size"], chunk_tokens=load["chunk_tokens"],
            has_sized_chunks=row["sizes_chunks"], front_s=front_s, most_tokens=most_tokens,
            max_requests=max_requests, tile_tokens=tile_tokens, arena_tokens=row["arena_tokens"],
        )  # fmt: skip
        instances.append(InstanceConfig(InstanceId(row["id"]), Role(row["role"]), engine))
    # Others report what is assumed before the first one.
    sent = [row["load"] for row in rows if row["load"]["kv_bytes_sent"]]
    usual = ClusterConfig(tuple(instances))
    if not sent:
        return usual
    base_s, token_s = (
        float(np.median([load[name] for load in sent]))
        for name in ("handover_s", "handover_token_s")
    )
    return replace(usual, handover_base_s=base_s, handover_token_s=token_s)


def _ways(usual: ClusterConfig) -> dict[str, ClusterConfig]:
    """Return the cluster as it is, and with other chunks in all instances."""
    ways = {"": usual}
    changes: dict[str, dict[str, Any]]
    changes = {f", chunks of {tokens}": {"chunk_tokens": tokens} for tokens in _CHUNKS}
    changes[", chunks by cost"] = {"has_sized_chunks": True}
    for words, change in changes.items():
        engines = [
            replace(each.engine, **{"has_sized_chunks": False, **change})
            for each in usual.instances
        ]
        if engines != [each.engine for each in usual.instances]:
            places = zip(usual.instances, engines, strict=True)
            instances = tuple(replace(place, engine=engine) for place, engine in places)
            ways[words] = replace(usual, instances=instances)
    return ways
