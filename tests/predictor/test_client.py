"""The engine's end of a predictor process: answers, and what can happen to the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.predictor import client
from examples.predictor.client import QUEUE_PROMPTS, PredictorProcess, serve_command
from examples.predictor.model import load
from tests.launch.fakes import is_alive, until
from tests.predictor.tiny_artefact import make
from vllm_tetri.predictor.base import Query
from vllm_tetri.types import Prediction

FAKE = Path(__file__).with_name("fake_server.py")
HANGS, WRONG = [667], [668]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.01)


class Asking:
    """A predictor process that is asked as an engine does."""

    def __init__(self, process: PredictorProcess) -> None:
        self.process = process
        self.answers: dict[str, Prediction | None] = {}

    def ask(self, name: str, token_ids: list[int]) -> None:
        self.process.ask(Query(name, token_ids))
        self.step()

    def step(self) -> None:
        self.answers.update(self.process.poll())

    def wait_for(self, *names: str) -> None:
        def are_there() -> bool:
            self.step()
            return set(names) <= set(self.answers)

        until(are_there, f"answers to {names}")

    def is_serving(self) -> bool:
        """Asks until the process answers; it is away while it starts."""
        self.answers.pop("ping", None)
        self.ask("ping", [1])
        self.wait_for("ping")
        return self.answers["ping"] is not None

    def start(self) -> None:
        until(self.is_serving, "the process serves")


@contextmanager
def asking(*words: str) -> Iterator[Asking]:
    made = Asking(PredictorProcess([sys.executable, str(FAKE), *words], 200, 10))
    try:
        yield made
    finally:
        made.process.close()
        made.process.close()


@pytest.fixture
def served() -> Iterator[Asking]:
    with asking() as made:
        made.start()
        yield made


def test_answers_are_predictions(served: Asking) -> None:
    served.ask("a", [1] * 3)
    served.ask("b", [])
    served.wait_for("a", "b")
    assert served.answers["a"] == Prediction.of_bucket(3, 200)
    assert served.answers["b"] == Prediction.of_bucket(0, 200)
    assert served.process.tally.made >= 2


def test_a_process_that_is_not_there_costs_only_the_prediction() -> None:
    with asking() as made:
        made.ask("a", [1])  # it takes a moment to start
        made.wait_for("a")
        assert made.answers["a"] is None
        assert made.process.tally.failed == 1
        made.start()


def test_what_was_asked_dies_with_the_process_and_it_comes_back(served: Asking) -> None:
    first = served.process.process
    served.ask("a", HANGS)
    served.ask("b", [1])
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    served.wait_for("a", "b")
    assert served.answers["a"] is None
    assert served.answers["b"] is None
    assert served.process.tally.failed >= 2
    served.start()
    assert served.process.process not in (None, first)


def test_a_process_that_cannot_start_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    with asking("--fail", str(broken)) as made, caplog.at_level("WARNING"):
        until(lambda: caplog.text.count("ended with status 2") >= 2, "two attempts")
        broken.unlink()
        made.start()


def test_too_many_prompts_are_refused_at_once(served: Asking) -> None:
    refused = served.process.tally.refused
    served.ask("first", HANGS)
    for number in range(QUEUE_PROMPTS):
        served.process.ask(Query(str(number), [1]))
    served.step()
    assert served.answers == {"ping": Prediction.of_bucket(1, 200), "255": None}
    assert served.process.tally.refused == refused + 1


def test_a_withdrawn_prompt_makes_room_and_gets_no_answer(served: Asking) -> None:
    for number in range(QUEUE_PROMPTS):
        served.process.ask(Query(str(number), [1]))
    served.process.withdraw("0")
    served.process.withdraw("unknown")
    served.process.ask(Query("new", [1, 2]))
    served.wait_for("new", *(str(number) for number in range(1, QUEUE_PROMPTS)))
    assert served.answers["new"] == Prediction.of_bucket(2, 200)
    assert "0" not in served.answers
    assert served.process.tally.refused == 0


def test_a_name_that_is_asked_again_gets_the_answer_to_the_later_prompt(served: Asking) -> None:
    failed = served.process.tally.failed
    served.process.ask(Query("a", [1]))
    served.process.poll()
    served.process.ask(Query("a", [1, 2]))
    served.wait_for("a")
    assert served.answers["a"] == Prediction.of_bucket(2, 200)
    assert served.process.tally.failed == failed


def test_a_bucket_that_does_not_exist_is_a_failure(served: Asking) -> None:
    failed = served.process.tally.failed
    served.ask("a", WRONG)
    served.wait_for("a")
    assert served.answers["a"] is None
    assert served.process.tally.failed == failed + 1


def test_closing_leaves_no_process(served: Asking) -> None:
    process = served.process.process
    assert process is not None
    served.process.close()
    assert not is_alive(process.pid)


def test_the_process_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from vllm_tetri.predictor.base import Query\n"
        "from examples.predictor.client import PredictorProcess\n"
        f"process = PredictorProcess([sys.executable, {str(FAKE)!r}], 200, 10)\n"
        "while process.process is None: time.sleep(0.01)\n"
        "found = [('', None)]\n"
        "while not found or found[0][1] is None:\n"
        "    process.ask(Query('a', [1]))\n"
        "    process.poll()\n"
        "    process.wait(0.05)\n"
        "    found = process.poll()\n"
        "print(process.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        until(lambda: not is_alive(pid), "the predictor ends with its parent")


@pytest.mark.slow
def test_it_predicts_what_the_artefact_predicts_of_the_text(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """With a real, if untrained, artefact."""
    from transformers import AutoTokenizer

    artefact = make(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    texts = ["", "a licence", "<|start|>user\na licence<|end|>\n<|start|>assistant\n", "x" * 9000]
    model = load(artefact)
    right = model.predict([model.encode(text) for text in texts])
    served = Asking(PredictorProcess(serve_command(artefact, str(tiny_llama)), 200, 4))
    try:
        served.start()
        for text in texts:
            served.ask(text, tokenizer.encode(text, add_special_tokens=False))
        served.wait_for(*texts)
    finally:
        served.process.close()
    assert [served.answers[text] for text in texts] == [
        Prediction.of_bucket(each, 200) for each in right
    ]
