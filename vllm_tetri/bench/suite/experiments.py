"""Every experiment: what it asks, and the jobs of the suite that answer it.

An experiment is a question of the paper, or of one of its rivals. Several may share a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tetri.bench.suite.jobs import JOBS, Job
from vllm_tetri.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question.

    Attributes:
        name: `e1` to `e13`.
        word: What it is about.
        figures: Of the paper, or of a rival's.
        runs_on: Real engines, the simulator, or both. Paced engines are real but for the model:
            they keep the pace of an imagined device.
        jobs: Names of those that answer it.
        needs: Options of the suite without which a job of it is left out.
    """

    name: str
    word: str
    question: str
    figures: str
    runs_on: str
    jobs: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Such as `e1-classes`."""
        return f"{self.name}-{self.word}"


EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment(
            "e1",
            "classes",
            "Time to first token, completion time, resources and perf/$ by class of requests, "
            "beside one instance that does both",
            "Figures 11 to 15",
            "both",
            ("paper", "modes"),
        ),
        Experiment(
            "e2",
            "order",
            "What the order of waiting prompts does to their latency",
            "Figure 16",
            "both",
            ("order", "paper"),
        ),
        Experiment(
            "e3",
            "predictor-cost",
            "What a length predictor costs the prompts beside it",
            "Figure 17",
            "real engines",
            ("predictor",),
            ("--predictor",),
        ),
        Experiment(
            "e4",
            "accuracy",
            "How often the bucket of an answer's length is predicted",
            "section 5.2.2",
            "a predictor alone",
            ("lengths",),
            ("--predictor", "--answers"),
        ),
        Experiment(
            "e5",
            "admission",
            "What reserving memory for predicted lengths gains over greedy admission",
            "Figure 18",
            "paced engines and the simulator",
            ("admission", "paper"),
        ),
        Experiment(
            "e6",
            "dispatch",
            "How evenly policies spread answers over decode instances",
            "Figure 19",
            "paced engines and the simulator",
            ("dispatch", "decisions", "paper"),
        ),
        Experiment(
            "e7",
            "interference",
            "How requests in one batch slow each other down",
            "Figures 3, 4 and 5",
            "real engines",
            ("interference", "saturation"),
        ),
        Experiment(
            "e8",
            "saturation",
            "How many tokens a step needs to saturate the device",
            "Figure 2",
            "real engines",
            ("saturation",),
        ),
        Experiment(
            "e9",
            "flip",
            "What changing roles costs, and what it gains when the load swings",
            "Figure 10, section 3.5",
            "paced engines",
            ("flip",),
        ),
        Experiment(
            "e10",
            "transfer",
            "How fast KV travels, and what a hand-over costs the first two tokens",
            "Figure 9, section 4",
            "real engines",
            ("transfer", "handover"),
        ),
        Experiment(
            "e11",
            "capacity",
            "The largest rate at which stalls stay short",
            "Sarathi-Serve, Figures 9 and 10",
            "both",
            ("modes", "paper"),
        ),
        Experiment(
            "e12",
            "goodput",
            "Requests a second within both SLOs, by proportion of prefill to decode",
            "DistServe, Figure 1",
            "both",
            ("modes", "paper"),
        ),
        Experiment(
            "e13",
            "chunked",
            "Disaggregation beside stall-free chunked prefill on the same devices",
            "left open by Sarathi-Serve",
            "both",
            ("modes", "paper"),
        ),
    )
}


def chosen(only: str | None) -> list[Experiment]:
    """Those of ``e2,e5`` or ``e2-order,e5-admission``; all without it.

    Raises:
        ConfigError: There is none of such a name.
    """
    if only is None:
        return list(EXPERIMENTS.values())
    known = {each.title: each for each in EXPERIMENTS.values()} | EXPERIMENTS
    found = []
    for name in only.split(","):
        if name not in known:
            raise ConfigError(f"--only {name}: there are {', '.join(EXPERIMENTS)}")
        found.append(known[name])
    return [each for each in EXPERIMENTS.values() if each in found]


def jobs_of(experiments: Sequence[Experiment]) -> list[Job]:
    """What has to be run for them, in the usual order: what is soon done comes first."""
    wanted = {name for each in experiments for name in each.jobs}
    return [job for job in JOBS.values() if job.name in wanted]
