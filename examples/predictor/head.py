"""What the length head is worth: answers of a model, then the head on them, one after the other.

    python -m examples.predictor.head collect PROMPTS ... --model FOLDER --output states.npz
    python -m examples.predictor.head evaluate states.npz --output rows.csv.gz

`collect` generates an answer for every prompt with one stock engine in this process and keeps the
hidden state at each prompt's end, read as instances read it. `evaluate` plays them back as they
would end on an instance: every length is predicted by what the head knows by then, and learnt
afterwards. With `--order source` one source of prompts follows another, so that traffic shifts.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.progress import Progress, track
from scipy.stats import mannwhitneyu, spearmanr

from examples.predictor.prompts import read_prompts
from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.predictor.head import Learner, Sample

MAX_TOKENS, TEMPERATURE = 1024, 0.7
_LONGEST_PROMPT = 5000  # characters
_IN_FLIGHT = 64
_WIDTHS = (100, 200, 400)


def collect(sources: list[Path], model: Path, per_source: int, output: Path) -> None:
    """Write states, lengths and sources of one answer for each prompt."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    from vllm import LLM, SamplingParams

    from vllm_tetri.engine.states import StateReader, watch_runners

    class Reader(StateReader):
        """Reads of every request, and after every step."""

        def read(self, hidden: Any, names: Any, ends: Any) -> None:
            self.begin_step(names)
            super().read(hidden, names, ends)

    prompts = [each for each in read_prompts(sources, per_source=per_source, seed=1)
               if len(each.text) < _LONGEST_PROMPT]  # fmt: skip
    llm = LLM(
        str(model), dtype="float32", max_model_len=2560, max_num_seqs=_IN_FLIGHT,
        enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=4 << 30,
    )  # fmt: skip
    engine, reader = llm.llm_engine, Reader()
    watch_runners(reader)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    template, states, rows = llm.get_tokenizer().apply_chat_template, dict[str, Any](), []
    waiting, begun = iter(list(enumerate(prompts))), set[str]()

    def begin(count: int) -> None:
        for number, prompt in itertools.islice(waiting, count):
            ids = template([{"role": "user", "content": prompt.text}], add_generation_prompt=True,
                           tokenize=True, return_dict=False)  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)

    begin(2 * _IN_FLIGHT)
    with Progress() as bar:
        task = bar.add_task("answers", total=len(prompts))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for name, state in reader.take().items():
                if (request := name.split("-")[0]) not in begun:
                    states[request] = state  # the last one is that of the prompt's end
            for each in outputs:
                begun.add(each.request_id)
                if each.finished:
                    answer, prompt = each.outputs[0], prompts[int(each.request_id)]
                    length, is_cut = len(answer.token_ids), answer.finish_reason == "length"
                    rows.append((states.pop(each.request_id), length, is_cut, prompt.source))
                    begin(1)
                    bar.advance(task)
    found, *others = (np.array(each) for each in zip(*rows, strict=True))
    named: dict[str, Any] = dict(zip(("tokens", "is_cut", "source"), others, strict=True))
    np.savez_compressed(output, states=found.astype(np.float16), **named)


def play(path: Path, order: str) -> pd.DataFrame:
    """Predict and learn every length in an order; a row for each answer."""
    with np.load(path) as file:
        table = {name: file[name] for name in file.files}
    count = len(table["tokens"])
    places = np.arange(count)
    if order == "source":
        places = places[np.argsort(table["source"], kind="stable")]
    learner, rows = Learner(table["states"].shape[1]), []
    for place in track(places, "lengths"):
        state, length = table["states"][place].astype(np.float32), int(table["tokens"][place])
        is_cut, weights, row = bool(table["is_cut"][place]), learner.weights, {}
        if weights is not None:
            quantiles = {"low": 0.05, "median": 0.5, "high": 0.95}
            row = {name: weights.quantile_tokens(state, q) for name, q in quantiles.items()}
            row["usual"] = weights.usual_tokens
        rows.append({"source": table["source"][place], "tokens": length, "is_cut": is_cut, **row})
        learner.add(Sample(state, length, is_cut))
        learner.refresh()
    return pd.DataFrame(rows)


def scores(rows: pd.DataFrame) -> dict[str, float]:
    """Return how good predictions were; the constant rivals know all these lengths."""
    rows = rows.dropna()
    tokens = rows["tokens"].to_numpy()
    median = np.minimum(rows["median"].to_numpy(), MAX_TOKENS)
    is_heavy = tokens > HEAVY_TOKENS
    pairs = is_heavy.sum() * (~is_heavy).sum()
    above = (tokens <= rows["high"]) | rows["is_cut"]
    found = {
        "answers": len(rows),
        "error": float(np.abs(median - tokens).mean()),
        "error of the median": float(np.abs(rows["usual"] - tokens).mean()),
        "Spearman": float(spearmanr(median, tokens)[0]),
        "AUC heavy": float(mannwhitneyu(median[is_heavy], median[~is_heavy])[0] / pairs),
        "coverage": float(((tokens >= rows["low"]) & above).mean()),
    }
    for width in _WIDTHS:
        buckets, last = tokens // width, MAX_TOKENS // width
        guesses = np.minimum(median // width, last)
        found[f"accuracy {width}"] = float((guesses == np.minimum(buckets, last)).mean())
        found[f"majority {width}"] = float(np.bincount(buckets).max() / len(rows))
    return found


def main(words: list[str] | None = None) -> int:
    """Collect or evaluate; returns the exit status."""
    parser = argparse.ArgumentParser(prog="head", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("prompts", type=Path, nargs="+")
    collecting.add_argument("--model", type=Path, required=True)
    collecting.add_argument("--per-source", type=int, default=400)
    evaluating = commands.add_parser("evaluate")
    evaluating.add_argument("states", type=Path)
    evaluating.add_argument("--order", choices=("mixed", "source"), default="mixed")
    evaluating.add_argument("--window", type=int, default=250, help="answers per row")
    for each in (collecting, evaluating):
        each.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(words)
    if options.command == "collect":
        collect(options.prompts, options.model, options.per_source, options.output)
        return 0
    rows = play(options.states, options.order)
    rows.round(1).to_csv(options.output, index=False)
    starts = range(0, len(rows), options.window)
    windows = {f"from {at}": scores(rows[at : at + options.window]) for at in starts}
    print(pd.DataFrame(windows | {"all": scores(rows)}).round(3).to_string())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
