"""Metrics of the router, and the page that lists them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import FakeInstance, cluster
from vllm_tetri.router.metrics import LOAD_NUMBERS
from vllm_tetri.types import InstanceLoad, Role

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


async def test_the_page_lists_every_family_that_is_scraped() -> None:
    async with cluster(FakeInstance("b", Role.BOTH)) as made:
        await made.ask()
        text = await made.metrics()
    listed = PAGE.read_text()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 50
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        if not family.name.endswith("_created"):
            (row,) = (line for line in listed.splitlines() if line.startswith(f"| `{name}` |"))
            assert f"| `{name}` | {family.type} |" in row
            assert f"| {family.documentation} |" in row
            field = name.removeprefix("tetri_instance_").removesuffix("_total")
            assert field not in LOAD_NUMBERS or row.endswith(f"| `{field}` |")


async def test_a_load_report_has_the_same_numbers_everywhere() -> None:
    load = {"reserved_blocks": 5, "step_s": 0.5, "predictions_made": 7}
    async with cluster(FakeInstance("b", Role.BOTH), FakeInstance("d", Role.DECODE)) as made:
        await made.report("b", **load, leftovers=("2 blocks", "1 slot"))
        rows = (await made.get("/tetri/v1/instances"))["instances"]
        text = await made.metrics()
    assert rows[0]["leftovers"] == ["2 blocks", "1 slot"]
    assert LOAD_NUMBERS.keys() <= rows[0].keys()
    for name, value in {
        "reserved_blocks": 5.0,
        "step_seconds": 0.5,
        "predictions_made_total": 7.0,
        "leftovers": 2.0,
        "in_flight": 0.0,
    }.items():
        assert f'tetri_instance_{name}{{instance="b"}} {value}' in text
    assert 'tetri_instance_leftovers{instance="d"} 0.0' in text


def test_every_number_of_a_load_report_has_unit_and_help() -> None:
    undocumented = {"usual_tokens"}  # for dispatchers only
    assert LOAD_NUMBERS.keys() == set(InstanceLoad.__slots__) - undocumented
    for field, number in LOAD_NUMBERS.items():
        assert number.unit, field
        assert number.help.endswith("."), field
