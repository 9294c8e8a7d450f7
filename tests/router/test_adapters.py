"""LoRA adapters that are loaded while instances serve."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.fakes import Cluster, FakeInstance, cluster, eventually, pair, ranks
from vllm_tetri.router.adapters import LOAD, UNLOAD
from vllm_tetri.types import Role

ORDER = {"lora_name": "lora-a", "lora_path": "/a"}


async def listed(made: Cluster) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in (await made.get("/v1/models"))["data"]}


async def test_an_order_goes_to_all_instances_and_the_adapter_is_split() -> None:
    async with cluster(*pair()) as made:
        assert (await made.ask(LOAD, **ORDER))[:2] == (200, b"loaded")
        card = (await listed(made))["lora-a"]
        assert (card["root"], card["parent"]) == ("/a", "tiny")
        status, answer, headers = await made.ask(model="lora-a", prompt="x")
        assert (status, answer["kind"], headers["x-tetri-prefill"]) == (200, "injected", "p")
        assert [made[name].calls[-1].body["model"] for name in "pd"] == ["lora-a"] * 2
        assert (await made.ask(UNLOAD, lora_name="lora-a"))[:2] == (200, b"unloaded")
        assert (await made.ask(model="lora-a", prompt="x"))[0] == 404
        assert (await made.ask(UNLOAD, lora_name="lora-a"))[0] == 404  # as vLLM says


async def test_what_one_instance_cannot_load_no_other_keeps() -> None:
    one, other = pair()
    other.can_load = False
    async with cluster(one, other) as made:
        status, answer, _ = await made.ask(LOAD, **ORDER)
        assert status == 502
        assert "1 of 2" in answer["error"]["message"]
        assert other.id in answer["error"]["message"]
        assert one.adapters == {} == other.adapters
        one.can_load = False
        status, answer, _ = await made.ask(LOAD, **ORDER)
        assert (status, answer["error"]["message"]) == (404, "no adapter is there")


async def test_an_instance_that_joins_loads_what_the_others_have() -> None:
    async with cluster(FakeInstance("a", Role.BOTH)) as made:
        await made.ask(LOAD, **ORDER)
        joins = await made.add(FakeInstance("b", Role.BOTH))
        assert joins.adapters == made["a"].adapters
        await made.ask(UNLOAD, lora_name="lora-a")
        assert (await made.add(FakeInstance("c", Role.BOTH))).adapters == {}


async def test_an_instance_that_joins_loads_what_was_loaded_by_a_router_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_tetri.router.adapters._ASK_AGAIN_S", -1.0)
    async with cluster(*(FakeInstance(name, Role.BOTH) for name in "ac")) as made:
        made["a"].adapters["lora-a"] = made["c"].adapters["lora-a"] = ("/a", "d")
        made["a"].adapters["lora-b"] = ("/b", "d")  # which not all have
        joins = await made.add(FakeInstance("b", Role.BOTH))
        assert joins.adapters == {"lora-a": ("/a", "d")}


async def test_orders_during_a_join_reach_the_instance_that_joins() -> None:
    async with cluster(FakeInstance("a", Role.BOTH)) as made:
        await made.ask(LOAD, **ORDER)
        b = FakeInstance("b", Role.BOTH)
        b.load_gate.clear()
        joining = asyncio.create_task(made.add(b))
        await eventually(lambda: b.num_loads)
        orders = [
            asyncio.create_task(made.ask(LOAD, lora_name="lora-y", lora_path="/y")),
            asyncio.create_task(made.ask(UNLOAD, lora_name="lora-a")),
        ]
        await asyncio.sleep(0.1)  # they are on their way
        b.load_gate.set()
        assert [status for status, *_ in await asyncio.gather(*orders)] == [200, 200]
        await joining
        assert b.adapters == made["a"].adapters == {"lora-y": ("/y", "d")}


async def test_requests_of_an_adapter_go_where_it_is() -> None:
    async with cluster(*(FakeInstance(name, Role.BOTH) for name in "abc")) as made:
        made["b"].adapters["lora-b"] = ("/b", "d")  # not by this router
        for _ in range(4):
            status, answer, _ = await made.ask(model="lora-b", prompt="x")
            assert (status, answer["by"]) == (200, "b")
        made["c"].adapters["lora-b"] = made["b"].adapters.pop("lora-b")
        made["a"].adapters["lora-a"] = ("/a", "d")

        async with asyncio.timeout(10):  # it asks all once a second
            while (await made.ask(model="lora-a", prompt="x"))[0] == 404:
                await asyncio.sleep(0.05)
        status, answer, _ = await made.ask(model="lora-b", prompt="x")
        assert (status, answer["by"]) == (200, "c")


async def test_requests_that_come_at_once_all_find_an_adapter_of_another_router() -> None:
    async with cluster(*(FakeInstance(name, Role.BOTH) for name in "ab")) as made:
        made["b"].adapters["lora-b"] = ("/b", "d")
        asked = [made.ask(model="lora-b", prompt="x") for _ in range(8)]
        assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 8


async def test_an_order_that_a_silent_instance_would_miss_is_refused() -> None:
    async with cluster(*(FakeInstance(name, Role.BOTH) for name in "ab")) as made:
        made["b"].speaks.clear()
        await eventually(lambda: made.scheduler.monitor.view_of(made["b"].id).state == "silent")
        status, answer, _ = await made.ask(LOAD, **ORDER)
        assert (status, answer["error"]["message"].partition(";")[0]) == (503, "b is silent")
        assert not made["a"].adapters
        made["b"].speaks.set()
        await eventually(lambda: made.scheduler.monitor.view_of(made["b"].id).state == "ready")
        assert (await made.ask(LOAD, **ORDER))[0] == 200
        assert made["a"].adapters == made["b"].adapters != {}


async def test_an_order_that_a_server_which_does_not_answer_would_miss_is_refused() -> None:
    async with cluster(*(FakeInstance(name, Role.BOTH) for name in "ab")) as made:
        await made["b"].stop_http()
        made.scheduler.doubt(made["b"].info())
        await eventually(lambda: made.state("b") == "starting")
        assert (await made.ask(LOAD, **ORDER))[0] == 503
        await made["b"].start_http()
        await eventually(lambda: made.state("b") == "ready")
        assert (await made.ask(LOAD, **ORDER))[0] == 200


async def test_instances_that_join_do_not_ask_all_others_each() -> None:
    async with cluster(*(FakeInstance(f"i{number}", Role.BOTH) for number in range(12))) as made:
        assert sum(each.num_asked for each in made.instances.values()) < 60


async def test_a_server_loads_once_for_all_its_ranks() -> None:
    async with cluster(*ranks(Role.BOTH, Role.BOTH)) as made:
        for _ in range(2):
            assert (await made.ask(LOAD, **ORDER))[0] == 200
            assert (await made.ask(model="lora-a", prompt="x"))[0] == 200
            assert (await made.ask(UNLOAD, lora_name="lora-a"))[0] == 200
