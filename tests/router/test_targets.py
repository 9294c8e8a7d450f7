"""Instances as Prometheus' HTTP service discovery finds them."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.router.fakes import FakeInstance, cluster, eventually, info_of, ranks
from vllm_tetri.router.metrics import targets
from vllm_tetri.types import Role

PATH = "/tetri/v1/targets"


async def test_an_instance_is_a_target_until_it_has_left() -> None:
    prefill, decode = FakeInstance("p", Role.PREFILL), FakeInstance("d", Role.DECODE)
    async with cluster(prefill, decode) as made:
        rows = [
            {
                "targets": [urlsplit(each.url).netloc],
                "labels": {"instance": each.id, "role": each.role.value, "model": "tiny"},
            }
            for each in (decode, prefill)
        ]
        assert await made.get(PATH) == rows
        decode.speaks.clear()
        await eventually(lambda: made.state("d") == "silent")
        assert await made.get(PATH) == rows
        decode.speaks.set()
        await decode.close()
        await eventually(lambda: made.state("d") == "absent")
        assert await made.get(PATH) == rows[1:]


async def test_a_router_that_knows_no_instance_does_not_say_that_there_is_none() -> None:
    async with cluster() as made, made.client.get(made.url + PATH) as response:
        assert response.status == 503  # Prometheus keeps its targets


def test_ranks_of_a_server_are_one_target() -> None:
    infos = [each.info() for each in ranks(Role.PREFILL, Role.DECODE)]
    infos += [info_of("own-dp7", Role.BOTH, "http://[::1]:8100")]
    labels = [
        {"instance": "own-dp7", "role": "both", "model": "tiny"},
        {"instance": "s", "role": "decode+prefill", "model": "tiny"},
    ]
    assert [each["labels"] for each in targets(infos)] == labels
    assert targets(infos)[0]["targets"] == ["[::1]:8100"]
