"""Responses that the router makes from those of several instances."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import (
    Cluster,
    FakeInstance,
    cluster,
    eventually,
    hang,
    held_back,
    let_go,
    pair,
    ranks,
)
from vllm_tetri.router import merged
from vllm_tetri.types import Role

TEXT = """# HELP python_info Platform
# TYPE python_info gauge
python_info{{version="3"}} 1.0
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# HELP vllm:kv_cache_usage_perc Used.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
# HELP vllm:cache_config_info Config.
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{blocks="9"}} 1.0
# HELP vllm:prompt_tokens_total Tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0"}} {tokens}
# HELP vllm:e2e_request_latency_seconds Time.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{{le="1.0"}} 1.0
vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} 2.0
vllm:e2e_request_latency_seconds_count 2.0
vllm:e2e_request_latency_seconds_sum 3.5
"""
ORIGIN = "http://page.example"


def metrics_of(running: int = 0, usage: float = 0.0, tokens: int = 0) -> str:
    return TEXT.format(running=running, usage=usage, tokens=tokens)


async def samples(made: Cluster) -> dict[str, float]:
    """All samples of the router's metrics; families must be valid and occur once."""
    families = list(text_string_to_metric_families(await made.metrics()))
    assert len({each.name for each in families}) == len(families)
    found = [each for family in families for each in family.samples]
    return {each.name + str(each.labels.get("le", "")): each.value for each in found}


async def test_vllms_metrics_of_all_instances_are_one() -> None:
    p, d = pair()
    p.metrics, d.metrics = metrics_of(1, 0.5, 40), metrics_of(2, 0.25, 2)
    async with cluster(p, d) as made:
        found = await samples(made)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:prompt_tokens_total"] == 42
    assert found["vllm:kv_cache_usage_perc"] == 0.375
    assert found["vllm:cache_config_info"] == 1
    assert found["vllm:e2e_request_latency_seconds_bucket+Inf"] == 4
    assert found["vllm:e2e_request_latency_seconds_sum"] == 7
    assert "python_info" not in found
    assert found["tetri_requests_in_flight"] == 0


async def test_ranks_of_a_server_are_counted_once() -> None:
    found = ranks(Role.BOTH, Role.BOTH)
    found[0].metrics = metrics_of(3, 0.5, 40)
    async with cluster(*found) as made:
        merged = await samples(made)
        assert merged["vllm:prompt_tokens_total"] == 40
        assert merged["vllm:num_requests_running"] == 3


async def test_a_server_whose_first_rank_leaves_is_still_counted_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged, "_FRESH_S", 0.0)
    first, other = ranks(Role.BOTH, Role.BOTH)
    first.metrics = metrics_of(3, 0.5, 40)
    async with cluster(first, other) as made:
        assert (await samples(made))["vllm:prompt_tokens_total"] == 40
        assert (await made.order(f"instances/{first.id}/drain"))[0] == 202
        await eventually(lambda: made.state(first.id) == "absent")
        first.metrics = metrics_of(3, 0.5, 41)
        for _ in range(2):
            assert (await samples(made))["vllm:prompt_tokens_total"] == 41


async def test_counts_stay_when_an_instance_leaves_and_gauges_do_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged, "_FRESH_S", 0.0)
    p, d = pair()
    p.metrics, d.metrics = metrics_of(1, 0.5, 40), metrics_of(2, 0.25, 2)
    async with cluster(p, d) as made:
        assert (await samples(made))["vllm:prompt_tokens_total"] == 42
        assert (await made.order("instances/p/drain", {"force": True}))[0] == 202
        await eventually(lambda: made.state("p") == "absent")
        await p.stop_http()
        for _ in range(2):
            found = await samples(made)
            assert found["vllm:prompt_tokens_total"] == 42
            assert found["vllm:num_requests_running"] == 2
            assert found["vllm:e2e_request_latency_seconds_count"] == 4
        await p.start(made.control)  # it was only out of reach
        await eventually(lambda: made.state("p") == "ready")
        assert (await samples(made))["vllm:prompt_tokens_total"] == 42


async def test_counts_stay_when_a_restarted_instance_has_the_same_pid(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged, "_FRESH_S", 0.0)
    p, d = pair()
    p.metrics, d.metrics = metrics_of(tokens=40), metrics_of(tokens=2)
    async with cluster(p, d) as made:

        def num_reports() -> int:
            one = made.scheduler.monitor.view_of(p.id)
            return one.seq if one is not None else 0

        await eventually(lambda: num_reports() > 20)
        assert (await samples(made))["vllm:prompt_tokens_total"] == 42
        assert p.agent is not None
        await asyncio.to_thread(p.agent.close)
        p.metrics = metrics_of(tokens=1)
        p.join(made.control)
        await eventually(lambda: 0 < num_reports() < 20)
        for _ in range(2):
            assert (await samples(made))["vllm:prompt_tokens_total"] == 43


async def test_an_instance_that_does_not_answer_is_as_it_was_last(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged, "_FRESH_S", 0.0)
    monkeypatch.setattr(merged, "_TIMEOUT_S", 0.1)
    p, d = pair()
    p.metrics, d.metrics = metrics_of(tokens=40), metrics_of(tokens=2)
    async with cluster(p, d) as made:
        await samples(made)
        await p.stop_http()
        d.metrics = metrics_of(tokens=3)
        assert (await samples(made))["vllm:prompt_tokens_total"] == 43
        d.metrics = "# HELP vllm:prompt_tokens_total x\nnonsense without a number\n"
        assert (await samples(made))["vllm:prompt_tokens_total"] == 40


async def test_many_scrapers_cost_one_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "_FRESH_S", 60.0)
    p, d = pair()
    p.metrics = metrics_of(tokens=1)
    async with cluster(p, d) as made:
        texts = await asyncio.gather(*(made.metrics() for _ in range(5)))
        p.metrics = metrics_of(tokens=2)
        assert all("vllm:prompt_tokens_total" in each for each in [*texts, await made.metrics()])
        assert (await samples(made))["vllm:prompt_tokens_total"] == 1


async def test_the_load_is_the_number_of_requests_in_flight() -> None:
    (one,) = held_back(FakeInstance("b", Role.BOTH))
    async with cluster(one) as made:
        asking = [asyncio.create_task(made.ask()) for _ in range(2)]
        await eventually(lambda: len(one.calls) == 2)
        assert await made.get("/load") == {"server_load": 2}
        let_go(one)
        await asyncio.gather(*asking)
        assert await made.get("/load") == {"server_load": 0}


async def test_the_description_of_the_api_has_the_routes_of_the_router() -> None:
    async def describe(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
        operations = {"get": {"x": 1}, "post": {"x": 2}, "delete": {}}
        paths = ("/v1/completions", "/v1/responses/{response_id}", "/metrics", "/scale_elastic_ep")
        assert request.path == "/openapi.json"
        return web.json_response({"openapi": "3.1.0", "paths": dict.fromkeys(paths, operations)})

    p, d = pair()
    p.handler = d.handler = describe
    async with cluster(p, d) as made:
        for _ in range(2):
            document = await made.get("/openapi.json")
            assert document["openapi"] == "3.1.0"
            assert document["paths"] == {
                "/v1/completions": {"post": {"x": 2}},
                "/v1/responses/{response_id}": {"get": {"x": 1}},
                "/metrics": {"get": {"x": 1}},
            }
        assert len(p.calls) + len(d.calls) == 1


async def test_without_a_description_there_is_none() -> None:
    async def refuse(*_: Any) -> web.StreamResponse:
        return web.Response(status=404)

    p, d = pair()
    p.handler = d.handler = refuse
    async with cluster(p, d) as made, made.client.get(made.url + "/openapi.json") as response:
        assert response.status == 404


async def allow_pages(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
    """Respond as vLLM does with --allowed-origins."""
    if request.method == "OPTIONS":
        headers = {"access-control-allow-origin": ORIGIN, "access-control-max-age": "600"}
        return web.Response(text="OK", headers=headers)
    response = await fake.answer(request, body)
    if request.headers.get("Origin") == ORIGIN and not response.prepared:
        response.headers["access-control-allow-origin"] = ORIGIN
        response.headers["vary"] = "Origin"
    return response


async def test_pages_of_other_origins_may_what_instances_allow() -> None:
    p, d = pair()
    p.handler = d.handler = allow_pages
    name = "access-control-allow-origin"
    async with cluster(p, d, keys=("secret",)) as made:
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        url = made.url + "/v1/chat/completions"
        async with made.client.options(url, headers=asked) as response:  # has no key
            assert (response.status, await response.text()) == (200, "OK")
            assert (response.headers[name], response.headers["access-control-max-age"]) == (
                ORIGIN,
                "600",
            )
        key = {"Authorization": "Bearer secret"}
        for origin, allowed in ((ORIGIN, ORIGIN), ("http://other.example", None)):
            headers = {**key, "Origin": origin}
            for more in ({}, {"stream": True}, {"model": "unknown"}, {"echo": True}):
                assert (await made.ask(headers=headers, **more))[2].get(name) == allowed
            async with made.client.get(made.url + "/v1/models", headers=headers) as response:
                assert response.headers.get(name) == allowed
        assert name not in (await made.ask(headers=key))[2]
        async with made.client.options(url, headers=key) as response:
            assert response.status == 405  # it is no browser's question


async def test_a_page_does_not_wait_for_instances_that_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang_when_asked_again(*asked: Any) -> web.StreamResponse:
        if asked[1].path == "/version" and next(answers, None) is None:
            return await hang()
        return await allow_pages(*asked)

    monkeypatch.setattr(merged, "_REMEMBERED_S", 0.0)
    answers, (p, d) = iter([1]), pair()
    p.handler = d.handler = hang_when_asked_again
    async with cluster(p, d) as made:
        for _ in range(3):
            async with asyncio.timeout(1.5):  # an instance has 2 s to say what it allows
                status, _, headers = await made.ask(headers={"Origin": ORIGIN})
            assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)


async def test_without_instances_a_page_gets_the_routers_own_answer() -> None:
    async with cluster() as made:
        assert (await made.ask(headers={"Origin": ORIGIN}))[0] == 503


async def test_the_load_header_of_an_instance_reaches_its_client() -> None:
    async def say_load(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        response = await fake.answer(request, body)
        if kind := request.headers.get("endpoint-load-metrics-format"):
            response.headers["endpoint-load-metrics"] = f"{kind} of {fake.id}"
        return response

    p, d = pair()
    p.handler = d.handler = say_load
    async with cluster(p, d) as made:
        for body, name in (({}, "d"), ({"echo": True}, "d")):
            _, _, headers = await made.ask(headers={"endpoint-load-metrics-format": "TEXT"}, **body)
            assert headers["endpoint-load-metrics"] == f"TEXT of {name}"
        assert "endpoint-load-metrics" not in (await made.ask())[2]
