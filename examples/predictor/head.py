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
from vllm_tetri.policy.lengths import HEAVY_TOKENS, End, Lengths
from vllm_tetri.predictor.head import LEVELS, Learner

MAX_TOKENS, TEMPERATURE = 1024, 0.7
_LONGEST_PROMPT = 5000  # characters
_IN_FLIGHT = 64
_WIDTHS = (100, 200, 400)
_LATER = 64  # tokens of an output under way
QUANTILES = [f"q{round(100 * level)}" for level in LEVELS]


def collect(sources: list[Path], model: Path, per_source: int, output: Path) -> None:
    """Write states, lengths and sources of one answer for each prompt."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    from vllm import LLM, SamplingParams

    from vllm_tetri.engine.states import StateReader, give_out_layer, watch_runners

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
    llm.collective_rpc(lambda worker: give_out_layer(worker.model_runner, worker.vllm_config))
    watch_runners(reader)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    template, states, rows = llm.get_tokenizer().apply_chat_template, dict[str, Any](), []
    prompt_tokens: dict[str, int] = {}
    waiting, begun = iter(list(enumerate(prompts))), set[str]()

    def begin(count: int) -> None:
        for number, prompt in itertools.islice(waiting, count):
            ids = template([{"role": "user", "content": prompt.text}], add_generation_prompt=True,
                           tokenize=True, return_dict=False)  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            prompt_tokens[str(number)] = len(ids)

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
                    state, asked = states.pop(each.request_id), prompt_tokens[each.request_id]
                    rows.append((state, length, is_cut, prompt.source, asked))
                    begin(1)
                    bar.advance(task)
    found, *others = (np.array(each) for each in zip(*rows, strict=True))
    names = "tokens", "is_cut", "source", "prompt_tokens"
    named: dict[str, Any] = dict(zip(names, others, strict=True))
    np.savez_compressed(output, states=found.astype(np.float16), **named)


def play(path: Path, order: str) -> pd.DataFrame:
    """Predict and learn every length in an order; a row for each answer."""
    with np.load(path) as file:
        table = {name: file[name] for name in file.files}
    count = len(table["tokens"])
    places = np.arange(count)
    if order == "source":
        places = places[np.argsort(table["source"], kind="stable")]
    head, by_prompt, lengths = Learner(table["states"].shape[1]), Learner(1), Lengths()
    rows, known = [], pd.DataFrame({"source": table["source"], "tokens": table["tokens"]})
    for number, place in enumerate(track(places, "lengths")):
        state, tokens = table["states"][place].astype(np.float32), int(table["tokens"][place])
        prompt = np.log(table["prompt_tokens"][place : place + 1]).astype(np.float32)
        source, is_cut = table["source"][place], bool(table["is_cut"][place])
        row: dict[str, Any] = {"source": source, "tokens": tokens, "is_cut": is_cut}
        if head.weights is not None and by_prompt.weights is not None:
            said = head.weights.predict(state)
            ends = [lengths.total_tokens(said, 0, end) for end in (End.LOWER, End.UPPER)]
            left = [each for each in said.lengths if each > _LATER] or [2 * _LATER]
            before = known.loc[places[:number]]
            later, alike = before[before.tokens > _LATER], before[before.source == source]
            row |= dict(zip(QUANTILES, said.lengths, strict=True))
            row |= {"median": said.median_tokens, "low": ends[0], "high": ends[1]}
            row |= {"later": np.median(left), "usual later": later.tokens.median()}
            row |= {"usual": before.tokens.median(), "by source": alike.tokens.median()}
            row["by prompt"] = by_prompt.weights.predict(prompt).median_tokens
            row["pinball"] = _pinball(said.lengths, tokens)
            row["usual pinball"] = _pinball(before.tokens.quantile(LEVELS), tokens)
            if not is_cut or tokens >= lengths.outlook(said, 0)[0]:  # as instances do
                lengths.observe(said, tokens)
        rows.append(row)
        head.add(state, tokens, is_cut=is_cut)
        by_prompt.add(prompt, tokens, is_cut=is_cut)
        head.refresh()
        by_prompt.refresh()
    return pd.DataFrame(rows)


def _pinball(quantiles: Any, tokens: int) -> float:
    """Return the mean loss of quantiles: of what is too short, its level; of what is too long, the
    rest."""
    errors = tokens - np.minimum(np.asarray(quantiles), MAX_TOKENS)
    return float(np.maximum(LEVELS * errors, (LEVELS - 1) * errors).mean())


def scores(rows: pd.DataFrame) -> dict[str, float]:
    """Return how good predictions were, and rivals that know the answers before, too."""
    rows = rows[rows["median"].notna()]
    tokens, later = rows["tokens"].to_numpy(), rows[rows["tokens"] > _LATER]
    median = np.minimum(rows["median"].to_numpy(), MAX_TOKENS)
    is_heavy = tokens > HEAVY_TOKENS
    pairs = is_heavy.sum() * (~is_heavy).sum()

    def error(name: str, of: pd.DataFrame = rows) -> float:
        guesses = of[name].fillna(of["usual"]).clip(upper=MAX_TOKENS)
        return float((guesses - of["tokens"]).abs().mean())

    def covered(low: str, high: str) -> float:  # one that was cut is outside if an end is below
        return float(((tokens >= rows[low]) & (tokens <= rows[high])).mean())

    found = {
        "answers": len(rows),
        "error": error("median"),
        "error of the median": error("usual"),
        "of the source's": error("by source"),
        "by prompt length": error("by prompt"),
        "left of 64": error("later", later),
        "left of 64, usual": error("usual later", later),
        "pinball": rows["pinball"].mean(),
        "usual pinball": rows["usual pinball"].mean(),
        "Spearman": float(spearmanr(median, tokens)[0]),
        "AUC heavy": float(mannwhitneyu(median[is_heavy], median[~is_heavy])[0] / pairs),
        "coverage as said": covered(QUANTILES[0], QUANTILES[-1]),
        "coverage": covered("low", "high"),
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
