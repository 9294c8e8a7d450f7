"""The commands of a suite.

A *job* is one command of `vllm-tetri` with a folder of its own. It has a quick variant, small
enough for two CPU cores and a quarter of an hour in all, and a full one with the paper's sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Placeholders of a job's words. `{rival}` disappears where there is none.
MODEL, OUTPUT, RIVAL = "{model}", "{output}", "{rival}"
PREDICTOR, ANSWERS = "{predictor}", "{answers}"

# Where instances keep a pace (docs/benchmarks-decode.md) what they compute does not matter, as
# long as it is done in time. The attention kernels of a CPU want heads of 32.
_SMALL_SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_SMALL = ("--load-format", "dummy", "--hf-overrides", json.dumps(_SMALL_SHAPE))
# Fewer layers for the quick variant; all systems compute less alike.
_SHALLOW = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}')
# A preempted request is computed again, as vLLM does; else its KV is kept in the arena.
_RECOMPUTE = ("--tetri-load-budget-bytes", "1")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a job is run.

    Attributes:
        words: Its options, with placeholders.
        minutes: How long it takes on two CPU cores, for the progress bar.
        serve: Options of `vllm serve`, which follow `--`.
    """

    words: tuple[str, ...]
    minutes: float
    serve: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and the file in which it leaves its numbers.

    Attributes:
        name: Of its folder.
        command: Behind `vllm-tetri`.
        pictures: What it draws, as patterns of names.
        takes_serve: Whether what the user gives behind `--` is for its engines.
    """

    name: str
    command: str
    result: str
    quick: Variant
    full: Variant
    pictures: tuple[str, ...] = ()
    takes_serve: bool = False

    def variant(self, is_quick: bool) -> Variant:
        """The one that is run."""
        return self.quick if is_quick else self.full

    def missing(self, is_quick: bool, known: Mapping[str, str]) -> list[str]:
        """Placeholders that nothing is known for."""
        needed = (MODEL, PREDICTOR, ANSWERS)
        words = self.variant(is_quick).words
        return [each for each in needed if each in words and each not in known]

    def line(self, is_quick: bool, known: Mapping[str, str], serve: Sequence[str]) -> list[str]:
        """The whole command behind `vllm-tetri`.

        Args:
            known: Values of placeholders; those of what is missing stay as they are.
            serve: What the user gave behind `--`.
        """
        variant = self.variant(is_quick)
        words = [*self.command.split()]
        for word in variant.words:
            if word != RIVAL:
                words.append(_filled(word, known))
            elif RIVAL in known:
                words += ["--rival", known[RIVAL]]
        tail = [*variant.serve, *(serve if self.takes_serve else ())]
        return [*words, "--", *tail] if tail else words


JOBS = {
    job.name: job
    for job in (
        Job(
            "decisions",
            "bench decisions",
            "decisions.json",
            Variant(("--decisions", "200", "--repeats", "2", "--output", OUTPUT), 0.1),
            Variant(("--output", OUTPUT), 1),
            ("decisions.svg",),
        ),
        Job(
            "transfer",
            "bench transfer",
            "transfer.json",
            Variant(("--repeats", "5", "--json", f"{OUTPUT}/transfer.json"), 0.1),
            Variant(("--repeats", "15", "--json", f"{OUTPUT}/transfer.json"), 1),
        ),
        Job(
            "paper",
            "bench paper",
            "paper.json",
            Variant(("--quick", "--output", OUTPUT), 1),
            Variant(("--output", OUTPUT), 7),
            ("*.svg",),
        ),
        Job(
            "saturation",
            "bench saturation",
            "saturation.json",
            Variant((MODEL, "--cores", "1", "--output", f"{OUTPUT}/saturation.svg"), 0.6),
            Variant((MODEL, "--output", f"{OUTPUT}/saturation.svg"), 2),
            ("saturation.svg",),
            takes_serve=True,
        ),
        Job(
            "order",
            "bench order",
            "order.json",
            Variant(
                ("--batches", "16,128", "--repeats", "1", "--parts", "queue", "--output", OUTPUT),
                0.9,
            ),
            Variant(("--output", OUTPUT), 15),
            ("order.svg",),
        ),
        Job(
            "interference",
            "bench interference",
            "interference.json",
            Variant(
                (
                    *("--counts", "1,7,63", "--repeats", "1", "--batches", "16"),
                    *("--output", OUTPUT),
                ),
                0.7,
            ),
            Variant(
                (MODEL, "--batches", "16", "--output", OUTPUT), 45, ("--max-model-len", "2048")
            ),
            ("interference.svg",),
            takes_serve=True,
        ),
        Job(
            "handover",
            "bench handover",
            "handover.json",
            Variant((MODEL, "--prompts", "100,500", "--requests", "4", "--output", OUTPUT), 1.8),
            Variant((MODEL, "--output", OUTPUT), 10),
            ("handover.svg",),
            takes_serve=True,
        ),
        Job(
            "predictor",
            "bench predictor",
            "predictor.json",
            Variant(
                (
                    *(MODEL, PREDICTOR, "--requests", "16", "--repeats", "1"),
                    *("--places", "shared", "--output", OUTPUT),
                ),
                2,
            ),
            Variant((MODEL, PREDICTOR, "--output", OUTPUT), 20),
            ("predictor.svg",),
            takes_serve=True,
        ),
        Job(
            "lengths",
            "predictor eval",
            "eval.json",
            Variant((ANSWERS, PREDICTOR, "--output", OUTPUT), 1),
            Variant((ANSWERS, PREDICTOR, "--output", OUTPUT), 1),
            ("eval.svg",),
        ),
        Job(
            "admission",
            "bench admission",
            "admission.json",
            Variant(
                (
                    *(MODEL, "--requests", "64", "--kv-tokens", "4096", "--repeats", "1"),
                    *("--policies", "greedy,reserve-dynamic", "--accuracies", "1"),
                    *("--scale", "0.25", "--add", "--output", OUTPUT),
                ),
                2.1,
                (*_SMALL, *_RECOMPUTE),
            ),
            Variant(
                (MODEL, "--scale", "0.5", "--add", "--output", OUTPUT), 25, (*_SMALL, *_RECOMPUTE)
            ),
            ("admission.svg",),
        ),
        Job(
            "dispatch",
            "bench dispatch",
            "dispatch.json",
            Variant(
                (
                    *(MODEL, "--instances", "2", "--prefill", "1", "--requests", "16"),
                    *("--policies", "power-of-two,imbalance", "--repeats", "1"),
                    *("--longest", "256", "--scale", "0.5", "--add", "--output", OUTPUT),
                ),
                1.7,
                _SMALL,
            ),
            Variant((MODEL, "--add", "--output", OUTPUT), 75, _SMALL),
            ("dispatch.svg",),
        ),
        Job(
            "flip",
            "bench flip",
            "flip.json",
            Variant(
                (
                    *(MODEL, "--phase", "8", "--phases", "2", "--repeats", "1"),
                    *("--systems", "2P1D,balance", "--loads", "swing", "--longest-prompt", "1000"),
                    *("--longest", "64", "--timing", "12", "--add", "--output", OUTPUT),
                ),
                1.7,
                _SMALL,
            ),
            Variant((MODEL, "--add", "--output", OUTPUT), 120, _SMALL),
            ("flip.svg",),
        ),
        Job(
            "modes",
            "bench modes",
            "modes.json",
            Variant(
                (
                    *(MODEL, "--systems", "stock,stock-256,split,adaptive", "--classes", "mixed"),
                    *("--rates", "knee", "--requests", "24", "--repeats", "1"),
                    *("--add", "--output", OUTPUT),
                ),
                3.5,
                _SHALLOW,
            ),
            Variant((MODEL, RIVAL, "--add", "--output", OUTPUT), 1000),
            ("modes-*.svg",),
            takes_serve=True,
        ),
    )
}


def _filled(word: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word
