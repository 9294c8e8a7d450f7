"""What is measured at start, how it is fitted, and how it is remembered."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.engine.costs import COST as TRUTH
from vllm_tetri.engine.fit import fit
from vllm_tetri.engine.profile import Profile, ProfileStore, profile_folder, read_file
from vllm_tetri.engine.trials import Room, Rounds, Trial, plan
from vllm_tetri.policy.cost import StepCost

ROOM = Room(step=2048, requests=128, window=4096, kv=200 * 128, block=128)
CONDITIONS = {"model": "m", "device": "d"}


def takes(trial: Trial, truth: StepCost = TRUTH) -> float:
    return truth.step_s(
        trial.decodes,
        trial.decodes * trial.decode_context,
        trial.prefill,
        trial.prefill_context,
    )


def measured(room: Room, *, with_decodes: bool = True, slower: float = 1.0) -> dict[Trial, float]:
    rounds = Rounds(plan(room, with_decodes=with_decodes))
    while (trial := rounds.next()) is not None:
        rounds.record(trial, takes(trial) * slower)
    return rounds.steps


def profile(room: Room = ROOM) -> Profile:
    return fit(measured(room), block_tokens=room.block, tile_tokens=16, took_s=7.0)


# -- trials -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "room",
    [
        ROOM,
        Room(step=2048, requests=1, window=4096, kv=1 << 20, block=128),
        Room(step=64, requests=64, window=4096, kv=4096, block=16),
        Room(step=2048, requests=64, window=40, kv=1 << 20, block=16),
        Room(step=8, requests=8, window=4096, kv=1 << 20, block=16),
        Room(step=2048, requests=256, window=8, kv=128, block=128),
    ],
)
def test_every_trial_fits_the_engine_and_some_chunk_is_measured(room: Room) -> None:
    steps = measured(room)
    assert all(room.holds(trial) for trial in steps)
    assert any(trial.prefill and not trial.decodes and not trial.prefill_context for trial in steps)


def test_contexts_are_whole_blocks() -> None:
    steps = measured(Room(step=2048, requests=128, window=4096, kv=1 << 20, block=48))
    assert all(trial.decode_context % 48 == trial.prefill_context % 48 == 0 for trial in steps)


def test_chunks_stop_to_grow_where_it_no_longer_pays() -> None:
    assert max(trial.prefill for trial in measured(ROOM)) == 1024  # 2.5 % above 256


def test_a_slow_machine_is_not_asked_for_long_steps() -> None:
    steps = measured(ROOM, slower=20)
    assert max(trial.prefill for trial in steps if not trial.decodes) == 128
    assert max(takes(trial) * 20 for trial in steps) < 3


def test_without_decodes_only_the_curve_is_measured() -> None:
    steps = measured(ROOM, with_decodes=False)
    assert all(trial == Trial(prefill=trial.prefill) for trial in steps)


def test_later_rounds_repeat_the_first_and_the_best_time_counts() -> None:
    rounds = Rounds(plan(ROOM, with_decodes=True))
    first = []
    while (trial := rounds.next()) is not None:
        rounds.record(trial, takes(trial))
        first.append(trial)
    rounds.start_over()
    second = []
    while (trial := rounds.next()) is not None:
        rounds.record(trial, takes(trial) * (0.9 if trial.decodes else 1.1))
        second.append(trial)
    assert second == list(dict.fromkeys(first))
    assert rounds.steps == {
        trial: takes(trial) * (0.9 if trial.decodes else 1.0) for trial in second
    }


def test_a_trial_that_could_not_be_measured_ends_its_series() -> None:
    rounds = Rounds(plan(ROOM, with_decodes=False))
    asked = []
    while (trial := rounds.next()) is not None:
        asked.append(trial.prefill)
        if trial.prefill < 128:
            rounds.record(trial, takes(trial))
    assert asked[-1] == 128


# -- fit --------------------------------------------------------------------------


def test_fit_finds_the_costs_that_made_the_steps() -> None:
    found = profile().cost
    assert found.context_s == pytest.approx(TRUTH.context_s, rel=0.01)
    assert found.base_s == pytest.approx(TRUTH.base_s, rel=0.01)
    assert found.request_s == pytest.approx(TRUTH.request_s, rel=0.01)
    assert found.token_s == pytest.approx(TRUTH.token_s, rel=0.01)
    assert found.shared_s == pytest.approx(TRUTH.shared_s, rel=0.01)
    for trial in measured(ROOM):
        assert takes(trial, found) == pytest.approx(takes(trial), rel=0.01)


def test_fitted_costs_are_never_negative() -> None:
    steps = measured(ROOM)
    for trial in steps:  # a disturbed machine: larger batches seem to be cheaper
        if trial.decodes > 1 or trial.prefill_context:
            steps[trial] *= 0.1
    cost = fit(steps, block_tokens=128, tile_tokens=16, took_s=1.0).cost
    assert min(cost.context_s, cost.base_s, cost.request_s, cost.token_s, cost.shared_s) >= 0


def test_a_longer_chunk_is_never_predicted_to_be_faster() -> None:
    steps = measured(ROOM) | {Trial(prefill=256): 0.001}
    found = fit(steps, block_tokens=128, tile_tokens=16, took_s=1.0)
    seconds = [point.seconds for point in found.cost.curve]
    assert seconds == sorted(seconds)


def test_chunk_is_whole_blocks_and_whole_tiles() -> None:
    assert profile().chunk_tokens == 128
    steps = measured(ROOM)
    assert fit(steps, block_tokens=48, tile_tokens=32, took_s=1.0).chunk_tokens % 96 == 0


# -- remembering ------------------------------------------------------------------


def test_a_profile_is_remembered(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new" / "folder", CONDITIONS)
    assert store.load() is None
    store.save(profile())
    assert store.load() == profile()
    assert json.loads(store.path.read_text())["conditions"] == CONDITIONS
    assert [path.name for path in store.path.parent.iterdir()] == [store.path.name]


def test_other_conditions_are_another_file(tmp_path: Path) -> None:
    ProfileStore(tmp_path, CONDITIONS).save(profile())
    assert ProfileStore(tmp_path, {**CONDITIONS, "device": "e"}).load() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda text: "", "truncated"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2"),
        (lambda text: text.replace('"device": "d"', '"device": "e"'), "other conditions"),
        (lambda text: text.replace('"chunk_tokens": 128', '"chunk_tokens": 0'), "numbers"),
        (lambda text: text.replace('"chunk_tokens": 128', '"chunk_tokens": "x"'), "chunk_tokens"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: object, reason: str
) -> None:
    store = ProfileStore(tmp_path, CONDITIONS)
    store.save(profile())
    text = store.path.read_text()
    assert callable(change)
    changed = change(text)
    assert changed != text
    store.path.write_text(changed)
    with caplog.at_level(logging.WARNING, logger="vllm_tetri"):
        assert store.load() is None
    (line,) = caplog.messages
    assert str(store.path) in line
    assert reason in line


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file", CONDITIONS)
    with caplog.at_level(logging.WARNING, logger="vllm_tetri"):
        store.save(profile())
        assert store.load() is None
    assert "cannot be remembered" in caplog.messages[0]


def test_where_profiles_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETRI_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert profile_folder() == Path("/own/profiles")
    monkeypatch.delenv("TETRI_CACHE")
    assert profile_folder() == Path("/xdg/vllm-tetri/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_folder() == Path.home() / ".cache/vllm-tetri/profiles"


def test_read_file_tells_the_conditions(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, CONDITIONS)
    store.save(profile())
    assert read_file(store.path).conditions == CONDITIONS
