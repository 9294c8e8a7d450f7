"""The recipe of a predictor: collect lengths, train, evaluate, load in the package."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.predictor.model import load, read_about
from tests.needed import needed
from tests.predictor.tiny_artefact import TARGET, make_base
from vllm_tetri.errors import ConfigError

for module in ("accelerate", "openai", "pandas", "scipy"):
    needed(module)
collect = needed("examples.predictor.collect")
evaluate = needed("examples.predictor.evaluate")
outputs_file = needed("examples.predictor.outputs")
prompts_file = needed("examples.predictor.prompts")
train = needed("examples.predictor.train")

REFUSED = "refuse me"


class _Endpoint(BaseHTTPRequestHandler):
    """An OpenAI endpoint whose outputs have as many tokens as the prompt has letters."""

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._reply(200, {"tokens": list(body["messages"][0]["content"].encode())})
        elif self.path == "/detokenize":
            text = bytes(body["tokens"]).decode()
            self._reply(200, {"prompt": f"{TARGET.before}{text}{TARGET.after}"})
        elif (prompt := body["messages"][0]["content"]) == REFUSED:
            self._reply(400, {"error": {"message": "too long"}})
        else:
            usage = {"prompt_tokens": 3, "completion_tokens": len(prompt), "total_tokens": 3}
            message = {"role": "assistant", "content": "x"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            about = {"id": "a", "object": "chat.completion", "created": 1, "model": "fake"}
            self._reply(200, {**about, "choices": [choice], "usage": usage})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def run_collect(endpoint: str, *words: str) -> int:
    return await collect.collect(collect.options_of([*words, "--url", endpoint]))


async def test_lengths_are_collected_once_and_prompts_that_are_refused_left_out(
    endpoint: str, tmp_path: Path
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "outputs.jsonl"
    prompts.write_text(f"one\nthree\n{REFUSED}\n")
    words = [str(prompts), "--output", str(output)]
    assert await run_collect(endpoint, *words) == 0
    output.write_bytes(output.read_bytes() + b'{"key": "cut off by a kill')
    prompts.write_text(f"one\nthree\n{REFUSED}\nlonger\n")
    assert await run_collect(endpoint, *words, "--samples", "2") == 0
    found = outputs_file.read_outputs(output)
    assert (found.target.model, found.target.before) == ("fake", TARGET.before)
    assert {each.text: each.lengths for each in found.examples} == {
        "one": (3, 3),
        "three": (5, 5),
        "longer": (6, 6),
    }
    with pytest.raises(ConfigError, match="another --output"):
        await run_collect(endpoint, *words, "--temperature", "0")


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("a.txt", "one\n\ntwo\n", {"one", "two"}),
        ("a.json", '["one", {"prompt": "two"}, {"other": 1}]', {"one", "two"}),
        ("a.json", '{"instruction": "do", "input": "it"}\n{"instruction": "x"}', {"do\n\nit", "x"}),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": "hi"}]}', {"hi"}),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}', {"hi"}),
    ],
)
def test_prompts_are_read_from_the_files_that_people_have(
    tmp_path: Path, name: str, content: str, prompts: set[str]
) -> None:
    (tmp_path / name).write_text(content)
    found = prompts_file.read_prompts([tmp_path / name])
    assert {each.text for each in found} == prompts
    assert prompts_file.read_prompts([tmp_path / name], per_source=1)[0] in found


@pytest.mark.parametrize("content", ["{", '{"other": 1}', "\xff"])
def test_a_file_without_prompts_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.json"):
        prompts_file.read_prompts([path])


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made outputs: prompts of capital letters have long ones."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("made") / "outputs.jsonl"
    lines = [msgspec.json.encode(TARGET)]
    for number in range(400):
        is_long = number % 2
        text = f"{'LLLL' if is_long else 'ssss'} {number:04}"
        for sample in range(1 + (number < 120)):
            tokens = int((600 if is_long else 50) * rng.lognormvariate(0, 0.2))
            output = outputs_file.Output(
                key=prompts_file.key_of(text), source="made", prompt=text, prompt_tokens=9,
                sample=sample, tokens=tokens, finish="stop",
            )  # fmt: skip
            lines.append(msgspec.json.encode(output))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def trained(outputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    base = make_base(folder / "base")
    words = [str(outputs), "--output", str(folder / "predictor"), "--base", str(base)]
    needed("torch").set_num_threads(1)  # so little work is slower on more
    assert train.main([*words, "--learning-rate", "0.02"]) == 0
    return folder / "predictor"


def test_a_trained_predictor_loads_in_the_package_and_knows_what_prompts_tell(
    trained: Path,
) -> None:
    about, artefact = read_about(trained), load(trained)
    long, short = artefact.predict([artefact.encode("LLLL 0700"), artefact.encode("ssss 0701")])
    assert (short, long >= 2) == (0, True)
    assert about.validation["accuracy"] > about.validation["majority_accuracy"] + 0.1
    assert (about.target, about.granularity_tokens) == (TARGET, 200)
    assert all(low <= middle <= high for low, middle, high in about.bucket_quantiles)
    assert sum(about.num_prompts.values()) == 400


def test_it_beats_trivial_guesses_on_prompts_that_it_has_not_seen(
    outputs: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "table.csv"
    assert evaluate.main([str(outputs), str(trained), "--csv", str(csv), "--resamples", "20"]) == 0
    table = needed("pandas").read_csv(csv)
    correlation = {
        row["method"]: float(row["spearman"].split()[0])
        for _, row in table[table["tokens per bucket"] == 200].iterrows()
    }
    assert correlation["median bucket, as served"] > 0.5
    assert correlation["commonest bucket"] == 0
    assert evaluate.main([str(outputs), str(trained), str(trained)]) == 2
    assert "different --held-out" in capsys.readouterr().out


def test_a_label_is_spread_by_how_far_outputs_to_one_prompt_differ() -> None:
    label = train.label_of(390, outputs_file.Buckets(4, 200), 0.4)
    assert sum(label) == pytest.approx(1)
    assert label[1] > label[2] > label[3]
    assert label[2] > label[0]
    assert train.label_of(390, outputs_file.Buckets(4, 200), 0) == [0, 1, 0, 0]
    rng = random.Random(0)
    pairs = [
        (int(300 * rng.lognormvariate(0, 0.5)), int(300 * rng.lognormvariate(0, 0.5)))
        for _ in range(2000)
    ]
    assert train.spread_of(pairs) == pytest.approx(0.5, rel=0.1)


def test_the_split_stays_when_outputs_are_added_and_quarters_cover_all(outputs: Path) -> None:
    found = outputs_file.read_outputs(outputs)
    parts = outputs_file.split(found.examples)
    assert len(parts.train) > len(parts.test) > len(parts.validation) > 0
    assert set(outputs_file.split(found.examples[::2]).test) < set(parts.test)
    tested = [
        each for quarter in range(4) for each in outputs_file.split(found.examples, quarter).test
    ]
    assert sorted(tested, key=lambda each: each.key) == list(found.examples)
    assert outputs_file.buckets_for(found, 200).coarser(2).width == 400


@pytest.mark.parametrize(
    ("more", "complaint"),
    [(("--granularity", "5000"), "fall into one bucket"), (("--base", "/no/model"), "--base /no")],
)
def test_a_wrong_option_is_named(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...],
    complaint: str,
) -> None:  # fmt: skip
    base = make_base(tmp_path / "base")
    words = [str(outputs), "--output", str(tmp_path / "p"), "--base", str(base), *more]
    assert train.main(words) == 2
    assert complaint in capsys.readouterr().out
