"""What the papers state in experiments E1 to E13, beside what is simulated and what was measured.

A simulation says nothing new where its device was fitted to the same sentence; `fitted` says so.
Measurements are those of results/, each with its conditions: other devices and smaller models than
the papers', so they can agree in direction more than in size. What was not measured is named.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from examples.benchmarks.paper.opt13b import PROFILE, STATEMENTS
from examples.benchmarks.report import INTERFERENCE, PAPER_STATES, RESULTS, load, markdown, table
from vllm_tetri.sim.cost.profiles import profile

NONE = "–"
# What the simulated device has to do with a sentence.
THIS = "**to this sentence**: confirms nothing"
OTHERS = "to other sentences (sections 2.1, 2.2)"
SHEETS = "no: data sheets"
NO_DEVICE = NONE
PER_DOLLAR = (1.4, 2.4, 0.86, 1.1, 1.9)  # (1 + JCT saved) / resource time gives all of them
TITLES = {
    "e1": "Figures 11 to 15: five classes against a vLLM of 2023 on half of the cards; change of "
    "mean TTFT · mean JCT · resource time in %, perf/$",
    "e2": "Figure 16: order and chunks of prompts",
    "e3": "Figure 17: cost of the predictor",
    "e4": "Section 5.2.2: accuracy of the predictor",
    "e5": "Figure 18: admission to a decode batch, against greedy",
    "e6": "Figure 19: choice of a decode instance, total decode time against power of two",
    "e7": "Figures 3 to 5: interference, how many times longer than alone",
    "e8": "Figure 2: from how many tokens a step saturates the device",
    "e9": "Section 3.5: a change of role",
    "e10": "Sections 3.3.4 and 4: transfer of KV by request, chunk and layer",
    "e11": "Sarathi-Serve: capacity (p99 between tokens, median scheduling delay)",
    "e12": "DistServe: goodput per card at 90 % attainment",
    "e13": "Disaggregated against chunked, left open by Sarathi-Serve: goodput per instance",
}
CONDITIONS = {
    "e1": "split to stock vLLM 0.32 on the same two Xeon cores, SmolLM2 of six layers, bfloat16, "
    "Poisson at 0.7 of stock's rate (classes.csv.gz); not the paper's comparison: it had twice the "
    "cards of a vLLM of 2023",
    "e2": "one engine, 128 prompts at once, against fcfs (tables.json.gz)",
    "e3": "a folder's predictor on a core of its own, all prompts at once; head: ours against a "
    "histogram, SmolLM2 float32, 64 prompts, 3 repeats (tables.json.gz, predictor-cost.jsonl.gz)",
    "e4": "MiniLM for SmolLM2-135M, 3,099 prompts, likeliest bucket; in brackets always the "
    "commonest one (predictor.csv.gz)",
    "e5": "real engines that keep the pace of a modelled device (tables.json.gz)",
    "e6": "4 decode instances, real engines that keep the pace of a modelled device "
    "(tables.json.gz)",
    "e7": "medians over rounds on one stock engine, two EPYC cores, as ratios within a round "
    "(interference-smollm2.jsonl.gz)",
    "e8": "SmolLM2 in bfloat16 on one Xeon core, the smallest step with 90 % of the best tokens/s "
    "(saturation.json.gz)",
    "e9": "real engines on two cores, tiny model, without draining (flip.jsonl.gz)",
    "e10": "time from the last chunk of a prompt of 2,048 tokens, in chunks of 512, until its KV "
    "is there; host memory, emulated links (layers.jsonl.gz)",
    "e13": "requests in time (strict SLOs) of split to stock with a budget of 256, two Xeon cores, "
    "mixed (classes.csv.gz)",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of a paper, and what it is here. Texts are those of a table's cells."""

    experiment: str
    what: str
    paper: str
    simulated: str
    measured: str
    fitted: str


def means_of(rows: pd.DataFrame) -> dict[Any, float]:
    """Return means over seeds by experiment, group, system and metric."""
    found = rows.groupby(["experiment", "group", "system", "metric"])["value"].mean()
    return {key: float(value) for key, value in found.items()}


def kept_rows() -> pd.DataFrame:
    """Return the simulated rows that are kept in results/."""
    names = ["experiment", "group", "system", "seed"]
    return table("paper").melt(id_vars=names, var_name="metric").dropna(subset=["value"])


def percent(ratio: float) -> str:
    """Return a change, as papers state it; a dash for none."""
    if math.isnan(ratio):
        return NONE
    return f"{round(100 * (ratio - 1)):+d} %".replace("-", "−").replace("+0 ", "0 ")


class Simulated:
    """Ratios of simulated means; a dash where an experiment was not simulated."""

    def __init__(self, means: Mapping[Any, float]) -> None:
        self._means = means

    def ratio(self, experiment: str, group: str, metric: str, system: str, rival: str) -> float:
        """Return the mean of a system by that of a rival."""
        found, least = (
            self._means.get((experiment, group, each, metric), math.nan) for each in (system, rival)
        )
        return found / least

    def change(self, *key: str) -> str:
        """Return a ratio as a change in %."""
        return percent(self.ratio(*key))

    def times(self, *key: str) -> str:
        """Return a ratio."""
        ratio = self.ratio(*key)
        return NONE if math.isnan(ratio) else f"{ratio:.2f}"


# -- measurements ------------------------------------------------------------------------------


@cache
def _tables() -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = json.loads(
        gzip.decompress((RESULTS / "tables.json.gz").read_bytes())
    )
    return tables


def _cells(page: str, *first: str) -> dict[str, str]:
    """Return the row of a kept table that begins with these cells, by column."""
    for each in _tables():
        for row in each["rows"]:
            if each["page"] == page and tuple(row[: len(first)]) == first:
                return dict(zip(each["columns"], row, strict=True))
    raise LookupError(f"no kept table of {page} has {first}")


def _split_to_stock(name: str, rival: str, metric: str) -> float:
    cells = table("classes").query(f"rate == 'knee' and `class` == '{name}'").set_index("system")
    return float(cells.loc["split", metric] / cells.loc[rival, metric])


def _of_head() -> str:
    _, cells = load(RESULTS / "predictor-cost.jsonl.gz")
    means = cells.groupby("system")["ttft_mean_ms"].mean()
    return f"head {percent(means['head'] / means['histogram'])}"


def saturation() -> int:
    """Return the least measured tokens of a step that give 90 % of the best throughput."""
    raw = json.loads(gzip.decompress((RESULTS / "saturation.json.gz").read_bytes()))
    rates = {each["tokens"]: each["tokens"] / each["seconds"] for each in raw["profile"]["curve"]}
    enough = 0.9 * max(rates.values())
    return int(min(tokens for tokens, rate in rates.items() if rate >= enough))


def _flip_ms() -> str:
    _, cells = load(RESULTS / "flip.jsonl.gz")
    found = 1e3 * cells.query("load == 'timing' and system == 'at once'")["commit_s"]
    return f"{found.median():.1f} ms, p99 {np.quantile(found, 0.99):.1f}"


def _exposed_ms(push: str) -> str:
    lines = gzip.decompress((RESULTS / "layers.jsonl.gz").read_bytes()).splitlines()
    found: dict[str, list[float]] = {}
    for row in map(json.loads, lines):
        if row["push"] == push and (row["tokens"], row["chunk"]) == (2048, 512):
            found.setdefault(row["link"], []).append(row["exposed_ms"])
    return ", ".join(f"{link}: {np.median(each):.1f} ms" for link, each in found.items())


@cache
def _interference_cells(name: str) -> pd.DataFrame:
    return load(RESULTS / f"{name}.jsonl.gz")[1]


def slowdown(begin: str, end: str = "", system: str = "stock", metric: str = "slowdown") -> str:
    """Return medians over rounds of the last load of `compare interference` with such a name."""
    found = []
    for words, name in INTERFERENCE.items():
        cells = _interference_cells(name)
        is_of = cells["load"].str.startswith(begin) & cells["load"].str.endswith(end)
        cells = cells[is_of & (cells["system"] == system)]
        if len(cells):
            last = cells["load"].iloc[-1]
            middle = cells[cells["load"] == last][metric].median()
            found.append(f"{words} {middle:.2f} ({last if end else last.partition(': ')[2]})")
    return ", ".join(found) or NONE


# -- claims ------------------------------------------------------------------------------------


def claims(means: Mapping[Any, float]) -> Iterator[Claim]:
    """Yield every claim; what was not simulated this time has a dash."""
    simulated = Simulated(means)
    for part in (_classes, _prompts, _admissions, _dispatches, _rates):
        yield from part(simulated)
    yield from _predictor()
    yield from _interference()
    yield from _mechanisms()


def _classes(simulated: Simulated) -> Iterator[Claim]:
    for (name, stated), per_dollar in zip(PAPER_STATES.items(), PER_DOLLAR, strict=True):
        of = partial(simulated.ratio, "e1", f"{name}, roce")
        cells = []
        for system in ("tetri-paper", "tetri"):
            ttft, jct, resource = (
                of(metric, system, "vllm-2023")
                for metric in ("ttft_mean_s", "jct_mean_s", "resource_s")
            )
            changes = " · ".join(percent(each).removesuffix(" %") for each in (ttft, jct, resource))
            cells.append(f"{changes} · {(2 - jct) / resource:.2f}")
        measured = (
            percent(_split_to_stock(name, "stock", metric)).removesuffix(" %")
            for metric in ("ttft_mean_ms", "jct_mean_s")
        )
        yield Claim(
            "e1", name, f"{stated} · {per_dollar}", f"{cells[0]} (our settings {cells[1]})",
            f"{' · '.join(measured)} · – · –", OTHERS,
        )  # fmt: skip


def _prompts(simulated: Simulated) -> Iterator[Claim]:
    of = partial(simulated.change, "e2", "full queue")
    rows = {each: _cells("prefill", each) for each in ("sjf 16 (default)", "sjf 128")}
    short, wide = (float(row["TTFT (ms)"].split()[0]) for row in rows.values())
    yield Claim(
        "e2", "chunks of 512, fcfs, against fixed batches of 16: prefill latency", "−86.4 %",
        of("prefill_s", "fcfs", "vllm-2023"), "no engine with fixed batches was run", OTHERS,
    )  # fmt: skip
    yield Claim(
        "e2", "sjf in batches of 16 against fcfs: mean waiting", "−7.8 %",
        of("waiting_s", "sjf 16", "fcfs"), _minus(rows["sjf 16 (default)"]["to fcfs"]), OTHERS,
    )  # fmt: skip
    yield Claim(
        "e2", "sjf in batches of 128 against 16: mean TTFT", "−46.5 %",
        of("ttft_mean_s", "sjf 128", "sjf 16"), percent(wide / short), OTHERS,
    )  # fmt: skip


def _minus(text: str) -> str:
    return text.replace("*", "").replace("-", "−")


def _admissions(simulated: Simulated) -> Iterator[Claim]:
    measured = {
        "reserve-dynamic, 100.0%": "reserve-dynamic, oracle 100 %",
        "reserve-static, 100.0%": "reserve-static, oracle 100 %",
        "reserve-dynamic, 74.9%": "reserve-dynamic, oracle 74.9 %",
    }
    for (name, row), stated in zip(measured.items(), ("−12 %", "−10 %", "0 %"), strict=True):
        policy, accuracy = name.split(", ")
        found = [
            simulated.change(
                "e5", "all at once", "jct_mean_s", f"{policy}, oracle {accuracy}, {end} end",
                "greedy",
            )
            for end in ("lower", "expected")
        ]  # fmt: skip
        yield Claim(
            "e5", f"{policy}, {accuracy} right: mean JCT", stated,
            f"{found[0]}, with the expected end {found[1]}",
            _minus(_cells("benchmarks-decode", row)["to greedy"]), OTHERS,
        )  # fmt: skip


def _dispatches(simulated: Simulated) -> Iterator[Claim]:
    for policy, row, stated in (
        ("power-of-two-ratio", "power-of-two-ratio (the paper's measure)", "lowest of the three"),
        ("random", "random", "higher (in its figure)"),
        ("imbalance", "imbalance", "highest (in its figure)"),
    ):
        found = [
            simulated.change(
                "e6", f"{count} decode instances", "decode_s", policy, "power-of-two"
            )
            for count in (2, 4, 8)
        ]  # fmt: skip
        yield Claim(
            "e6", f"{policy} against decodes of one's own kind; 2, 4 and 8 instances", stated,
            ", ".join(found), _minus(_cells("benchmarks-decode", row)["to power-of-two"]), OTHERS,
        )  # fmt: skip


def _rates(simulated: Simulated) -> Iterator[Claim]:
    yield Claim(
        "e11", "Sarathi-Serve to vLLM of 2023, Mistral-7B on an A100, strict SLO", "up to 2.6",
        simulated.times("e11", "mixed", "capacity_per_s", "sarathi", "vllm-2023"),
        "not measured: it needs the device", SHEETS,
    )  # fmt: skip
    for rival, stated in (("vllm-2023", "2.1"), ("vllm", NONE)):
        yield Claim(
            "e12", f"2 prefill and 1 decode card to {rival}, 13B on A100, 512 + 64 tokens", stated,
            simulated.times("e12", "2P1D", "goodput", "distserve", rival),
            "not measured: it needs the devices", SHEETS,
        )  # fmt: skip
    measured = _split_to_stock("mixed", "stock-256", "in_time_strict_per_s")
    for system in ("tetri-paper", "tetri", "adaptive"):
        yield Claim(
            "e13", f"{system}, 2 prefill and 2 decode instances to Sarathi-Serve, mixed", NONE,
            simulated.times("e13", "mixed", "goodput", system, "sarathi"),
            f"{measured:.2f}" if system == "tetri" else NONE, OTHERS,
        )  # fmt: skip


def _predictor() -> Iterator[Claim]:
    beside = _cells("prediction", "own", "all at once", "parallel")
    assumed = "assumed, as a setting: +10 %"
    yield Claim(
        "e3", "prefill latency with the predictor beside it", "+10 %", assumed,
        f"{_minus(beside['mean TTFT'])}; {_of_head()}", NO_DEVICE,
    )  # fmt: skip
    yield Claim("e3", "throughput with it", "−12 %", NONE, _minus(beside["throughput"]), NO_DEVICE)
    yield Claim(
        "e3", "prompts that it leaves as they were", "80 %", NONE,
        f"{beside['unaffected, %']} %", NO_DEVICE,
    )  # fmt: skip
    kept = table("predictor").set_index("accuracy, %")
    for column, stated in zip(kept.columns, ("58.9 %", "74.9 %", "85 %"), strict=True):
        width = column.split()[0]
        likeliest, common = (
            kept.loc[row, column]
            for row in ("likeliest bucket of the predictor", "commonest bucket")
        )
        yield Claim(
            "e4", f"right by buckets of {width} tokens", stated,
            "taken as given" if width == "200" else NONE,
            f"{likeliest} % ({common} %)", NO_DEVICE,
        )  # fmt: skip


_WATCHED = {  # how the name of a load begins and ends, by the paper's sentence
    "light prompt with 7 light ones": ("3a: light prompt, 7 ", ""),
    "light prompt with 63 light ones": ("3a: light prompt, 63 ", ""),
    "light prompt with heavy ones, more than [7 of them]": ("3b: light prompt, 16 ", ""),
    "heavy prompt with light ones [63 of them]": ("3c: heavy prompt, 63 ", ""),
    "light decode with 1 heavy prompt": ("4b: light decode, 1 ", ""),
    "light prompt with light decodes, up to [128 of them]": ("4c: light prompt, 127 ", ""),
    "heavy prompt with light decodes, up to [128 of them]": ("4d: heavy prompt, 127 ", ""),
    "latency, batch of 128, half heavy decodes by none": ("5, ", ": half heavy"),
    "throughput of the same": ("5, ", ": half heavy"),
}


def _interference() -> Iterator[Claim]:
    cost = profile(PROFILE).cost
    for each in STATEMENTS:
        metric = "throughput" if each.words.startswith("throughput") else "slowdown"
        found = NONE
        if each.words in _WATCHED:
            found = slowdown(*_WATCHED[each.words], metric=metric)
        yield Claim(
            "e8" if "fig. 2" in each.where else "e7",
            f"{each.where}: {each.words}",
            f"> {each.stated:g}" if each.is_least else f"{each.stated:g}",
            f"{each.of(cost):.2f}",
            found,
            THIS if each.is_fitted else OTHERS,
        )


def _mechanisms() -> Iterator[Claim]:
    yield Claim(
        "e8", "tokens of a step that saturate the device", "512", NONE, f"{saturation()}", NO_DEVICE
    )
    yield Claim("e9", "a flip, without draining", "5 to 7 ms", NONE, _flip_ms(), NO_DEVICE)
    for push in ("chunk", "layer"):
        yield Claim(
            "e10", f"left when a prompt is computed, sent by {push}", "future work, no number",
            NONE, _exposed_ms(push), NO_DEVICE,
        )  # fmt: skip


def comparison(means: Mapping[Any, float], experiments: set[str]) -> str:
    """Return a Markdown table per experiment, with the conditions of what was measured."""
    found = list(claims(means))
    parts = []
    for experiment, title in TITLES.items():
        rows = [each for each in found if each.experiment == experiment]
        if experiment not in experiments or not rows:
            continue
        cells = [
            {"what": each.what, "paper": each.paper, "simulated": each.simulated,
             "measured": each.measured, "profile fitted": each.fitted}
            for each in rows
        ]  # fmt: skip
        parts.append(f"## {experiment.upper()}. {title}\n\n{markdown(cells)}\n")
        if experiment in CONDITIONS:
            parts.append(f"Measured: {CONDITIONS[experiment]}.\n")
    return "\n".join(parts)
