"""Predictions in an instance: when they are used, and that their lack costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.request import RequestStatus

from examples.predictor.model import WEIGHTS_FILE
from tests.engine.harness import Engine, told_by
from tests.engine.pair import CHUNK, Pair, prompt
from tests.predictor.tiny_artefact import make
from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.plugin import register
from vllm_tetri.engine.prediction import (
    SEQUENTIAL_WAIT_S,
    LengthsStore,
    Predictions,
    name_of,
    route_of,
    state_path,
    tells_length,
)
from vllm_tetri.errors import ConfigError
from vllm_tetri.handover import DecodeParams, digest_of, to_params
from vllm_tetri.messages import Dispatched, LengthMap
from vllm_tetri.policy.lengths import End, Lengths, OutputLengths
from vllm_tetri.predictor.base import Query, Tally
from vllm_tetri.predictor.learning import HeadPredictor
from vllm_tetri.types import Prediction, Role, TransferId

THIRD = Prediction.of_bucket(3, 200)


class Scripted:
    """A predictor that outputs when told to."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.asked: list[Query] = []
        self.withdrawn: list[str] = []
        self.replies: list[tuple[str, Prediction | None]] = []
        self.is_closed = False

    def ask(self, ask: Query) -> None:
        self.asked.append(ask)

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(name)

    def poll(self) -> list[tuple[str, Prediction | None]]:
        replies, self.replies = self.replies, []
        return replies

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene(Pair):
    """A prefill and a decode engine; the first one's predictor is scripted."""

    def __init__(self, folder: Path, *, is_sequential: bool = False) -> None:
        self.predictor = Scripted()
        self.clock = Clock()
        with patch("vllm_tetri.engine.endpoint.Predictions", self._make_predictions):
            self.prefill = Engine(
                folder,
                Role.PREFILL,
                chunk_size=CHUNK,
                arena_bytes=1 << 20,
                predictor_mode="sequential" if is_sequential else "parallel",
            )
        self.decode = Engine(folder, Role.DECODE, arena_bytes=1 << 20)
        self.prefill.sees(self.prefill, self.decode)
        self.published: list[Dispatched] = told_by(self.prefill)

    def _make_predictions(self, _: Any, *, is_sequential: bool) -> Predictions:
        return Predictions(self.predictor, is_sequential=is_sequential, clock=self.clock)

    @property
    def missed(self) -> int:
        missed = self.prefill.endpoint.predictions.missed
        assert isinstance(missed, int)
        return missed


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def sequential(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, is_sequential=True)
    yield scene
    scene.close()


@pytest.mark.parametrize("reply", [THIRD, None], ids=["predicted", "refused"])
def test_a_reply_goes_to_the_router_and_with_the_response(
    scene: Scene, reply: Prediction | None
) -> None:
    scene.send("a", prompt(2 * CHUNK))
    scene.predictor.replies.append(("a", reply))

    assert scene.prefilled("a").predicted == reply
    assert [message.predicted for message in scene.published] == [reply] * len(scene.published)
    assert scene.missed == 0


def test_a_predictor_may_use_numpy(scene: Scene) -> None:
    scene.send("a", prompt(2 * CHUNK))
    lengths: Any = [np.float32(each) for each in THIRD.lengths]
    scene.predictor.replies.append(("a", Prediction(lengths)))
    predicted = scene.prefilled("a").predicted
    assert predicted is not None
    assert predicted.lengths == pytest.approx(THIRD.lengths)


def test_a_prediction_after_the_first_chunk_is_counted_and_still_used(scene: Scene) -> None:
    scene.send("a", prompt(3 * CHUNK))
    scene.prefill.step()
    scene.prefill.step()
    assert scene.missed == 1
    scene.predictor.replies.append(("a", THIRD))

    assert scene.prefilled("a").predicted == THIRD
    assert scene.published[0].predicted is None
    assert scene.missed == 1


@pytest.mark.parametrize("num_tokens", [1, CHUNK, 3 * CHUNK])
def test_without_a_reply_a_prompt_starts_unpredicted(scene: Scene, num_tokens: int) -> None:
    scene.send("a", prompt(num_tokens))

    prefilled = scene.prefilled("a")
    assert prefilled.decode == scene.decode.info.id
    assert prefilled.predicted is None
    assert scene.missed == 1
    assert scene.predictor.withdrawn == ["a"]


def test_only_prompts_that_begin_here_are_predicted(scene: Scene) -> None:
    scene.send("a", prompt(5))
    scene.prefill.add("whole", [1, 2, 3])
    kv_params = DecodeParams(TransferId("t-d"), digest_of([1, 2, 3]), predicted=THIRD)
    arrived = scene.prefill.add("arrived", [1, 2, 3], params=to_params(kv_params))

    assert [ask.name for ask in scene.predictor.asked] == ["a", "whole"]
    assert scene.predictor.asked[1].output_tokens == 4  # the harness ignores EOS
    assert scene.prefill.endpoint.lengths_store.outputs.predict(arrived.request_id) == THIRD


def test_an_aborted_prompt_is_withdrawn(scene: Scene) -> None:
    scene.send("a", prompt(5))
    scene.prefill.abort("a")
    scene.prefill.run_until(lambda: scene.prefill.is_at_rest)
    scene.predictor.replies.append(("a", THIRD))  # too late, its request is gone
    scene.prefill.step()

    assert scene.predictor.withdrawn == ["a"]


def test_sequential_prompts_wait_for_their_prediction(sequential: Scene) -> None:
    for name in ("a", "b"):
        sequential.send(name, prompt(CHUNK))
    for _ in range(3):
        assert not sequential.prefill.step().total_num_scheduled_tokens
    assert sequential.prefill.scheduler.get_request_counts() == (0, 2)
    sequential.predictor.replies.append(("b", THIRD))

    assert list(sequential.prefill.step().num_scheduled_tokens) == ["b"]
    sequential.predictor.replies.append(("a", None))
    assert list(sequential.prefill.step().num_scheduled_tokens) == ["a"]


def test_sequential_prompts_wait_only_until_a_deadline(sequential: Scene) -> None:
    sequential.send("a", prompt(CHUNK))
    sequential.prefill.step()
    sequential.clock.now += SEQUENTIAL_WAIT_S
    assert list(sequential.prefill.step().num_scheduled_tokens) == ["a"]


def test_a_waiting_sequential_prompt_can_be_aborted(sequential: Scene) -> None:
    sequential.send("a", prompt(CHUNK))
    sequential.prefill.step()
    sequential.prefill.abort("a")
    sequential.prefill.run_until(lambda: sequential.prefill.is_at_rest)


# -- what outputs turn out to be -----------------------------------------------------


def test_outputs_that_end_here_are_learnt_and_reported(scene: Scene) -> None:
    decode = scene.decode
    assert decode.endpoint.read_load().usual_tokens == 0
    before = decode.endpoint.lengths_store.lengths.total_tokens(None, 0, End.EXPECTED)
    tokens = list(range(5))
    for number in range(20):
        kv_params = DecodeParams(TransferId(""), digest_of(tokens), predicted=THIRD)
        decode.add(str(number), tokens, max_tokens=7, params=to_params(kv_params))
    decode.run_until(lambda: decode.is_at_rest)

    after = decode.endpoint.lengths_store.lengths.total_tokens(None, 0, End.EXPECTED)
    assert after < before
    assert decode.endpoint.read_load().usual_tokens < 200


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    tokens = list(range(5))
    first = Engine(tmp_path, Role.BOTH, arena_bytes=1 << 20)
    for number in range(20):
        first.add(str(number), tokens, max_tokens=7)
    first.run_until(lambda: first.is_at_rest)
    learnt = first.endpoint.lengths_store.lengths.state()
    first.close()
    second = Engine(tmp_path, Role.BOTH, arena_bytes=1 << 20)
    assert second.endpoint.lengths_store.lengths.state() == learnt
    assert second.endpoint.read_load().usual_tokens
    second.close()


def test_a_map_that_is_damaged_or_of_another_model_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path, Role.PREFILL, arena_bytes=1 << 20)
    head = engine.endpoint.predictions.predictor
    assert isinstance(head, HeadPredictor)
    engine.endpoint.take(LengthMap("another", b"1234"))
    assert "not used" not in caplog.text
    engine.endpoint.take(LengthMap(head.model, b"1234"))
    assert "not used: no map" in caplog.text
    assert head.weights is None
    engine.close()


def ended(
    status: RequestStatus,
    num_tokens: int,
    *,
    ignore_eos: bool = False,
    max_tokens: int = 900,
    stop: Sequence[str] = (),
) -> Any:
    """As much of a request as tells how it ended."""
    sampling = SimpleNamespace(ignore_eos=ignore_eos, stop=stop)
    return SimpleNamespace(
        request_id="a",
        lora_request=None,
        status=status,
        num_prompt_tokens=10,
        num_output_tokens=num_tokens,
        max_tokens=max_tokens,
        sampling_params=sampling,
    )


def test_outputs_of_an_endpoint_and_an_adapter_are_alike() -> None:
    def route(name: str, adapter: str = "") -> str:
        lora = SimpleNamespace(lora_name=adapter) if adapter else None
        asked: Any = SimpleNamespace(request_id=name, lora_request=lora)
        return route_of(asked)

    assert route("chatcmpl-1") == route("chatcmpl-2") != route("cmpl-1-0")
    assert route("cmpl-1-0", "sql") not in (route("cmpl-1-0"), route("chatcmpl-1", "sql"))
    assert route("1") == route("7-a")  # named by a client, each otherwise


OF_THIRD = OutputLengths(Lengths(), lambda name: THIRD, window=10_000)


@pytest.mark.parametrize(
    ("asked", "tells"),
    [
        (ended(RequestStatus.FINISHED_STOPPED, 3), True),
        (ended(RequestStatus.FINISHED_STOPPED, 1, max_tokens=1), False),
        (ended(RequestStatus.FINISHED_ABORTED, 3), False),
        (ended(RequestStatus.FINISHED_ABORTED, 3, stop=["."]), True),  # vLLM's server found it
        (ended(RequestStatus.FINISHED_ABORTED, 0, stop=["."]), False),
        (ended(RequestStatus.FINISHED_LENGTH_CAPPED, 3), False),
        (ended(RequestStatus.FINISHED_LENGTH_CAPPED, 3, ignore_eos=True), True),
        (ended(RequestStatus.FINISHED_LENGTH_CAPPED, 5000), True),
    ],
)
def test_which_endings_tell_the_length_of_an_output(asked: Any, tells: bool) -> None:
    assert tells_length(asked, OF_THIRD) is tells


def store_of(path: Path) -> LengthsStore:
    return LengthsStore(path, lambda name: THIRD, 10_000)


def learnt(store: LengthsStore) -> LengthsStore:
    store.learn(ended(RequestStatus.FINISHED_STOPPED, 650))
    return store


def test_a_file_is_written_at_once_and_at_the_end(tmp_path: Path) -> None:
    store = learnt(store_of(tmp_path / "file.json"))
    for _ in range(50):
        learnt(store)
    store.close()
    store.close()

    assert store_of(tmp_path / "file.json").lengths.state() == store.lengths.state()
    assert len(list(tmp_path.iterdir())) == 1


def test_every_model_and_predictor_has_its_own_file() -> None:
    pairs = ("model", "head"), ("other", "head"), ("model", "histogram")
    assert len({state_path(*pair) for pair in pairs}) == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]", b'{"a": 1}', b"[" * 100_000])
def test_garbage_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = store_of(tmp_path / "file.json").path
    path.write_bytes(content)
    store = store_of(tmp_path / "file.json")

    assert store.lengths.state() == Lengths().state()
    assert store.lengths.usual_tokens() == 0
    assert sum("is ignored" in message for message in caplog.messages) == 1
    learnt(store).close()
    assert store_of(tmp_path / "file.json").lengths.state() == store.lengths.state()


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    learnt(store_of(tmp_path / "file" / "file.json")).close()
    assert any("cannot be saved" in message for message in caplog.messages)


# -- options --------------------------------------------------------------------------


def config(**fields: Any) -> TetriConfig:
    return TetriConfig(role=Role.PREFILL, **fields)


def test_a_damaged_artefact_is_refused_at_the_start(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"half of the wei")
    with pytest.raises(ConfigError, match="damaged"):
        name_of(config(predictor=str(tmp_path)))
    assert name_of(config(predictor="oracle")) == "oracle"


def test_an_unusable_predictor_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["m", "--role", "prefill", "--tetri-predictor", str(tmp_path / "no")])
    assert "predictor.py cannot be loaded" in capsys.readouterr().err
