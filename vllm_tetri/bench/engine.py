"""The process that `bench.process` starts: a whole vLLM engine that measures itself.

It takes the options of `vllm serve` and reads questions, one JSON object a line,
from its standard input. An answer is one line, too. vLLM's own client for
engines in the same process (`LLMEngine`, `InprocClient`) calls the scheduler and
the model runner in turn, so every step can be seen from outside; nothing of
either is replaced. Without `--role` the plug-in is not loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

ONLY_CORES = "--only-cores="
_FIRST_ORDINARY_TOKEN = 3


def main(words: list[str]) -> int:
    """Serve questions until the input ends.

    `--only-cores=1,2` as first word binds this process, but not who started it.
    """
    if words and words[0].startswith(ONLY_CORES):
        cores = words.pop(0).removeprefix(ONLY_CORES)
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    engine = Engine(words)
    _write(answers, engine.facts())
    for line in sys.stdin:
        _write(answers, dataclasses.asdict(engine.run(Question(**json.loads(line)))))
    engine.close()
    return 0


def _write(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Prompts to compute, each up to its first token.

    Attributes:
        lengths: Tokens of each prompt.
        seed: Of the prompts' tokens, which are random,
        token_ids: unless they are given.
        legs: Send them as the router does, to be handed over (to nobody).
        predictor: What the predictor that was configured does: none (it is not asked),
            parallel or sequential; empty leaves it as it is.
        arrivals_s: When each comes, from the start, in order; empty: all are
            there when the time starts.
        policy: Order of waiting prompts; None leaves the scheduler as it is.
        sched_batch: Prompts ordered together.
        pad: Whether chunks are filled up.
        budget_tokens: Tokens per step; None leaves it as configured.
        watch: Stop as soon as this prompt has its token; None: when all have.
        least_queued: Stop when fewer prompts than this wait.
    """

    lengths: list[int]
    seed: int = 0
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    legs: bool = False
    predictor: str = ""
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    policy: str | None = None
    sched_batch: int = 16
    pad: bool = False
    budget_tokens: int | None = None
    watch: int | None = None
    least_queued: int = 0

    def is_answered(self, left: set[str], num_queued: int) -> bool:
        """Whether to stop, with these prompts still without a token."""
        is_seen = self.watch is not None and f"q{self.watch}" not in left
        return not left or is_seen or num_queued < self.least_queued


@dataclasses.dataclass(slots=True)
class Step:
    """One step of the engine.

    Attributes:
        tokens: Prompt tokens computed, padding left out.
        requests: Prompts that they belong to.
        took_s: All of it, up to the outputs in the client's hands.
        schedule_s: The scheduler's `schedule` in it.
        update_s: The scheduler's `update_from_output` in it.
        queued: Prompts waiting before it.
        unfinished_tokens: Prompt tokens that were there and not computed before it.
    """

    tokens: int = 0
    requests: int = 0
    took_s: float = 0.0
    schedule_s: float = 0.0
    update_s: float = 0.0
    queued: int = 0
    unfinished_tokens: int = 0


@dataclasses.dataclass(slots=True)
class Measured:
    """What became of a question.

    Attributes:
        ttft_s: From each prompt's arrival to its token; None: it was stopped before.
        computing_s: Length of the steps that computed some of it.
        total_s: From the start to the last token.
        budget_tokens: Tokens that a step could take.
        steps: One entry per step.
        predictions: What became of predictions, by outcome.
    """

    ttft_s: list[float | None]
    computing_s: list[float]
    total_s: float
    budget_tokens: int
    steps: list[Step]
    predictions: dict[str, int] = dataclasses.field(default_factory=dict)


class Engine:
    """One `LLMEngine` and the clocks around its scheduler."""

    def __init__(self, words: list[str]) -> None:
        if "--role" not in words:
            os.environ["VLLM_PLUGINS"] = "none"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.plugins import load_general_plugins
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        load_general_plugins()  # before the parser is made, as `vllm serve` does
        namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        namespace.model = namespace.model_tag or namespace.model  # as `vllm serve` does
        arguments = EngineArgs.from_cli_args(namespace)
        arguments.disable_log_stats = True
        # The context decides vLLM's default budget: that of a server is meant.
        self._llm = LLMEngine.from_engine_args(
            arguments, usage_context=UsageContext.OPENAI_API_SERVER
        )
        self._core = self._llm.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._budget_tokens = self._scheduler.max_num_scheduled_tokens
        self._predictor: Any = None  # that of the instance, while it is not asked
        self._step = Step()
        self._scheduled: dict[str, int] = {}
        self._watch_scheduler()

    def facts(self) -> dict[str, Any]:
        """What somebody who reads the figures should know."""
        from vllm import __version__

        from vllm_tetri.engine.conditions import device_name

        config = self._llm.vllm_config
        return {
            "vllm": __version__,
            "device": device_name(),
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "window": config.model_config.max_model_len,
            "layers": config.model_config.hf_text_config.num_hidden_layers,
            "hidden": config.model_config.get_hidden_size(),
            "scheduler": type(self._scheduler).__name__,
            "executor": type(self._core.model_executor).__name__,
            "budget_tokens": self._budget_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "block_tokens": config.cache_config.block_size,
            "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        }

    def run(self, question: Question) -> Measured:
        """Measure one question on an idle engine."""
        self._prepare(question)
        before = self._predictions()
        prompts = self._prompts(question)
        arrivals = question.arrivals_s or [0.0] * len(prompts)
        measured = Measured([None] * len(prompts), [0.0] * len(prompts), 0.0, 0, [])
        measured.budget_tokens = self._scheduler.max_num_scheduled_tokens
        left = {f"q{index}" for index in range(len(prompts))}
        unfinished_tokens = added = 0
        if not question.arrivals_s:
            for index, prompt in enumerate(prompts):
                self._add(index, prompt, question)
            added, unfinished_tokens = len(prompts), sum(question.lengths)
        started = time.perf_counter()
        while not question.is_answered(left, len(self._scheduler.waiting)):
            now = time.perf_counter() - started
            while added < len(prompts) and arrivals[added] <= now:
                self._add(added, prompts[added], question)
                unfinished_tokens += question.lengths[added]
                added += 1
            if not self._llm.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[added] - (time.perf_counter() - started)))
                continue
            done = self._one_step(unfinished_tokens)
            now = time.perf_counter() - started
            measured.steps.append(self._step)
            unfinished_tokens -= self._step.tokens
            for name in self._scheduled:
                measured.computing_s[_index(name)] += self._step.took_s
            for name in done:
                measured.ttft_s[_index(name)] = now - arrivals[_index(name)]
                left.discard(name)
        measured.total_s = time.perf_counter() - started
        self._clear(left)
        measured.predictions = {
            name: count - before.get(name, 0) for name, count in self._predictions().items()
        }
        return measured

    def close(self) -> None:
        """Stop the engine's threads."""
        if self._predictor is not None:
            self._predictor.close()
        self._core.shutdown()

    # -- one step -----------------------------------------------------------------

    def _one_step(self, unfinished_tokens: int) -> list[str]:
        """The prompts that got their token in it."""
        self._step = Step(unfinished_tokens=unfinished_tokens)
        started = time.perf_counter()
        outputs = self._llm.step()
        self._step.took_s = time.perf_counter() - started
        return [output.request_id for output in outputs if output.finished]

    def _watch_scheduler(self) -> None:
        """Two clock readings around each of the scheduler's halves."""
        schedule, update = self._scheduler.schedule, self._scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            queued = len(self._scheduler.waiting)
            started = time.perf_counter()
            output = schedule(*args, **kwargs)
            self._step.schedule_s = time.perf_counter() - started
            self._step.queued = queued
            self._scheduled = {
                name.partition("-")[0]: tokens
                for name, tokens in output.num_scheduled_tokens.items()
                if name.startswith("q")
            }
            self._step.tokens = sum(self._scheduled.values())
            self._step.requests = len(self._scheduled)
            return output

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = update(*args, **kwargs)
            self._step.update_s = time.perf_counter() - started
            return result

        self._scheduler.schedule = timed_schedule
        self._scheduler.update_from_output = timed_update

    # -- requests -----------------------------------------------------------------

    def _prepare(self, question: Question) -> None:
        budget = question.budget_tokens or self._budget_tokens
        self._scheduler.max_num_scheduled_tokens = self._scheduler._chunk_tokens = budget
        if question.policy is not None:
            from vllm_tetri.policy.order import PrefillPolicy

            policy = PrefillPolicy(question.policy)
            self._scheduler.order_by(policy, question.sched_batch, pads=question.pad)

        if question.predictor:
            self._switch_predictor(question.predictor)

    def _switch_predictor(self, mode: str) -> None:
        from vllm_tetri.engine.prediction import Predictions

        instance = self._scheduler._instance
        self._predictor = self._predictor or instance.predictions.predictor
        used = None if mode == "none" else self._predictor
        instance.predictions = Predictions(used, is_sequential=mode == "sequential")
        self._scheduler._queue.awaits_predictions = instance.predictions.is_sequential

    def _prompts(self, question: Question) -> list[list[int]]:
        if question.token_ids:
            return question.token_ids
        vocabulary = self._llm.vllm_config.model_config.get_vocab_size()
        rng = np.random.default_rng(question.seed)
        return [
            rng.integers(_FIRST_ORDINARY_TOKEN, vocabulary, length).tolist()
            for length in question.lengths
        ]

    def _add(self, index: int, prompt: Sequence[int], question: Question) -> None:
        from vllm import SamplingParams

        from vllm_tetri.handover import FIELD, PrefillLeg, to_params
        from vllm_tetri.types import RequestId, TransferId

        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        if question.legs:
            sampling.max_tokens = 2  # else there would be nothing to hand over
            leg = PrefillLeg(TransferId(f"t{index}"), RequestId(f"q{index}"))
            sampling.extra_args = {FIELD: to_params(leg)}
        self._llm.add_request(f"q{index}", {"prompt_token_ids": prompt}, sampling)

    def _predictions(self) -> dict[str, int]:
        instance = getattr(self._scheduler, "_instance", None)
        if instance is None:
            return {}
        found = dataclasses.asdict(instance.predictions.tally)
        return {**found, "missed": instance.predictions.missed}

    def _clear(self, left: set[str]) -> None:
        if left:
            self._llm.abort_request(sorted(left))
        while self._llm.has_unfinished_requests():
            self._llm.step()
        # What ended in the last step is only told to the runner in the next one.
        self._llm.engine_core.get_output()
        self._llm.reset_prefix_cache()


def _index(name: str) -> int:
    return int(name[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
