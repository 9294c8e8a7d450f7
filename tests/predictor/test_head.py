"""The length head: what it learns, when it is used, and what it does with bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from vllm_tetri.predictor import learning
from vllm_tetri.predictor.base import Query
from vllm_tetri.predictor.head import Floats, Learner, Weights
from vllm_tetri.predictor.learning import Comparison, HeadPredictor
from vllm_tetri.types import Prediction

WIDTH = 16
DICE = np.random.default_rng(5)


def output() -> tuple[Floats, int]:
    """A state, one of whose dimensions tells how long the output is: 20 to 320 tokens."""
    state = DICE.standard_normal(WIDTH).astype(np.float32)
    return state, round(80 * 2 ** float(np.clip(state[3], -2, 2)))


def outputs(count: int) -> list[tuple[Floats, int]]:
    return [output() for _ in range(count)]


def taught(learner: Learner, count: int, cut_at: int = 1000, *, is_told: bool = True) -> Learner:
    """A learner of outputs, every other one of which is cut."""
    for at in range(count):
        state, length = output()
        limit = cut_at if at % 2 else length
        learner.add(state, min(length, limit), is_cut=is_told and length > limit)
    learner.refresh()
    return learner


def along(value: float) -> Floats:
    """A state whose output has `80 * 2**value` tokens in the mean."""
    state = np.zeros(WIDTH, np.float32)
    state[3] = value
    return state


def test_it_learns_what_the_state_tells() -> None:
    learner = taught(Learner(WIDTH), 31)
    assert learner.weights is None  # too few
    weights = taught(learner, 200).weights
    assert weights is not None
    told = [(weights.predict(state).median_tokens, length) for state, length in outputs(200)]
    error = np.mean([abs(expected - length) for expected, length in told])
    usual = np.mean([abs(weights.usual_tokens - length) for _, length in told])
    assert error < 0.5 * usual


def test_nine_of_ten_outputs_are_within_their_interval() -> None:
    weights = taught(Learner(WIDTH), 400).weights
    assert weights is not None
    found = [(weights.predict(state).lengths, length) for state, length in outputs(1000)]
    inside = [lengths[0] <= length <= lengths[-1] for lengths, length in found]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.04)


def test_what_was_cut_off_would_have_been_longer() -> None:
    told, untold = (taught(Learner(WIDTH), 400, 60, is_told=told).weights for told in (True, False))
    assert told is not None
    assert untold is not None
    longer, shorter = (each.predict(along(2.0)).median_tokens for each in (told, untold))
    assert longer > 1.2 * shorter


def test_states_that_are_no_numbers_are_left_out() -> None:
    learner = Learner(WIDTH)
    for state in (np.full(WIDTH, np.nan), np.full(WIDTH, np.inf), np.zeros(WIDTH + 1)):
        learner.add(state.astype(np.float32), 10)
    assert learner.num_samples == 0


def test_a_comparison_needs_outputs_and_does_not_flutter() -> None:
    comparison = Comparison()
    for _ in range(31):
        comparison.add(10, 100)
    assert not comparison.is_good
    comparison.add(10, 100)
    assert comparison.is_good
    for _ in range(2000):
        comparison.add(99, 100)
    assert comparison.is_good  # no better than by a hair, but it was
    for _ in range(600):
        comparison.add(120, 100)
    assert not comparison.is_good
    for _ in range(2000):
        comparison.add(99, 100)
    assert not comparison.is_good


@pytest.fixture(autouse=True)
def _learns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "SHARE", 1.0)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[HeadPredictor]:
    head = HeadPredictor(tmp_path / "lengths" / "head.json", WIDTH)
    yield head
    head.close()


def one(head: HeadPredictor, name: str) -> Prediction | None:
    """Let an output end whose prompt's state was read, and return its prediction."""
    state, length = output()
    head.ask(Query(name, [1]))
    head.take(name, state)
    ((asked, prediction),) = head.poll()
    assert asked == name
    head.learn(name, length, is_cut=False)
    return prediction


def one_of_eight(head: HeadPredictor) -> bool:
    predictions = [one(head, str(at)) for at in range(8)]
    return any(predictions)


def serve_until_used(head: HeadPredictor) -> None:
    eventually(lambda: one_of_eight(head), 30, "it predicts")


def test_it_predicts_once_it_is_better_than_the_histogram(head: HeadPredictor) -> None:
    assert one(head, "a") is None
    serve_until_used(head)
    for name, value in (("long", 1.8), ("short", -1.8)):
        head.ask(Query(name, [1]))
        head.take(name, along(value))
    (_, longer), (_, shorter) = head.poll()
    assert longer is not None
    assert shorter is not None
    assert longer.median_tokens > 2 * shorter.median_tokens


def test_it_says_nothing_where_the_histogram_is_better(tmp_path: Path) -> None:
    head = HeadPredictor(tmp_path / "head.json", WIDTH)
    for at in range(300):
        head.ask(Query(str(at), [1]))
        head.take(str(at), DICE.standard_normal(WIDTH).astype(np.float32))
        head.learn(str(at), 150, is_cut=False)
        assert [prediction for _, prediction in head.poll()] == [None]
    head.close()


def test_states_are_read_after_the_first_chunk_and_at_the_end(head: HeadPredictor) -> None:
    head.ask(Query("a", [1]))
    assert [head.wants("a", left) for left in (90, 80, 0)] == [True, False, True]
    assert "a" not in head.unread  # its output tells nothing
    head.ask(Query("b", [1]))
    assert not head.wants("b", -1)  # it came with its output
    assert not head.unread


def test_an_output_of_another_instance_is_learnt_by_its_transfer(head: HeadPredictor) -> None:
    for at in range(40):
        head.ask(Query("a", [1]))
        state, length = output()
        head.take("a", state)
        head.park("a", f"t{at}")
        head.learn(f"t{at}", length, is_cut=False)
        head.learn(f"t{at}", length, is_cut=False)  # told twice
    eventually(lambda: head.learner.num_samples == 40, 10, "all were learnt once")


def test_a_state_that_comes_after_its_prompt_was_handed_over_is_learnt(tmp_path: Path) -> None:
    head = HeadPredictor(tmp_path / "head.json", WIDTH)
    for at in range(40):
        name, (state, length) = f"r{at}", output()
        head.ask(Query(name, [1]))
        assert head.wants(name, 0)
        head.park(name, f"t{at}")
        head.take(name, state)
        head.take(name, state)  # once is enough
        head.learn(f"t{at}", length, is_cut=False)
    head.ask(Query("a", [1]))
    head.park("a", "t")  # nothing of it was computed
    head.take("a", output()[0])
    head.learn("t", 5, is_cut=False)
    head.close()
    assert head.learner.num_samples == 40


def test_of_an_output_one_state_is_learnt(tmp_path: Path) -> None:
    head = HeadPredictor(tmp_path / "head.json", WIDTH)
    for at in range(40):
        state, length = output()
        head.ask(Query(str(at), [1]))
        head.take(str(at), state)
        head.take(str(at), state)  # at the end of its prompt
        head.learn(str(at), length, is_cut=False)
    head.close()
    assert head.learner.num_samples == 40


def test_numbers_that_are_none_are_said_once(
    head: HeadPredictor, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        head.ask(Query(name, [1]))
        head.take(name, np.full(WIDTH, np.nan, np.float32))
        assert head.poll() == [(name, None)]
    assert caplog.text.count("not finite") == 1
    assert head.tally.failed == 2


def test_what_cannot_be_solved_leaves_the_map_and_the_thread(
    head: HeadPredictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(matrix: Any) -> Any:
        raise np.linalg.LinAlgError("does not converge")

    serve_until_used(head)
    with monkeypatch.context() as patched:
        patched.setattr(np.linalg, "eigh", fails)

        def is_said() -> bool:
            one_of_eight(head)
            return "does not converge" in caplog.text

        eventually(is_said, 30, "that it was not solved is said")
    before = head.comparison.num_outputs
    eventually(lambda: one_of_eight(head) and head.comparison.num_outputs > before, 30)


def test_a_first_start_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HeadPredictor(tmp_path / "head.json", WIDTH).close()
    assert caplog.messages == []


def test_a_damaged_file_is_one_line_and_a_restart_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "head.json"
    path.with_suffix(".head").write_bytes(b"no archive")
    head = HeadPredictor(path, WIDTH)
    assert caplog.text.count("is ignored") == 1
    serve_until_used(head)
    head.close()
    again = HeadPredictor(path, WIDTH)
    assert again.weights is not None
    assert head.weights is not None
    assert again.weights.pack() == head.weights.pack()
    again.close()
    assert caplog.text.count("is ignored") == 1


def test_what_one_learns_another_uses_until_it_knows_more(
    head: HeadPredictor, tmp_path: Path
) -> None:
    serve_until_used(head)
    packed = head.share(1e9)
    assert packed is not None
    assert head.share(1e9) is None  # for a while
    other = HeadPredictor(tmp_path / "other.json", WIDTH)
    other.adopt(packed, 0.0)
    given = other.weights
    assert given is not None
    assert given.pack() == packed
    assert other.share(1e9) is None  # it has learnt nothing
    eventually(lambda: one_of_eight(other), 30, "it predicts")
    eventually(
        lambda: bool(one_of_eight(other)) and other.weights is not given, 30, "it knows as much"
    )
    other.close()


def test_a_map_that_is_damaged_or_of_another_model_is_refused() -> None:
    weights = taught(Learner(WIDTH), 100).weights
    assert weights is not None
    packed = weights.pack()
    assert Weights.unpack(packed, WIDTH).predict(along(1.0)) == weights.predict(along(1.0))
    numbers = np.frombuffer(packed, np.float32).copy()
    numbers[2] = 99.0  # the lowest quantile
    for other in (b"", packed[:-4], packed[:-1], numbers.tobytes(), b"\xff" * len(packed)):
        with pytest.raises(ValueError):
            Weights.unpack(other, WIDTH)
    with pytest.raises(ValueError, match="no map"):
        Weights.unpack(packed, WIDTH + 1)
