"""`vllm-tetri bench predictor`: what a length predictor costs the prompts (paper Figure 17).

The same prompts, at the same times, to one prefill instance: its predictor not asked,
asked beside the prompts, and prompts waiting for it; twice not asked, to see how much two
equal runs differ. Prompts carry a prefill leg, so predictions are due when their first
chunk is done. Another predictor, alone, answers the same prompts at the same times. All
of that with the predictor on a core of its own, and on the engine's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import Progress

from vllm_tetri.bench import lengths, predictor_report, setting
from vllm_tetri.bench.predictor_report import AGAIN, ALONE, PARALLEL, QUEUE, SEQUENTIAL, SPREAD
from vllm_tetri.bench.process import EngineProcess
from vllm_tetri.bench.serving import WORDS
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.predictor.artefact import require_whole
from vllm_tetri.predictor.base import Ask
from vllm_tetri.predictor.client import PredictorProcess, serve_command

PLACES = OWN, SHARED = "own", "shared"
_MODES = {ALONE: "none", AGAIN: "none", PARALLEL: "parallel", SEQUENTIAL: "sequential"}
_START_S = 120.0
_LONGEST_S = 600.0
_POLL_S = 0.001
_PAUSE_S = 0.5
# Prompts of the queue: the most that a predictor lets wait.
_MOST_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, and when they come; empty times mean all at once."""

    token_ids: list[list[int]]
    arrivals_s: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of the model that is served")
    add("predictor", type=Path, metavar="PREDICTOR", help="folder that predictor train wrote")
    add("--chunk", type=int, default=256, metavar="N", help="tokens per step (256)")
    add("--requests", type=int, default=64, metavar="N", help="prompts of a run (64)")
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help=f"prompt lengths in tokens, as for bench order; default: {lengths.BUILT_IN}",
    )
    add(
        "--load",
        type=float,
        default=0.5,
        metavar="F",
        help="of the runs with arrivals: work that comes per work that can be done (0.5)",
    )
    add("--repeats", type=int, default=5, metavar="N", help="runs of each kind (5)")
    add(
        "--places",
        default=",".join(PLACES),
        metavar="NAME,NAME",
        help="the predictor on cores of its own, or on the engine's (own,shared)",
    )
    setting.add_place(parser, "predictor", cores=1)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write predictor.json and predictor.svg."""
    setting.check(options, requests=2, chunk=1, load=1e-6)
    about = require_whole(options.predictor)
    if options.requests > _MOST_REQUESTS:
        raise ConfigError(f"--requests {options.requests}: must be at most {_MOST_REQUESTS}")
    known = lengths.read_lengths(options.lengths) if options.lengths else None
    console = setting.console()
    with Progress(console=console) as progress:
        bench = _Bench(options, known, progress)
        results = bench.measure()
    results["conditions"]["predictor"] = {
        "base": about.base_model,
        "window": about.window_tokens,
        "buckets": about.num_buckets,
    }
    setting.write_json(options.output / "predictor.json", results)
    predictor_report.show(console, results)
    predictor_report.draw(results, options.output / "predictor.svg")
    console.print(f"written: {options.output}/predictor.json, predictor.svg")
    return 0


class _Bench:
    def __init__(
        self, options: argparse.Namespace, known: Sequence[int] | None, progress: Progress
    ) -> None:
        from transformers import AutoTokenizer

        self._options = options
        self._known = known
        self._progress = progress
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._rng = Random(options.seed)
        self._window = 0
        self._facts: dict[str, Any] = {}

    def measure(self) -> dict[str, Any]:
        """Both placements, one after the other."""
        engine_cores = setting.cores(self._options)
        others = sorted(os.sched_getaffinity(0) - set(engine_cores))
        spare = {OWN: others, SHARED: ()}
        found = {
            place: self._place(place, engine_cores, spare[place])
            for place in setting.names(self._options.places, "--places", PLACES)
            if spare[place] or place == SHARED
        }
        conditions = {
            "model": setting.model_name(self._options),
            "device": setting.device(),
            "engine_cores": list(engine_cores),
            "chunk": self._options.chunk,
            "requests": self._options.requests,
            "repeats": self._options.repeats,
            "load": self._options.load,
            "lengths": self._options.lengths.name if self._options.lengths else lengths.BUILT_IN,
            "seed": self._options.seed,
            "engine": self._facts,
        }
        return {"conditions": conditions, "places": found}

    def _place(
        self, place: str, engine_cores: Sequence[int], spare: Sequence[int]
    ) -> dict[str, Any]:
        with ExitStack() as stack:
            task = self._progress.add_task(f"starting engines: {place}", total=None)
            engine = self._engine(stack, engine_cores, spare)
            self._facts = engine.ready()
            self._window = self._facts["window"]
            predictor = self._predictor(stack, spare or engine_cores)
            self._progress.remove_task(task)
            return self._runs(place, engine, predictor)

    def _runs(
        self, place: str, engine: EngineProcess, predictor: PredictorProcess
    ) -> dict[str, Any]:
        found: dict[str, Any] = {kind: {name: [] for name in _MODES} for kind in (QUEUE, SPREAD)}
        alone: dict[str, Any] = {QUEUE: [], SPREAD: []}
        repeats = self._options.repeats
        tokens_per_s = self._warm_up(engine)
        task = self._progress.add_task(place, total=2 * repeats * (len(_MODES) + 1))
        for _ in range(repeats):
            for kind in (QUEUE, SPREAD):
                load = self._load(kind, tokens_per_s)
                for name in self._rng.sample(list(_MODES), len(_MODES)):
                    found[kind][name].append(_ask(engine, load, _MODES[name]))
                    self._progress.advance(task)
                alone[kind].append(_answer_times(predictor, load))
                self._progress.advance(task)
        return {"runs": found, "predictor_alone": alone}

    def _warm_up(self, engine: EngineProcess) -> float:
        """Returns the prompt tokens a second that the engine computes."""
        deadline = time.monotonic() + _START_S
        while _ask(engine, Load([self._prompt(64)], []), "sequential")["missed"]:
            if time.monotonic() > deadline:
                raise UnsupportedError("the engine's predictor does not answer")
            time.sleep(_PAUSE_S)
        _ask(engine, self._load(QUEUE, 0.0), "parallel")
        answer = _ask(engine, self._load(QUEUE, 0.0), "none")
        return float(answer["tokens"] / answer["total_s"])

    def _load(self, kind: str, tokens_per_s: float) -> Load:
        count, rng = self._options.requests, self._rng
        drawn = lengths.sample(self._known, count, rng, scale=1.0, longest=self._window - 1)
        token_ids = [self._prompt(length) for length in drawn]
        if kind is QUEUE:
            return Load(token_ids, [])
        rate = self._options.load * tokens_per_s * count / sum(map(len, token_ids))
        return Load(token_ids, list(accumulate(rng.expovariate(rate) for _ in range(count))))

    def _prompt(self, num_tokens: int) -> list[int]:
        """English words."""
        words = " ".join(self._rng.choices(WORDS, k=num_tokens))
        tokenizer = self._tokenizer
        ids: list[int] = tokenizer.encode(words, add_special_tokens=False)[:num_tokens]
        return ids

    def _engine(
        self, stack: ExitStack, cores: Sequence[int], spare: Sequence[int]
    ) -> EngineProcess:
        options = self._options
        words = setting.serve_options(options.model, setting.MAX_NUM_SEQS)
        words += ["--role", "prefill", "--tetri-chunk-size", str(options.chunk)]
        words += ["--tetri-arena-bytes", "16M", "--no-enable-prefix-caching"]
        words += ["--tetri-predictor", str(options.predictor)]
        log = options.output / "engine.log"
        return stack.enter_context(
            EngineProcess([*words, *options.tail], cores, log, spare_cores=spare)
        )

    def _predictor(self, stack: ExitStack, cores: Sequence[int]) -> PredictorProcess:
        options = self._options
        about = require_whole(options.predictor)
        command = serve_command(options.predictor.absolute(), options.model, cores)
        process = PredictorProcess(command, about.granularity_tokens, about.num_buckets)
        stack.callback(process.close)
        _answer_times(process, Load([[1]], []), patience_s=_START_S)
        return process


def _ask(engine: EngineProcess, load: Load, mode: str) -> dict[str, Any]:
    answer = engine.ask(
        lengths=[len(each) for each in load.token_ids],
        token_ids=load.token_ids,
        arrivals_s=load.arrivals_s,
        legs=True,
        predictor=mode,
    )
    predictions = answer["predictions"]
    return {
        "ttft_s": answer["ttft_s"],
        "total_s": answer["total_s"],
        "tokens": sum(map(len, load.token_ids)),
        "missed": sum(predictions.values()) - predictions["made"],
    }


def _answer_times(
    predictor: PredictorProcess, load: Load, *, patience_s: float = 0.0
) -> dict[str, Any]:
    """Seconds from each prompt's arrival to its answer, from a predictor that has
    nothing else beside it.

    Args:
        patience_s: How long to ask again what was not answered: it may be starting.

    Raises:
        UnsupportedError: It does not answer.
    """
    arrivals = load.arrivals_s or [0.0] * len(load.token_ids)
    took: dict[str, float] = {}
    started, added = time.perf_counter(), 0
    while len(took) < len(arrivals):
        now = time.perf_counter() - started
        while added < len(arrivals) and arrivals[added] <= now:
            predictor.ask(Ask(str(added), load.token_ids[added]))
            added += 1
        for name, prediction in predictor.poll():
            now = time.perf_counter() - started
            if prediction is not None:
                took[name] = now - arrivals[int(name)]
            elif now < patience_s:
                time.sleep(_POLL_S)
                predictor.ask(Ask(name, load.token_ids[int(name)]))
            else:
                raise UnsupportedError("the predictor does not answer")
        if time.perf_counter() - started > _LONGEST_S:
            raise UnsupportedError(f"the predictor took longer than {_LONGEST_S:.0f} s")
        predictor.wait(_POLL_S)
    total_s = time.perf_counter() - started
    return {"took_s": [took[str(index)] for index in range(len(arrivals))], "total_s": total_s}
