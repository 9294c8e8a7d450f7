"""Evaluations as table, numbers and picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.predictor.answers import Answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vllm_tetri.predictor.evaluate import Evaluation, Scored

_COLUMNS = ("", "accuracy, %", "skill", "Spearman", "error, tokens", "heavy AUC", "ECE, %")
_DIGITS = 4


def table(evaluation: Evaluation) -> Table:
    """A row per method, then how far the predictor is ahead; 95 % bootstrap intervals."""
    buckets = evaluation.buckets
    methods = evaluation.methods
    title = (
        f"buckets of {buckets.granularity_tokens} tokens: {', '.join(buckets.names())}; "
        f"{methods['predictor'].num} held-out prompts; {evaluation.base_model}"
    )
    shown = Table(title=title, title_justify="left")
    for index, name in enumerate(_COLUMNS):
        shown.add_column(name, justify="right" if index else "left")
    for name, scored in methods.items():
        shown.add_row(name, *_cells(scored), end_section=name == list(methods)[-1])
    for other, found in evaluation.differences.items():
        shown.add_row(
            f"predictor − {other}",
            found["accuracy"].text(100, signed=True),
            "",
            found["spearman"].text(1, 2, signed=True),
            found["mae_tokens"].text(1, 0, signed=True),
            found["heavy_auc"].text(1, 2, signed=True),
            "",
        )
    return shown


def write_json(path: Path, answers: Answers, evaluations: Sequence[Evaluation]) -> None:
    """Everything that the tables and the picture show, and what it was measured on."""
    lengths = [length for asked in answers.asked for length in asked.lengths]
    content = {
        "target": msgspec.to_builtins(answers.target),
        "data_digest": answers.digest,
        "num_prompts": len(answers.asked),
        "num_answers": len(lengths),
        "num_cut": sum(length >= answers.target.max_tokens for length in lengths),
        "granularities": [dataclasses.asdict(each) for each in evaluations],
    }
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n")


def draw(path: Path, answers: Answers, evaluations: Sequence[Evaluation]) -> None:
    """Accuracy by granularity and method; confidence against accuracy."""
    figure, (bars, curve) = picture.new(
        f"Predicted lengths of {answers.target.model}'s answers, held-out prompts", 2
    )
    _draw_accuracy(bars, evaluations)
    _draw_reliability(curve, evaluations)
    picture.save(figure, path)


def _draw_accuracy(axis: Axes, evaluations: Sequence[Evaluation]) -> None:
    names = list(dict.fromkeys(name for each in evaluations for name in each.methods))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places, values, below, above = [], [], [], []
        for place, evaluation in enumerate(evaluations):
            if name in evaluation.methods:
                found = evaluation.methods[name].metrics["accuracy"]
                places.append(place + (index - (len(names) - 1) / 2) * width)
                values.append(found.value * 100)
                below.append((found.value - found.low) * 100)
                above.append((found.high - found.value) * 100)
        axis.bar(places, values, width * 0.92, label=name, yerr=(below, above))
    axis.set_xticks(
        range(len(evaluations)),
        [f"{each.buckets.granularity_tokens} tokens" for each in evaluations],
    )
    axis.set_ylabel("right bucket, %")
    axis.set_ylim(0, 115)
    axis.legend(ncols=2, fontsize=8, loc="upper left")


def _draw_reliability(axis: Axes, evaluations: Sequence[Evaluation]) -> None:
    axis.plot((0, 100), (0, 100), color="#b0b0b0", linewidth=0.8)
    for evaluation in evaluations:
        found = evaluation.methods["predictor"].reliability
        axis.plot(
            [each.confidence * 100 for each in found],
            [each.accuracy * 100 for each in found],
            marker="o",
            markersize=3,
            label=f"{evaluation.buckets.granularity_tokens} tokens",
        )
    axis.set_xlabel("probability that the predictor gives its bucket, %")
    axis.set_ylabel("right bucket, %")
    axis.legend(fontsize=8)


def _cells(scored: Scored) -> list[str]:
    metrics = scored.metrics
    error = scored.calibration_error
    return [
        metrics["accuracy"].text(100),
        f"{scored.skill:.2f}",
        metrics["spearman"].text(1, 2),
        metrics["mae_tokens"].text(1, 0),
        metrics["heavy_auc"].text(1, 2),
        "" if error is None else f"{error * 100:.1f}",
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value
