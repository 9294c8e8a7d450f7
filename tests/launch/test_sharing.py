"""The choice of how instances share cores: measured once, remembered, never fatal."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.launch.fakes import is_alive
from vllm_tetri.launch import trial
from vllm_tetri.launch.sharing import MAX_OTHERS_PART, best_sharing
from vllm_tetri.launch.trial import Trial, TrialError
from vllm_tetri.policy.placement import Machine, Measured, Sharing
from vllm_tetri.types import Role

FAKE = Path(__file__).with_name("fake_trial.py")
MACHINE = Machine(cores=(0, 1), gpus=(), memory_bytes=1 << 30)
PAIR = (Role.PREFILL, Role.DECODE)
SPLIT = Measured(1000, 1000, 0.01, 0.01, 0.01, 0.01)
SHARED = replace(SPLIT, prompt_alone_tokens_per_s=1800)


class FakeMeasure:
    """Measures in no time, and counts."""

    def __init__(
        self,
        shared: Measured = SHARED,
        *,
        others_part: float = 0.0,
        error: Exception | None = None,
    ) -> None:
        self.calls = 0
        self._others_part = others_part
        self._shared = shared
        self._error = error

    async def __call__(self, roles: Sequence[Role], machine: Machine, dtype: str) -> Trial:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return Trial(SPLIT, self._shared, self._others_part)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETRI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "placement"


def choose(
    measure: FakeMeasure,
    *,
    roles: Sequence[Role] = PAIR,
    machine: Machine = MACHINE,
    dtype: str = "float32",
) -> tuple[Sharing, list[str]]:
    """The choice, and the lines that were shown."""
    said: list[str] = []
    return asyncio.run(best_sharing(roles, machine, dtype, said.append, measure)), said


def test_the_better_way_is_taken_and_explained() -> None:
    assert choose(FakeMeasure(shared=SPLIT))[0] is Sharing.SPLIT

    sharing, said = choose(FakeMeasure(), dtype="bfloat16")
    assert sharing is Sharing.SHARED
    assert said[0].startswith("measuring")
    assert "cores: shared (measured): " in said[1]
    assert "1.80 x" in said[1]


def test_a_second_start_remembers(cache: Path) -> None:
    measure = FakeMeasure()
    first, _ = choose(measure)
    second, said = choose(measure)

    assert (first, second, measure.calls) == (Sharing.SHARED, Sharing.SHARED, 1)
    assert said[0].startswith("cores: shared (remembered)")
    assert len(list(cache.iterdir())) == 1


def test_other_conditions_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = FakeMeasure()
    choose(measure)
    choose(measure, machine=replace(MACHINE, cores=(2, 3)))
    choose(measure, dtype="bfloat16")
    choose(measure, roles=(Role.BOTH, Role.BOTH))
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    choose(measure)
    monkeypatch.setattr("vllm_tetri.launch.sharing.cpu_name", lambda: "another CPU")
    choose(measure)

    assert measure.calls == 6


def test_memory_and_the_number_of_instances_change_nothing() -> None:
    measure = FakeMeasure()
    four = Machine(cores=(0, 1, 2, 3), gpus=(), memory_bytes=1 << 30)
    choose(measure, machine=four)
    choose(measure, machine=replace(four, memory_bytes=1 << 31), roles=(*PAIR, Role.DECODE))

    assert measure.calls == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 1, "conditions": {}, "measured": {}}']
)
def test_a_damaged_file_is_measured_anew(cache: Path, content: str) -> None:
    measure = FakeMeasure()
    choose(measure)
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_text(content)

    assert choose(measure)[0] is Sharing.SHARED
    assert measure.calls == 2
    assert path.read_text() == whole


def test_impossible_figures_are_measured_anew(cache: Path) -> None:
    measure = FakeMeasure()
    choose(measure)
    (path,) = cache.iterdir()
    path.write_text(path.read_text().replace("0.01", "0.0"))

    assert choose(measure)[0] is Sharing.SHARED
    assert measure.calls == 2


@pytest.mark.parametrize("error", [TrialError("no torch"), OSError("no processes left")])
def test_without_a_measurement_cores_are_split_and_nothing_is_remembered(
    cache: Path, error: Exception
) -> None:
    sharing, said = choose(FakeMeasure(error=error))

    assert sharing is Sharing.SPLIT
    assert said[-1] == f"cores: split; measuring was not possible: {error}"
    assert not cache.exists()


def test_on_a_busy_machine_cores_are_split_until_it_can_be_measured() -> None:
    sharing, said = choose(FakeMeasure(others_part=MAX_OTHERS_PART + 0.3))

    assert sharing is Sharing.SPLIT
    assert "took 40% of the cores" in said[-1]
    assert choose(FakeMeasure(others_part=MAX_OTHERS_PART))[0] is Sharing.SHARED


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.parent.write_text("a file where the folder would be")
    sharing, said = choose(FakeMeasure())

    assert sharing is Sharing.SHARED
    assert any("cannot be remembered" in line for line in said)


@pytest.fixture
def fake_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that tells fake processes what to do; two cores are made up."""
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setattr(trial, "WORK", (sys.executable, str(FAKE)))
    monkeypatch.setattr(trial, "trial_placements", _unpinned)
    return tmp_path


def _unpinned(roles: Sequence[Role], machine: Machine) -> object:
    return {
        way: tuple(replace(one, cores=()) for one in pair)
        for way, pair in _PLACEMENTS(roles, machine).items()
    }


_PLACEMENTS = trial.trial_placements


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "trial.pids").read_text().split()]


def test_processes_are_asked_and_ended(fake_trial: Path) -> None:
    (fake_trial / "trial.shares").touch()
    found = asyncio.run(trial.measure(PAIR, MACHINE, "float32"))
    split, shared = found.split, found.shared

    assert shared.prompt_alone_tokens_per_s == pytest.approx(2 * split.prompt_alone_tokens_per_s)
    assert shared.step_beside_p99_s == split.step_beside_p99_s == 0.01
    assert len(pids(fake_trial)) == 4
    assert not any(map(is_alive, pids(fake_trial)))


def test_a_process_that_ends_is_an_error_with_its_last_words(fake_trial: Path) -> None:
    (fake_trial / "trial.dies").touch()
    with pytest.raises(TrialError, match="no torch here"):
        asyncio.run(trial.measure(PAIR, MACHINE, "float32"))

    assert not any(map(is_alive, pids(fake_trial)))


def test_what_others_take_of_the_cores_is_seen(
    fake_trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 20.0])  # seconds of each core so far, from look to look
    times = psutil.cpu_times()._replace(nice=0, system=0, irq=0, softirq=0, steal=0)
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: 2 * [times._replace(user=next(clock))])
    monkeypatch.setattr(trial, "ROUNDS", 1)
    found = asyncio.run(trial.measure(PAIR, MACHINE, "float32"))

    assert found.others_part == 1  # 20 seconds within the moment that fakes take


def test_processes_that_hang_are_given_up(
    fake_trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_LIMIT_S", 1.0)
    (fake_trial / "trial.hangs").touch()
    with pytest.raises(TrialError, match="not done within 1 s"):
        asyncio.run(trial.measure(PAIR, MACHINE, "float32"))

    assert not any(map(is_alive, pids(fake_trial)))


def test_the_processes_do_work() -> None:
    orders = b'{"start": 0, "seconds": 0}\n' * 2
    for kind in ("prompts", "steps"):
        words = [sys.executable, "-m", "vllm_tetri.launch.trial_work", kind, "float32"]
        done = subprocess.run(words, input=orders, capture_output=True, timeout=120, check=True)
        ready, *answers = map(json.loads, done.stdout.splitlines())

        assert ready["took"] == []
        assert [len(answer["took"]) for answer in answers] == [1, 1]
        assert 0 < ready["cpu_s"] <= answers[0]["cpu_s"] <= answers[1]["cpu_s"]


def test_up_itself_needs_no_torch() -> None:
    program = "import sys, vllm_tetri.launch.up as up; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
