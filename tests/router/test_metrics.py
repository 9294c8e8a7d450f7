"""Metrics of the router, and the page that lists them."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import FakeInstance, cluster
from tests.router.metrics_page import BEGIN, END, PAGE, scraped, tables
from vllm_tetri.router.metrics import LOAD_NUMBERS
from vllm_tetri.types import InstanceLoad, Role


async def test_the_page_has_what_is_declared() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == tables(await scraped()), "run python -m tests.router.metrics_page"


async def test_every_family_has_a_sentence_and_a_series_from_the_start() -> None:
    families = list(text_string_to_metric_families(await scraped()))
    assert len(families) > 50
    assert len({family.documentation for family in families}) == len(families)
    for family in families:
        assert family.samples, family.name
        assert re.fullmatch(r"[A-Z1].{8,}\.", family.documentation), family.name
        assert not family.name.endswith("_created")
        if family.name.endswith("_seconds"):
            assert re.search("[Ss]econds", family.documentation), family.name


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
    undocumented = {"usual_tokens", "queued_context"}  # for routers and dispatchers only
    assert LOAD_NUMBERS.keys() == set(InstanceLoad.__slots__) - undocumented
    for field, number in LOAD_NUMBERS.items():
        assert number.unit, field
        assert number.help.endswith("."), field
