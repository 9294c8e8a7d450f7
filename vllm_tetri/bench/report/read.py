"""Results of the suite's commands, read into values. One function per job, by its name.

A reader gets the folder of its job and what the file there holds, and may stumble over
anything in it: whoever calls it says so in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_tetri.bench import dispatch_report, handover_report, predictor_report
from vllm_tetri.bench.report.modes import modes
from vllm_tetri.bench.report.values import METRICS, STOCK_CHUNK, Source, Value, value
from vllm_tetri.policy.cost import CurvePoint, StepCost

Raw = Mapping[str, Any]
Reader = Callable[[Path, Raw], list[Value | None]]

QUEUE, ALL_AT_ONCE = "full queue", "all at once"
ALONE = "alone"
# Figures 4 and 5: a light decode has read 18 tokens and written half of 60, a heavy one
# half of 512; a heavy prompt has 512 (section 2.2).
_LIGHT_CONTEXT, _HEAVY_CONTEXT, _HEAVY_PROMPT = 48, 274, 512
LIGHT_DECODE, WITH_PROMPT = "1 light decode", "1 light decode, 1 heavy prompt"
PROMPT, WITH_DECODES = "1 heavy prompt", "1 heavy prompt, 64 light decodes"
ALL_LIGHT, HALF_HEAVY = "128 light decodes", "64 light and 64 heavy decodes"
STEP, DEVICE = "a step", "device"
ONE_FLIP = "flips one after the other"
SHM, TCP = "shared memory", "TCP"


def _order(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for part, group in (("queue", QUEUE), ("arrivals", "one by one")):
        for name, turns in raw.get(part, {}).get("systems", {}).items():
            system = _stock_name(name, list(raw[part]["systems"]))
            ttft_s = [fmean(turn["ttft_s"]) for turn in turns]
            waiting_s = [fmean(turn["waiting_s"]) for turn in turns]
            total_s = [turn["total_s"] for turn in turns]
            # What is not waiting: a prompt's own steps, and others in them.
            prefill_s = [ttft - waiting for ttft, waiting in zip(ttft_s, waiting_s, strict=True)]
            found += [
                value("e2", group, system, "prefill_s", prefill_s),
                value("e2", group, system, "ttft_mean_s", ttft_s),
                value("e2", group, system, "waiting_s", waiting_s),
                value("e2", group, system, "total_s", total_s),
            ]
    for name, steps in raw.get("overhead", {}).items():
        # The only stock there has our chunk as its budget.
        system = STOCK_CHUNK if name.startswith("stock") else name
        schedule_s = [fmean(steps["schedule_s"])]
        found.append(value("e2", "1,000 prompts waiting", system, "schedule_s", schedule_s))
    return found


def _stock_name(name: str, names: Sequence[str]) -> str:
    """Stock comes first with its default budget, then with our chunk as its budget."""
    if not name.startswith("stock"):
        return name
    stocks = [each for each in names if each.startswith("stock")]
    return "stock" if name == stocks[0] else STOCK_CHUNK


def _interference(_: Path, raw: Raw) -> list[Value | None]:
    found: dict[tuple[str, str], list[float]] = {}
    for point in raw["points"]:
        group = together(point["watched"], point["count"], point["others"])
        system = "stock" if point["system"].startswith("stock") else point["system"]
        found.setdefault((group, system), []).append(point["ttft_s"])
    # The place among the others is spread on purpose, so repeats say nothing about scatter.
    return [
        value("e7", group, system, "latency_s", [fmean(latency_s)])
        for (group, system), latency_s in found.items()
    ]


def together(watched: str, count: int, others: str) -> str:
    """The group of one prompt among others."""
    return f"{watched} prompt {ALONE}" if not count else f"{watched} prompt, {count} {others}"


def _predictor(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for place, measured in raw["places"].items():
        for kind, runs in measured["runs"].items():
            group = f"{kind}, predictor on {place} core"
            for system, done in runs.items():
                found += [
                    value("e3", group, system, "ttft_mean_s", [fmean(r["ttft_s"]) for r in done]),
                    value(
                        "e3", group, system, "prompts_per_s",
                        [len(r["ttft_s"]) / r["total_s"] for r in done],
                    ),
                ]  # fmt: skip
    for row in predictor_report.rows({**raw}):
        if row.name != predictor_report.ALONE:
            group = f"{row.kind}, predictor on {row.place} core"
            mean, half = row.unaffected.mean / 100, row.unaffected.half / 100
            found.append(value("e3", group, row.name, "unaffected", [mean], half=half))
    return found


def _lengths(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for each in raw["granularities"]:
        group = f"buckets of {each['buckets']['granularity_tokens']} tokens"
        for name, scored in each["methods"].items():
            accuracy = scored["metrics"]["accuracy"]
            half = (accuracy["high"] - accuracy["low"]) / 2
            found.append(value("e4", group, name, "accuracy", [accuracy["value"]], half=half))
            error = scored["calibration_error"]
            if error is not None:
                found.append(value("e4", group, name, "calibration_error", [error]))
    return found


def _admission(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for name, runs in raw["systems"].items():
        found += [
            value("e5", ALL_AT_ONCE, name, metric, samples, source=Source.PACED)
            for metric, samples in (
                ("jct_mean_s", [fmean(run["jct_s"]) for run in runs]),
                ("total_s", [run["total_s"] for run in runs]),
                ("preemptions", [run["counters"]["preemptions"] for run in runs]),
            )
        ]
    return found


def _dispatch(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    figures: dict[str, Callable[[Raw], float]] = {
        "decode_s": dispatch_report.decode_s,
        "jct_mean_s": lambda run: float(run["jct_s"]),
        "heavy_of_slowest": lambda run: float(dispatch_report.slowest(run)["heavy"]),
        "light_of_slowest": lambda run: float(dispatch_report.slowest(run)["light"]),
        "spread_heavy": lambda run: dispatch_report.spread(run, "heavy"),
    }
    for count, policies in raw["instances"].items():
        for name, runs in policies.items():
            found += [
                value("e6", decoders(count), name, metric, samples, source=Source.PACED)
                for metric, figure in figures.items()
                for samples in [[figure(run) for run in runs]]
            ]
    return found


def decoders(count: str | int) -> str:
    """The group of so many decode instances."""
    return f"{count} decode instances"


def _decisions(_: Path, raw: Raw) -> list[Value | None]:
    return [
        value("e6", f"a dispatch, {size} instances, {name}", STEP, "decision_s", [each])
        for name, sizes in raw["dispatch"].items()
        for size, summary in sizes.items()
        for each in [summary["median_us"] / 1e6]
    ]


def _saturation(_: Path, raw: Raw) -> list[Value | None]:
    profile = raw["profile"]
    found: list[Value | None] = [
        value("e8", DEVICE, "ours", "chunk_tokens", [profile["chunk_tokens"]])
    ]
    for point in profile["curve"]:
        rate = point["tokens"] / point["seconds"]
        group = f"prefill, {point['tokens']} tokens a step"
        found.append(value("e8", group, DEVICE, "tokens_per_s", [rate]))
    for point in profile["decodes"]:
        count = point["num_decodes"]
        group = f"{count} decode{'s' * (count != 1)} with {point['context_tokens']} tokens"
        rate = count / point["seconds"]
        found.append(value("e8", group, DEVICE, "tokens_per_s", [rate]))
    return found + _steps(profile["cost"])


def _steps(raw: Raw) -> list[Value | None]:
    """Figures 4 and 5 from what steps cost: estimates."""
    curve = tuple(CurvePoint(**point) for point in raw["curve"])
    cost = StepCost(**{**raw, "curve": curve})
    many = 64 * _LIGHT_CONTEXT
    steps = {
        LIGHT_DECODE: (1, cost.step_s(1, _LIGHT_CONTEXT, 0)),
        WITH_PROMPT: (1, cost.step_s(1, _LIGHT_CONTEXT, _HEAVY_PROMPT)),
        PROMPT: (0, cost.step_s(0, 0, _HEAVY_PROMPT)),
        WITH_DECODES: (64, cost.step_s(64, many, _HEAVY_PROMPT)),
        ALL_LIGHT: (128, cost.step_s(128, 2 * many, 0)),
        HALF_HEAVY: (128, cost.step_s(128, many + 64 * _HEAVY_CONTEXT, 0)),
    }
    found: list[Value | None] = []
    for group, (decodes, step_s) in steps.items():
        found.append(value("e7", group, STEP, "step_s", [step_s], source=Source.ESTIMATE))
        if decodes:
            rate = [decodes / step_s]
            found.append(value("e7", group, STEP, "tokens_per_s", rate, source=Source.ESTIMATE))
    return found


def _flip(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for load, systems in raw["loads"].items():
        for name, runs in systems.items():
            for metric, samples in (
                ("jct_mean_s", [run["overall"]["jct_s"] for run in runs]),
                ("ttft_mean_s", [run["overall"]["ttft_s"] for run in runs]),
                ("attained", [run["overall"]["attained"] for run in runs]),
                ("resource_s", [run["instances"] * run["makespan_s"] for run in runs]),
                ("flips", [run["flips"] for run in runs]),
            ):
                found.append(value("e9", load, name, metric, samples, source=Source.PACED))
    # Changing a role is the same work at any pace: real seconds.
    times = raw.get("timing", [])
    for source in ("prefill", "decode"):
        for metric in ("commit_s", "drain_s"):
            samples = [each[metric] for each in times if each["source"] == source]
            found.append(value("e9", ONE_FLIP, f"from {source}", metric, samples))
    return found


def _transfer(_: Path, raw: Raw) -> list[Value | None]:
    names = {"memcpy": "memcpy", "shm": SHM, "tcp": TCP, "raw": "a plain socket"}
    names |= {"nixl_shm": "NIXL, shared memory", "nixl_tcp": "NIXL, TCP"}
    return [
        value("e10", f"pages of {row['page_bytes'] >> 10} KiB", name, "bytes_per_s", [row[key]])
        for row in raw["rows"]
        for key, name in names.items()
        if row.get(key) is not None
    ]


def _handover(_: Path, raw: Raw) -> list[Value | None]:
    found: list[Value | None] = []
    for length, systems in raw["lengths"].items():
        group = f"prompts of {length} tokens, one at a time"
        for name, answers in systems.items():
            streams = [handover_report.Stream(tuple(pieces)) for pieces in answers]
            ttft_s = [each.ttft_s for each in streams]
            beyond_s = [each.second_s - each.itl_s for each in streams]
            found += [
                value("e10", group, name, "ttft_mean_s", ttft_s),
                value("e10", group, name, "second_s", beyond_s),
            ]
    return found


def _paper(_: Path, raw: Raw) -> list[Value | None]:
    """Rows of experiment, group, system, metric and values by seed (docs/benchmarks.md).

    Raises:
        ValueError: A metric is not known.
    """
    for row in raw["rows"]:
        if row["metric"] not in METRICS:
            raise ValueError(f"no metric {row['metric']!r}")
    return [
        value(
            row["experiment"], row["group"], row["system"], row["metric"], row["values"],
            source=Source.SIMULATED,
        )
        for row in raw["rows"]
    ]  # fmt: skip


READERS: dict[str, Reader] = {
    "admission": _admission,
    "decisions": _decisions,
    "dispatch": _dispatch,
    "flip": _flip,
    "handover": _handover,
    "interference": _interference,
    "lengths": _lengths,
    "modes": modes,
    "order": _order,
    "paper": _paper,
    "predictor": _predictor,
    "saturation": _saturation,
    "transfer": _transfer,
}
