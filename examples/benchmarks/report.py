"""Tables from results: `python -m examples.benchmarks.report [FILE.jsonl ...]`.

Without a file it derives the measured tables of the documentation again, from what is kept in
results/ (with --check it compares them with the pages). With files, which the scripts here write,
it prints one Markdown table per file: means over repeats, ± half a 95 % interval.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from examples.benchmarks import interference
from examples.benchmarks.figures import interval
from examples.benchmarks.handover import OVER
from examples.predictor.head import scores
from examples.predictor.worth import PREDICTORS

RESULTS = Path(__file__).parent / "results"
_MOST_OTHERS_PERCENT = 5.0
DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = {
    "stock": "stock",
    "stock-128": "stock, budget 128",
    "stock-256": "stock, budget 256",
    "replicas": "2 replicas, vllm-router",
    "split": "split",
    "both": "one `both` instance, chunks of 256",
}
TODAY = {
    "stock": "stock",
    "replicas-1": "stock behind vllm-router",
    "stock-128": "stock, budget 128",
    "stock-256": "stock, budget 256",
    "split": "split",
    "both": "one `both` instance and its router",
}
_HEADLINE = (
    "2 CPU cores, long prompts, short outputs (conditions in "
    "[docs/benchmarks.md](docs/benchmarks.md))"
)
HEADLINE = {
    "stock": "stock vLLM, default",
    "stock-256": "stock vLLM, token budget tuned by hand",
    "both": "vllm-tetri, one `both` instance (default), untuned",
    "split": "vllm-tetri, hard split",
}
FOUR_DEVICES = {
    "replicas-4": "4 replicas, vllm-router",
    "replicas-4-512": "the same, budget 512",
    "split-1p3d": "split, 1 prefill + 3 decode",
    "split-2p2d": "split, 2 prefill + 2 decode",
    "whole-4": "whole, 4 `both`",
    "adaptive-4": "adaptive, 4 `both`",
}
WAYS = {  # with stock's budgets from the largest on, which is its default
    "stock, budget 8192": "stock, budget 8,192",
    "stock, budget 2048": "stock, budget 2,048",
    "stock, budget 512": "stock, budget 512",
    "split 2P2D": "split, 2 prefill + 2 decode",
    "adaptive 2P2D": "adaptive, 2 prefill + 2 decode",
    "adaptive": "adaptive, 4 `both`",
    "whole": "whole, 4 `both`",
}
PAPER_STATES = {
    "lpld": "−44 · −40 · ≈0",
    "lphd": "−97 · −47 · −38",
    "hpld": "−9 · −23 · +43",
    "hphd": "– · −19 · +7",
    "mixed": "−85 · −50 · −21",
}
PAPER_SYSTEMS = {
    "here, our settings": "tetri",
    "here, the paper's settings": "tetri-paper",
    "today's vLLM on as many cards": "vllm on all cards",
}
CONVERSATIONS = {
    "stock": "stock, one device",
    "replicas-3-cache": "3 replicas, vllm-router cache-aware",
    "split-2p1d-uncached": "split, without caches",
    "split-2p1d": "split, 2 prefill + 1 decode",
    "nixl": "NIXL pair, vllm-router",
    "split": "split, 1 prefill + 1 decode",
    "adaptive-2p1d": "adaptive, 2 prefill + 1 decode",
    "adaptive-3": "adaptive, 3 `both`",
}
MEANS = ("first_ttft_ms", "later_ttft_ms", "jct_ms", "cached", "kv_bytes_sent", "fetched_tokens")


INTERFERENCE = {"SmolLM2, 6 layers": "interference-smollm2"}


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table with a line per row; all rows have the same keys."""
    heads = list(rows[0]) if rows else []
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Return three significant digits, and no fewer digits than the integer part has."""
    if math.isnan(value):
        return "–"
    digits = 0 if not value else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


# -- runs ----------------------------------------------------------------------------


def load(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Read a file of results, compressed or not: its head, and a row per cell."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    return lines[0]["head"], pd.DataFrame([line["cell"] for line in lines[1:]])


def summary(head: Mapping[str, Any], cells: pd.DataFrame) -> list[dict[str, str]]:
    """Return means over repeats with their intervals, a row per combination of names."""
    by, metrics = list(head["by"]), [each for each in head["metrics"] if each in cells]
    rows = []
    for name in by:  # groups in the order in which their names first appear
        cells[name] = pd.Categorical(cells[name], cells[name].unique())
    for key, group in cells.groupby(by, observed=True):
        row = dict(zip(by, map(str, key), strict=True))
        for metric in metrics:
            values = group[metric].dropna().tolist()
            half = interval(values) if values else math.nan
            mean = number(sum(values) / len(values)) if values else "–"
            row[metric] = mean if math.isnan(half) else f"{mean} ± {number(half)}"
        rows.append(row)
    return rows


def draw(head: Mapping[str, Any], cells: pd.DataFrame, metric: str, path: Path) -> None:
    """Draw one metric as bars: groups by all names but the last, a colour for each of the last."""
    mpl.use("svg")
    by = list(head["by"])
    means = cells.groupby(by, sort=False)[metric].mean().unstack(by[-1])
    axes = means.plot.bar(figsize=(8, 4), rot=20, ylabel=metric, width=0.8)
    axes.figure.tight_layout()
    axes.figure.savefig(path)


# -- the documentation ---------------------------------------------------------------


def table(name: str) -> pd.DataFrame:
    """Read results/NAME.csv.gz; cells stay text where they are not numbers."""
    return pd.read_csv(RESULTS / f"{name}.csv.gz")


def undisturbed(cells: pd.DataFrame) -> pd.DataFrame:
    """Leave out, for all systems, repeats of a class beside one of which others used more than 5 %
    of the cores."""
    most = cells.groupby(["name", "repeat"])["others_percent"].transform("max")
    return cells[most <= _MOST_OTHERS_PERCENT]


def five_classes(name: str = "", systems: Mapping[str, str] = SYSTEMS) -> str:
    """Mean TTFT, ITL p99, mean JCT and requests a second in time (strict); the best in bold. With a
    name, of the cells in that file."""
    columns = ["ttft_mean_ms", "itl_p99_ms", "jct_mean_s", "in_time_strict_per_s"]
    if name:
        cells = undisturbed(load(RESULTS / name)[1])
        cells = cells.assign(jct_mean_s=cells["jct_mean_ms"] / 1000, **{"class": cells["name"]})
        cells = cells.groupby(["class", "system"], as_index=False)[columns].mean()
    else:
        cells = table("classes").query("rate == 'knee'")
    formats, rows = ("{:.0f}", "{:.0f}", "{:.2f}", "{:.2f}"), []
    for system, title in systems.items():
        row = {"system": title}
        for name in ("lpld", "lphd", "hpld", "hphd", "mixed"):
            of_class = cells[cells["class"] == name].set_index("system")
            parts = []
            for column, pattern in zip(columns, formats, strict=True):
                value, others = of_class.loc[system, column], of_class[column]
                best = others.max() if column.startswith("in_time") else others.min()
                shown = pattern.format(value)
                parts.append(f"**{shown}**" if value == best else shown)
            row[name] = " · ".join(parts)
        rows.append(row)
    return markdown(rows)


def headline() -> str:
    """ITL p99, mean TTFT and mean JCT with long prompts and short outputs, for the README."""
    cells = undisturbed(load(RESULTS / "classes-caches.jsonl.gz")[1]).query("name == 'hpld'")
    means = cells.groupby("system").mean(numeric_only=True)
    columns = {
        "ITL p99": "itl_p99_ms",
        "mean TTFT": "ttft_mean_ms",
        "mean completion": "jct_mean_ms",
    }
    rows = []
    for system, title in HEADLINE.items():
        row = {_HEADLINE: title}
        for name, column in columns.items():
            is_best = means.loc[system, column] == means.loc[[*HEADLINE], column].min()
            value = means.loc[system, column]
            shown = f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"
            row[name] = f"**{shown}**" if is_best else shown
        rows.append(row)
    return markdown(rows)


def four_devices() -> str:
    """Means over repeats: TTFT, ITL p99, JCT, requests in time (strict) and split in %."""
    _, cells = load(RESULTS / "devices.jsonl.gz")
    cells["jct_mean_s"] = cells["jct_mean_ms"] / 1000
    cells["in_time"] = cells["share_strict"] * 100
    columns = {
        "ttft_mean_ms": "{:.0f}",
        "itl_p99_ms": "{:.0f}",
        "jct_mean_s": "{:.2f}",
        "in_time": "{:.0f}",
        "split_percent": "{:.0f}",
    }
    means = cells.groupby(["system", "name"])[list(columns)].mean()
    rows = []
    for system, title in FOUR_DEVICES.items():
        row = {"system": title}
        for name in ("lpld", "hpld", "mixed"):
            found = means.loc[(system, name)]
            row[name] = " · ".join(pattern.format(found[each]) for each, pattern in columns.items())
        rows.append(row)
    return markdown(rows)


def routers() -> str:
    """Milliseconds by which a router delays first tokens: p50, and p99 in brackets; and its CPU
    time per event and request. Means over turns, ± half a 95 % interval."""
    _, cells = load(RESULTS / "router.jsonl.gz")
    cells["what"] = cells["shape"] + ", " + cells["load"]
    names = {"aggregated": "whole", "pair": "pair"}
    lines = {
        f"{short}, {title}": (f"{shape}, {load_name}", metric)
        for shape, short in names.items()
        for load_name, title, metric in (
            ("1 streams", "1 stream: first token, ms", "added_p50_ms"),
            ("512 streams", "512 streams: first token, ms", "added_p50_ms"),
            ("512 paced", "512 streams: an event, µs of a core", "cpu_us_of_events"),
            ("requests", "a short request, µs of a core", "cpu_us_of_requests"),
        )
    }
    rows = []
    for title, (what, metric) in lines.items():
        row = {"": title}
        for system in ("ours", "vllm-router"):
            is_meant = (cells["what"] == what) & (cells["system"] == system)
            found = cells[is_meant & cells["token"].isin(["", "first"])]
            values = found[metric].tolist()
            row[system] = f"{number(sum(values) / len(values))} ± {number(interval(values))}"
            if metric == "added_p50_ms":
                row[system] += f" ({number(found['added_p99_ms'].mean())})"
        rows.append(row)
    return markdown(rows)


def ways() -> str:
    """Mean regret over cells in %, and the largest one in brackets, by profile."""
    _, cells = load(RESULTS / "regrets.jsonl.gz")
    columns = {
        "adaptive, 4 `both`": "usual",
        "of which the layout": "usual_of_layouts",
        "adaptive, 2 prefill + 2 decode": "roles",
    }
    rows = []
    for name, found in cells.groupby("profile", sort=False):
        parts = {
            title: f"{100 * found[column].mean():.0f} ({100 * found[column].max():.0f})"
            for title, column in columns.items()
        }
        rows.append({"steps of": f"`{name}`", **parts})
    return markdown(rows)


def modes() -> str:
    """Mean TTFT, ITL p99 and mean JCT in ms by way of serving and class, at the knee: an 8B model
    on H100s, by estimate."""
    _, cells = load(RESULTS / "regrets-long.jsonl.gz")
    rows: dict[str, dict[str, object]] = {}
    for kind in ("mixed", "hpld", "lphd"):
        found = cells[cells["class"] == kind]["figures"]
        for way, title in _known(WAYS, found.iloc[0]):
            means = [
                1e3 * sum(each) / len(found)
                for each in zip(*(one[way] for one in found), strict=True)
            ]
            row = rows.setdefault(way, {"4 instances": title})
            row[kind] = " · ".join(f"{value:,.0f}" for value in means)
    return markdown([*rows.values()])


def goodputs(profile: str) -> str:
    """Goodput of a profile in requests per second by way of serving and class, and in parts of that
    of stock with its default budget."""
    _, cells = load(RESULTS / "goodputs.jsonl.gz")
    rates = cells[cells["profile"] == profile].pivot_table(
        values="per_s", index="way", columns="class", sort=False
    )
    ways = {**WAYS, "adaptive, promised": "adaptive, SLOs promised"}
    known, rows = _known(ways, rates.index), []
    usual = rates.loc[known[0][0]]
    for way, title in known:
        found = rates.loc[way].items()
        parts = {kind: f"{rate:.3g} ({rate / usual[kind]:.2f})" for kind, rate in found}
        rows.append({"4 instances": title, **parts})
    return markdown(rows)


def _known(ways: dict[str, str], results: Iterable[object]) -> list[tuple[str, str]]:
    names = set(results)
    return [(way, title) for way, title in ways.items() if way in names]


def several_routers() -> str:
    """Mean TTFT · p99 in ms by number of routers, as others know of a router's requests."""
    (_, cells), rows = load(RESULTS / "several-routers.jsonl.gz"), []
    shown = ["ttft_mean_s", "ttft_p99_s"]
    for (name, kind), found in cells.groupby(["profile", "class"], sort=False):
        for is_told, words in ((False, "by reports"), (True, "at once")):
            row = {"steps of": f"`{name}`", "class": kind, "others know": words}
            for count in sorted(found["routers"].unique()):
                is_meant = (found["routers"] == count) & (found["told"] == (is_told and count > 1))
                mean, late = 1e3 * found[is_meant][shown].mean()
                row[f"{count}"] = f"{mean:.0f} · {late:.0f}"
            rows.append(row)
    return markdown(rows)


def paper_classes() -> str:
    """Changes of mean TTFT, mean JCT and resource time against a vLLM of 2023, in %, simulated."""
    cells = table("paper").query("experiment == 'e1'")
    metrics, rows = ["ttft_mean_s", "jct_mean_s", "resource_s"], []
    for name, stated in PAPER_STATES.items():
        means = cells[cells["group"] == f"{name}, roce"].groupby("system")[metrics].mean()
        changes = 100 * (means / means.loc["vllm-2023"] - 1)
        row = {"class": name, "the paper": stated}
        for title, system in PAPER_SYSTEMS.items():
            parts = [f"{round(value):+d}" for value in changes.loc[system]]
            row[title] = " · ".join(parts).replace("-", "−")
        rows.append(row)
    return markdown(rows)


def decisions() -> str:
    """CPU time of decisions in µs, medians; of dispatch over all cases."""
    _, cells = load(RESULTS / "decisions.jsonl.gz")
    found = cells.groupby(["decision", "case", "code", "instances"])["median_us"].first()
    sizes = {10: "10 instances", 100: "100", 1000: "1,000"}
    rows: dict[str, dict[str, str]] = {}
    for decision, case in found.index.droplevel(["code", "instances"]).unique():
        title = f"{decision}, {case}" if case else decision
        rows[title] = {"": title} | {
            name: f"{found[decision, case, 'compiled', size]:,.0f}"
            f" ({found[decision, case, 'Python', size]:,.0f})"
            for size, name in sizes.items()
        }
    return markdown([*rows.values()])


def caches() -> str:
    """Hits in % of prompt tokens, mean and p99 of TTFT and mean JCT in s; the lowest in bold."""
    _, cells = load(RESULTS / "caches.jsonl.gz")
    columns = {"ttft_mean_s": "{:.2f}", "ttft_p99_s": "{:.1f}", "jct_mean_s": "{:.1f}"}
    firsts = cells.groupby("instances").first()
    bounds = {str(n): f"{100 * r.lru:.0f}, {100 * r.belady:.0f}" for n, r in firsts.iterrows()}
    rows = [{"instances": "best possible"} | bounds]
    cells = cells[~cells["system"].str.contains("blind|no fetches")]
    for system in cells["system"].unique():
        row = {"instances": system}
        for count, group in cells.groupby("instances"):
            cell, parts = group.set_index("system").loc[system], list[str]()
            for column, pattern in columns.items():
                shown = pattern.format(cell[column])
                is_best = cell[column] == group[column].min()
                parts.append(f"**{shown}**" if is_best else shown)
            row[str(count)] = "·".join([f"{100 * cell['hits']:.0f}", *parts])
        rows.append(row)
    return markdown(rows)


def as_kept(name: str) -> str:
    """Return a table whose cells are kept as they were published."""
    cells = pd.read_csv(RESULTS / f"{name}.csv.gz", dtype=str, keep_default_na=False)
    return markdown(cells.to_dict("records"))


def handovers() -> str:
    """Mean TTFT of both stock servers and of a pair, how much later the pair's is, prompt by
    prompt, and how much longer its second token takes than a usual step."""
    _, cells = load(RESULTS / "handover.jsonl.gz")
    titles, rows = {"stock": "stock", "stock, our chunk": "stock, budget 256"}, []
    for length, group in cells.groupby("prompt"):
        of = dict(list(group.groupby("system")))
        row = {"prompt": f"{length:,}"}
        for name, title in titles.items():
            row[title] = f"{of[name]['ttft_ms'].mean():.0f}"
        row["ours"] = f"{of['ours']['ttft_ms'].mean():.0f}"
        for name, title in titles.items():
            row[f"ours − {title}"] = _with_interval(of["ours"][OVER[name]])
        beyond = of["ours"]["second_beyond_step_ms"]
        row["second token: mean (median)"] = f"{_with_interval(beyond)} ({beyond.median():.1f})"
        rows.append(row)
    return markdown(rows)


def _with_interval(values: pd.Series) -> str:
    return f"{values.mean():.1f} ± {interval(list(values)):.1f}"


def length_head() -> str:
    """What the head predicted of answers, by how many it had seen, and with sources in turn."""
    rows = {order: pd.read_csv(RESULTS / f"head-{order}.csv.gz") for order in ("mixed", "source")}
    mixed, borders = rows["mixed"], (0, 500, 1000, len(rows["mixed"]))
    parts = {f"{low} to {high}": mixed[low:high] for low, high in pairwise(borders)}
    parts["in turn"] = rows["source"]
    named = {"error": "error", "error of the median": "of the median",
             "of the source's": "of the source's", "by prompt length": "by prompt length",
             "pinball": "pinball", "usual pinball": "of all lengths", "Spearman": "Spearman",
             "AUC heavy": "AUC of > 128", "coverage": "in 5 to 95 %",
             "accuracy 200": "right by 200", "majority 200": "commonest"}  # fmt: skip
    table = []
    for name, part in parts.items():
        found = scores(part)
        cells = {new: f"{found[old]:.{0 if found[old] > 1 else 2}f}" for old, new in named.items()}
        table.append({"answers": name, **cells})
    return markdown(table)


def worth() -> str:
    """Mean and p99 of completion times, and preemptions, by what is known of output lengths."""
    by = ["instances", "rate", "admission", "order"]
    rows = table("worth")
    rows = rows[rows["admission"] != "reserve-static"]  # worse than the others everywhere
    means = rows.groupby([*by, "predictor"], sort=False).mean()
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for (instances, rate, admission, order, who), cell in means.iterrows():
        row = found.setdefault(
            (instances, rate, admission, order),
            {"decode instances, requests/s": f"{instances}, {rate:g}",
             "admission, order": f"{admission}, {order}",
             **dict.fromkeys(PREDICTORS, "")},
        )  # fmt: skip
        row[who] = f"{cell.jct_s:.1f} · {cell.p99_s:.0f} · {cell.preemptions:.0f}"
    return markdown(list(found.values()))


def lengths_on_engines() -> str:
    """Means over repeats by what is known of lengths: completion times, preemptions, lateness."""
    columns = {
        "jct_mean_ms": "mean JCT, s",
        "jct_p99_ms": "p99, s",
        "total_s": "all, s",
        "preemptions": "preemptions",
        "late_ms": "latest step, s",
    }
    rows = []
    for figure, name in (("18", "admissions"), ("19", "dispatches")):
        _, cells = load(RESULTS / f"{name}.jsonl.gz")
        means = cells.groupby("system", sort=False)[list(columns)].mean()
        for system, row in means.sort_index().iterrows():
            shown = {title: number(row[each] / (1000 if each.endswith("_ms") else 1))
                     for each, title in columns.items()}  # fmt: skip
            rows.append({"figure": figure, "policy and predictor": system, **shown})
    return markdown(rows)


def transfers() -> str:
    """GB/s of every way to move KV, and ms of one block alone, by size of a block."""
    ways = {"memcpy": "memcpy", "shm": "shm", "emulated": "emulated", "4 groups": "shm, 4 groups",
            "2 parts": "shm, 2 parts", "plain socket": "raw socket", "tcp": "tcp",
            "NIXL": "nixl"}  # fmt: skip
    lines = gzip.decompress((RESULTS / "transfer.jsonl.gz").read_bytes()).splitlines()
    rows = []
    for cell in map(json.loads, lines):
        kib = cell["page_bytes"] >> 10
        figures = {
            title: f"{cell[way] / 1e9:.1f}, {1e3 * cell[f'{way}, one block']:.2f}"
            for title, way in ways.items()
        }
        rows.append({"block": f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB", **figures})
    return markdown(rows)


def conversations(file: str = "turns.jsonl.gz") -> str:
    """What turns of conversations take, and the KV blocks sent for them in parts of those that are
    new: which no instance of any system found again. Without caches all of a prompt is sent."""
    lines = gzip.decompress((RESULTS / file).read_bytes()).splitlines()
    found: dict[str, list[Any]] = {}
    for line in map(json.loads, lines):
        if "cell" in line:
            found.setdefault(line["cell"]["system"], []).append(line["cell"])
    known: dict[Any, int] = {}  # most tokens of a turn's prompt that any system has found
    for each in (turn for cells in found.values() for cell in cells for turn in cell["turns"]):
        key = each["seed"], each["turn"]
        known[key] = max(known.get(key, 0), each["cached_tokens"])
    (whole,) = found["split-2p1d-uncached"]
    size = max(cell["block_tokens"] for cells in found.values() for cell in cells)
    of_turns = [(each, -(-each["prompt_tokens"] // size)) for each in whole["turns"]]
    block_bytes = whole["kv_bytes_sent"] / sum(blocks for _, blocks in of_turns)
    new_blocks = sum(blocks - known[each["seed"], each["turn"]] / size for each, blocks in of_turns)
    rows = []
    for name, title in CONVERSATIONS.items():
        if name not in found:
            continue
        cells = found[name]
        mean = {key: sum(cell[key] for cell in cells) / len(cells) for key in MEANS}
        parts = mean["kv_bytes_sent"] / block_bytes, mean["fetched_tokens"] / size
        sent, fetched = (f"{each / new_blocks:.2f}" for each in parts)
        is_counted = name.startswith(("split", "adaptive"))
        rows.append(
            {
                "system": title,
                "first TTFT": f"{mean['first_ttft_ms']:.0f}",
                "later TTFT": f"{mean['later_ttft_ms']:.0f}",
                "JCT, s": f"{mean['jct_ms'] / 1e3:.1f}",
                "cached": f"{mean['cached']:.0%}",
                "sent / new": sent if is_counted else "–",
                "fetched / new": fetched if is_counted else "–",
            }
        )
    return markdown(rows)


def beside_others() -> str:
    """How many times longer something takes beside others than alone, by model, where the paper
    says so, too: medians over rounds, and the least and the most."""
    found: dict[str, dict[str, str]] = {}
    for title, name in INTERFERENCE.items():
        _, cells = load(RESULTS / f"{name}.jsonl.gz")
        for (name, system), rounds in cells.groupby(["load", "system"], sort=False):
            if len(rounds) == (rounds["slowdown"] == 1.0).sum():
                continue  # what the others are compared with
            stated = (each for begin, each in interference.PAPER.items() if name.startswith(begin))
            row = {"watched, beside": name, "paper": next(stated, "–")}
            if system != "stock":
                row = {"watched, beside": f"{name}, {system}", "paper": "–"}
            if row["paper"] == "–" and not name.startswith("5"):
                continue  # raw results have it
            row = found.setdefault(row["watched, beside"], row | dict.fromkeys(INTERFERENCE, "–"))
            more = [each for each in ("longest", "throughput") if each in rounds]
            medians = {each: rounds[each].median() for each in more}
            parts = [f"{each} {number(value)}" for each, value in medians.items() if value > 0]
            row[title] = "; ".join([_spread(rounds["slowdown"]), *parts])
    return markdown(sorted(found.values(), key=lambda row: _place(str(row["watched, beside"]))))


def _spread(values: pd.Series) -> str:
    middle = number(values.median())
    most = f" ({number(values.min())} to {number(values.max())})" if len(values) > 1 else ""
    return middle + most


def _place(name: str) -> tuple[str, list[int], str]:
    """Sort loads by figure, then by their numbers."""
    return name[:2], [int(each) for each in re.findall(r"\d+", name[2:])], name


DERIVED: dict[str, tuple[str, Callable[[], str]]] = {
    "README": ("../README.md", headline),
    "Five classes on two cores": ("benchmarks.md", five_classes),
    "Five classes again": (
        "benchmarks.md",
        partial(five_classes, "classes-caches.jsonl.gz", TODAY),
    ),
    "Four modelled devices": ("benchmarks.md", four_devices),
    "First token and hand-over": ("benchmarks.md", handovers),
    "Router": ("benchmarks.md", routers),
    "KV transport": ("benchmarks.md", transfers),
    "Conversations": ("benchmarks.md", conversations),
    "Conversations, SmolLM2": ("benchmarks.md", partial(conversations, "turns-smollm2.jsonl.gz")),
    "Prompts and decodes beside others": ("benchmarks.md", beside_others),
    "Cost of being there": ("benchmarks.md", partial(as_kept, "idle")),
    "Prefix caches of a cluster": ("benchmarks.md", caches),
    "Which mode": ("modes.md", modes),
    "Several routers": ("simulator.md", several_routers),
    "The papers' experiments": ("simulator.md", paper_classes),
    "What other ways would have cost": ("simulator.md", ways),
    "Goodput, 8B": ("simulator.md", partial(goodputs, "roofline:llama-3-8b:h100")),
    "Goodput, OPT-13B": ("simulator.md", partial(goodputs, "opt-13b-2xv100")),
    "What decisions cost": ("policies.md", decisions),
    "Accuracy of the predictor": ("predictor.md", partial(as_kept, "predictor")),
    "The length head": ("predictor.md", length_head),
    "What lengths are worth": ("predictor.md", worth),
    "What lengths are worth to engines": ("predictor.md", lengths_on_engines),
}
"""Title, page and derivation of every table of the documentation that has raw results."""


def missing(derived: str, page: str) -> list[str]:
    """Return the rows of a derived table that a page does not have; spaces do not count."""
    have = {"".join(line.split()).replace(":", "") for line in page.splitlines()}
    rows = [line for line in derived.splitlines() if "---" not in line]
    return [line for line in rows if "".join(line.split()).replace(":", "") not in have]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results of the scripts here")
    parser.add_argument("--draw", metavar="METRIC", help="also draw FILE.svg of this metric")
    parser.add_argument("--check", action="store_true", help="compare with docs/; 1 on difference")
    options = parser.parse_args()
    for path in options.files:
        head, cells = load(path)
        print(
            f"{path.name}: {json.dumps(head['conditions'])}\n\n{markdown(summary(head, cells))}\n"
        )
        if options.draw:
            draw(head, cells, options.draw, path.with_suffix(".svg"))
    wrong = 0
    for title, (page, derive) in DERIVED.items() if not options.files else ():
        derived = derive()
        if not options.check:
            print(f"## {title} (docs/{page})\n\n{derived}\n")
            continue
        for line in missing(derived, (DOCS / page).read_text()):
            print(f"docs/{page} lacks, under {title!r}: {line}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
