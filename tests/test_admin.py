"""The commands of operators."""

from __future__ import annotations

import json
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
        assert await made.command("status") == 0
        head, first, second, policy = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "id"
    assert "heavy:light" in head
    words = first.split()
    assert words[:3] == ["d", "decode", "ready"]
    assert [words[4], *words[5:]] == [
        "0", "3", "0", "0", "1:2", "99", "10+7/100", "1/4", "MiB", "25ms", decode.url
    ]  # fmt: skip
    assert second.split()[:3] == ["p", "prefill", "ready"]
    assert policy == "flip policy: off: roles change by order only"


async def test_status_and_one_log_line_say_who_exchanges_no_kv(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    names = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    both = [FakeInstance(*each, identity={"weights": each[0]}) for each in names.items()]
    async with cluster(*both) as made:
        told = "decode and prefill exchange no KV, since they differ in weights decode () and"
        await eventually(lambda: told in caplog.text)
        assert await made.command("status") == 0
        assert told in capsys.readouterr().out
        seen = [each for each in caplog.records if told in each.getMessage()]
        assert [each.levelname for each in seen] == ["WARNING"]


async def test_status_prints_the_response_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(FakeInstance("d", Role.DECODE)) as made:
        assert await made.command("status", "--json") == 0
        content = json.loads(capsys.readouterr().out)
        assert set(content) == set(await made.get("/tetri/v1/instances"))
    assert [row["id"] for row in content["instances"]] == ["d"]


async def test_no_proxy_is_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it would get the key
    async with cluster(FakeInstance("d", Role.DECODE)) as made:
        assert await made.command("status") == 0


@pytest.mark.parametrize(
    "words", [["drain", "x"], ["flip", "x", "both"], ["mode"], ["status"], ["top"]]
)
def test_a_command_without_a_router_says_what_to_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "vllm-tetri: no router answers at http://127.0.0.1:1: connection refused; "
        "start one with `vllm-tetri up MODEL` or give --url\n"
    )
