"""The tables of docs/metrics.md, made from what a router declares and serves.

`python -m tests.router.metrics_page` writes them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import FakeInstance, cluster
from vllm_tetri.router.metrics import LOAD_NUMBERS
from vllm_tetri.types import Role

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!--tables-->\n", "<!--end-->\n"
_OWN = ("le", "quantile")  # labels of the format itself


async def scraped() -> str:
    """What a router of one instance serves."""
    async with cluster(FakeInstance("b", Role.BOTH)) as made:
        await made.ask()
        return await made.metrics()


def tables(text: str) -> str:
    """The families of a scrape, those of load reports apart."""
    of_router = ["## Router\n\n| metric | type | labels | help |\n| --- | --- | --- | --- |\n"]
    of_loads = [
        "\n## Load of the instances\n\nEach has the label `instance`. ",
        "`GET /tetri/v1/instances` has these numbers by field.\n\n",
        "| metric | type | unit | help | field |\n| --- | --- | --- | --- | --- |\n",
    ]
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        field = _field(name)
        if field is None:
            row = [f"`{name}`", family.type, _labels(family), family.documentation]
            of_router.append(f"| {' | '.join(row)} |\n")
        else:
            unit = LOAD_NUMBERS[field].unit
            row = [f"`{name}`", family.type, unit, family.documentation, f"`{field}`"]
            of_loads.append(f"| {' | '.join(row)} |\n")
    values = [
        f"- `{field}` ({number.unit}): {number.help}\n"
        for field, number in LOAD_NUMBERS.items()
        if number.kind == "value"
    ]
    return "".join([*of_router, *of_loads, "\nOnly there:\n\n", *values])


def _labels(family: Metric) -> str:
    assert family.samples, f"{family.name} has no series from the start"
    found = dict.fromkeys(
        label for sample in family.samples for label in sample.labels if label not in _OWN
    )
    return ", ".join(f"`{label}`" for label in found) or "–"


def _field(name: str) -> str | None:
    short = name.removeprefix("tetri_instance_")
    names = (short, short.removesuffix("_total"), short.removesuffix("econds"))
    names = (*names, names[1].removesuffix("econds"))
    return next((each for each in names if each in LOAD_NUMBERS), None) if short != name else None


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + tables(asyncio.run(scraped())) + END + after)


if __name__ == "__main__":
    main()
