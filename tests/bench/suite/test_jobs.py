"""What there is to run."""

from __future__ import annotations

import argparse
import importlib

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.suite.experiments import EXPERIMENTS, chosen, jobs_of
from vllm_tetri.bench.suite.jobs import ANSWERS, JOBS, MODEL, OUTPUT, PREDICTOR, RIVAL, Job
from vllm_tetri.errors import ConfigError

KNOWN = {MODEL: "model", OUTPUT: "out", PREDICTOR: "predictor", ANSWERS: "answers.jsonl"}


def test_every_experiment_has_jobs_and_every_job_an_experiment() -> None:
    assert list(EXPERIMENTS) == [f"e{number}" for number in range(1, 14)]
    assert {name for each in EXPERIMENTS.values() for name in each.jobs} == set(JOBS)


def test_the_quick_suite_is_meant_for_a_quarter_of_an_hour() -> None:
    without = [job for job in JOBS.values() if not {PREDICTOR, ANSWERS} & {*job.quick.words}]
    assert sum(job.quick.minutes for job in without) <= 15


@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_every_command_takes_its_options(job: Job, is_quick: bool) -> None:
    words = job.line(is_quick, {**KNOWN, RIVAL: "/bin/true"}, [])
    command = next((each for each in cli.COMMANDS if each.name == " ".join(words[:2])), None)
    assert command is not None
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    assert command.tail or "--" not in words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(command.module).add_arguments(parser)
    parser.parse_args(own)


def test_a_rival_and_options_of_vllm_go_where_they_are_of_use() -> None:
    modes = JOBS["modes"]
    with_rival = modes.line(False, {**KNOWN, RIVAL: "/r"}, ["--dtype", "float32"])
    assert with_rival[with_rival.index("--rival") + 1] == "/r"
    assert with_rival[-3:] == ["--", "--dtype", "float32"]
    assert "--rival" not in modes.line(False, KNOWN, [])
    # A small model keeps a pace there: what it computes is not the user's matter.
    assert "--dtype" not in JOBS["flip"].line(False, KNOWN, ["--dtype", "float32"])


def test_experiments_are_chosen_by_either_name() -> None:
    assert [each.name for each in chosen("e5-admission,e2")] == ["e2", "e5"]
    assert len(chosen(None)) == 13
    with pytest.raises(ConfigError, match="e14"):
        chosen("e2,e14")


def test_a_shared_job_runs_once() -> None:
    names = [job.name for job in jobs_of(chosen("e1,e11,e12,e13"))]
    assert sorted(names) == ["modes", "paper"]
