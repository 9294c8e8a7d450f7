from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.router.fakes import FakeInstance, cluster, eventually
from vllm_tetri import cli
from vllm_tetri.types import Role


async def test_status_shows_every_instance_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    decode = FakeInstance("d", Role.DECODE)
    decode.load = replace(
        decode.load, running=3, heavy=1, light=2, blocks_used=10, reserved_blocks=7, step_s=0.0251,
        arena_used_bytes=1 << 20, arena_total_bytes=4 << 20, queued_prefill_tokens=99,
    )  # fmt: skip
    async with cluster(decode, FakeInstance("p", Role.PREFILL)) as made:
        await eventually(lambda: made.scheduler.monitor.view().instances[0].load.running == 3)
        assert await asyncio.to_thread(cli.main, ["status", "--url", made.url]) == 0
        head, first, second, policy = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "id"
    assert "heavy:light" in head
    words = first.split()
    assert words[:3] == ["d", "decode", "ready"]
    assert [words[4], *words[5:]] == [
        "0", "3", "0", "0", "1:2", "99", "10+7/100", "1/4", "MiB", "25ms", decode.url
    ]  # fmt: skip
    assert second.split()[:3] == ["p", "prefill", "ready"]
    assert policy == "flip policy: nobody watches: roles change by order only"


async def test_status_and_metrics_of_an_empty_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster() as made:
        assert await asyncio.to_thread(cli.main, ["status", "--url", made.url]) == 0
        assert capsys.readouterr().out == "no instances\n"


async def test_metrics_have_what_placement_goes_by() -> None:
    one = FakeInstance("b", Role.BOTH)
    one.load = replace(one.load, reserved_blocks=5, step_s=0.5, predictions_made=7)
    async with cluster(one) as made:
        await eventually(lambda: made.scheduler.monitor.view().instances[0].load.step_s)
        async with made.client.get(made.url + "/metrics") as response:
            text = await response.text()
    assert 'tetri_instance_reserved_blocks{instance="b"} 5.0' in text
    assert 'tetri_instance_step_seconds{instance="b"} 0.5' in text
    assert 'tetri_instance_predictions_made_total{instance="b"} 7.0' in text
    assert 'tetri_instance_in_flight{instance="b"} 0.0' in text


async def test_what_an_instance_has_left_is_shown() -> None:
    one = FakeInstance("b", Role.BOTH)
    one.load = replace(one.load, leftovers=("2 blocks", "1 first tokens for nobody"))
    async with cluster(one, FakeInstance("d", Role.DECODE)) as made:
        await eventually(lambda: made.scheduler.monitor.view().instances[0].load.leftovers)
        rows = (await made.get("/tetri/v1/instances"))["instances"]
        async with made.client.get(made.url + "/metrics") as response:
            text = await response.text()
    assert {row["id"]: row["leftovers"] for row in rows} == {
        "b": ["2 blocks", "1 first tokens for nobody"],
        "d": [],
    }
    assert 'tetri_audit_leftovers{instance="b"} 2.0' in text
    assert 'tetri_audit_leftovers{instance="d"} 0.0' in text
