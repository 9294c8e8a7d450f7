"""Several instances behind one URL: the ranks of a data-parallel server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.fakes import Cluster, FakeInstance, cluster, ranks
from vllm_tetri.handover import RANK_HEADER, DecodeParams, PrefillParams
from vllm_tetri.types import Role


def asked(made: Cluster) -> list[tuple[type[Any], list[str]]]:
    """Which part of a request the server got, and for which ranks."""
    first = made["s-dp0"]
    return [
        (type(first.leg(at)), call.headers.getall(RANK_HEADER))
        for at, call in enumerate(first.calls)
    ]


async def test_both_parts_of_a_split_request_name_their_rank() -> None:
    async with cluster(*ranks(Role.PREFILL, Role.DECODE)) as made:
        status, _, headers = await made.ask(headers={RANK_HEADER: "7"})
        ran = headers["x-tetri-prefill"], headers["x-tetri-decode"]
        assert (status, ran) == (200, ("s-dp0", "s-dp1"))
        assert asked(made) == [(PrefillParams, ["0"]), (DecodeParams, ["1"])]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_a_proxied_request_names_the_rank_that_the_router_chose(path: str) -> None:
    async with cluster(*ranks(Role.BOTH, Role.BOTH)) as made:
        status, _, headers = await made.ask(path, headers={RANK_HEADER.lower(): "7"})
        assert status == 200
        assert made["s-dp0"].calls[-1].headers.getall(RANK_HEADER) == [
            headers["x-tetri-decode"][-1]
        ]


async def test_an_instance_of_its_own_gets_no_rank() -> None:
    async with cluster(FakeInstance("a", Role.BOTH)) as made:
        assert (await made.ask())[0] == 200
        assert RANK_HEADER not in made["a"].calls[-1].headers
