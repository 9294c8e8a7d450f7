"""The report's page, from the top down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_tetri.bench.modes import nixl
from vllm_tetri.bench.modes.systems import NIXL, REPLICAS
from vllm_tetri.bench.report.claims import Claim
from vllm_tetri.bench.report.document import (
    Block,
    Document,
    Folded,
    Heading,
    Items,
    Picture,
    Table,
    Text,
)
from vllm_tetri.bench.report.load import Loaded
from vllm_tetri.bench.report.losses import beside, losses
from vllm_tetri.bench.report.tables import (
    NOT_RUN,
    NOTHING,
    chunked_table,
    claims_table,
    losses_table,
    perf_table,
    tally,
    values_table,
)
from vllm_tetri.bench.report.values import Source, Values
from vllm_tetri.bench.suite.experiments import EXPERIMENTS, Experiment, jobs_of
from vllm_tetri.bench.suite.jobs import RIVAL, Job

Maker = Callable[[Values, Source], Table | None]

TITLE = "vllm-tetri: experiments, beside the papers' numbers"
_FOLDED_ROWS = 12
_READING = (
    "Means over repeats, ± half a 95 % interval (Student); without ± there was one repeat. "
    "Ratios are taken repeat by repeat, over equal requests. *Measured*: real engines, on the "
    "device that stands below each experiment. *Paced*: real engines, but with a small model that "
    "keeps the pace of an imagined device; times are that device's (but not "
    "those of a flip itself, which are real seconds). *Simulated*: virtual time, "
    "from what steps cost. *Estimate*: computed from measured step costs. Numbers of papers are "
    "what their texts state, on other devices and models; nothing here was run on those."
)
_REFUSED = (
    "Times and resources of real engines are of repeats in which every request was answered: of "
    "those with a refusal they would be the survivors'. Goodput and shares count all requests, "
    "and *refused or failed*, in [e1](#e1), tells how many had no answer."
)
_NO_RIVAL = (
    "vllm-router (`replicas`) was not run, so it is among nobody's rivals: the full suite takes "
    "it with `--rival PROGRAM`."
)
_PERF = (
    "Performance per dollar by two formulas. The paper states none; (1 + JCT reduction) / "
    "resource ratio gives all five of its numbers. The plain one is speed per resource: "
    "1 / (JCT ratio · resource ratio). Resource time of real engines is the time of cores that "
    "a system and its client used."
)
_CHUNKED = (
    "Systems that hand over, beside the best one that shares steps between decodes and chunks of "
    "prompts. Below 1 is better for times, above 1 for goodput; ✓ and ✗ where the interval "
    "leaves out 1."
)
_LOSSES = (
    "Computed from all results on this page: everything asked of a system of ours that hands "
    "over, or decides whether to, and of another one, where ours is worse than the best of the "
    "others, however little. The best is chosen for each row, so nobody could run all of them at "
    "once."
)


def document(loaded: Loaded, claims: Mapping[str, Sequence[Claim]], drawn: Mapping[str, Path],
             suite: str) -> Document:  # fmt: skip
    """The page.

    Args:
        claims: Of every experiment.
        drawn: Pictures of them, by experiment.
        suite: How to run what is missing.
    """
    blocks: list[Block] = [*_top(loaded), *_overview(loaded), *_losses(loaded)]
    for each in EXPERIMENTS.values():
        blocks += _experiment(each, loaded, claims[each.name], drawn.get(each.name), suite)
    return Document(TITLE, blocks)


def _top(loaded: Loaded) -> list[Block]:
    told = "No `suite.json`: this folder was put together by hand."
    if loaded.record is not None:
        conditions = loaded.record.conditions.items()
        told = "; ".join(f"{name.replace('_', ' ')}: {_plain(each)}" for name, each in conditions)
        told = f"The suite's conditions: {told}."
    return [Text(told), Text(_READING), Text(_REFUSED)]


def _plain(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _overview(loaded: Loaded) -> list[Block]:
    rows = []
    for each in EXPERIMENTS.values():
        states = [f"{job.name}: {loaded.state(job.name)}" for job in jobs_of([each])]
        title = f"[{each.title}](#{each.name})"
        rows.append([title, each.question, each.figures, each.runs_on, "; ".join(states)])
    heads = ["experiment", "question", "paper", "runs on", "state"]
    return [Heading(2, "Experiments", "experiments"), Table(heads, rows, num_text=len(heads))]


def _losses(loaded: Loaded) -> list[Block]:
    blocks: list[Block] = [Heading(2, "Where disaggregation loses", "losses"), Text(_LOSSES)]
    every, lost = beside(loaded.values.all), losses(loaded.values.all)
    if not every:
        return [*blocks, Text("Nothing to compare was run.")]
    if _lacks_rival(loaded):
        blocks.append(Text(_NO_RIVAL))
    if any(each.system == NIXL for each in loaded.values.all):
        blocks.append(Text(nixl.CAVEAT))
    blocks.append(Items(tally(every)))
    if lost:
        blocks.append(_long("All of it", losses_table(lost)))
    return blocks


def _lacks_rival(loaded: Loaded) -> bool:
    """Whether results are there that it should stand beside."""
    return loaded.has("modes") and all(each.system != REPLICAS for each in loaded.values.all)


def _experiment(
    each: Experiment, loaded: Loaded, claims: Sequence[Claim], drawn: Path | None, suite: str
) -> list[Block]:
    blocks: list[Block] = [
        Heading(2, each.title, each.name),
        Text(f"{each.question}. {_capital(each.figures)}."),
        claims_table(claims),
    ]
    if drawn is not None:
        caption = f"{_capital(each.figures)}: numbers of papers, and ours beside them"
        blocks.append(Picture(drawn, caption))
    if each.name == "e1":
        blocks += _by_source(loaded, _PERF, perf_table)
    if each.name == "e13":
        blocks += _by_source(loaded, _CHUNKED, chunked_table)
    for source in Source:
        found = loaded.values.of(each.name, source)
        if found:
            blocks.append(_long(f"All results, {source}", values_table(found)))
    jobs = jobs_of([each])
    blocks += _pictures(each, jobs, loaded)
    return [*blocks, Items([_state(each, job, loaded, suite) for job in jobs])]


def _by_source(loaded: Loaded, text: str, make: Maker) -> list[Block]:
    made = {source: make(loaded.values, source) for source in (Source.SIMULATED, Source.MEASURED)}
    blocks: list[Block] = [Text(text)]
    for source, table in made.items():
        if table is None:
            blocks.append(Text(f"{source.value.capitalize()}: {NOT_RUN}."))
        else:
            blocks.append(_long(source.value.capitalize(), table))
    return blocks


def _long(summary: str, table: Table) -> Folded:
    """A table that is open when it is short."""
    count = len(table.rows)
    return Folded(f"{summary} ({count} row{'s' * (count != 1)})", table, count <= _FOLDED_ROWS)


def _pictures(each: Experiment, jobs: Sequence[Job], loaded: Loaded) -> list[Block]:
    return [
        Picture(path, f"{_capital(each.figures)}: `vllm-tetri {job.command}`, {path.stem}")
        for job in jobs
        for path in loaded.pictures.get(job.name, [])
        if _is_shown(each, job)
    ]


def _is_shown(each: Experiment, job: Job) -> bool:
    """Several experiments may share a job: its pictures belong to the first of them."""
    return next(one for one in EXPERIMENTS.values() if job.name in one.jobs) is each


def _state(each: Experiment, job: Job, loaded: Loaded, suite: str) -> str:
    """What became of a job, under which conditions, and how to run it."""
    text = f"`vllm-tetri {job.command}`: {loaded.state(job.name)}."
    if loaded.has(job.name):
        conditions = loaded.conditions[job.name] or NOTHING
        rival = (
            " Without the rival, vllm-router."
            if RIVAL in job.full.words and _lacks_rival(loaded)
            else ""
        )
        return f"{text} Conditions: {conditions}.{rival}"
    needs = "".join(f" {option} ..." for option in each.needs)
    return f"{text} Run it with `{suite} --only {each.name}{needs}`."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
