"""Parts of a request's time, and the requests that a router remembers."""

from __future__ import annotations

import socket
import time

import pytest

from tests.router.fakes import FakeInstance, cluster, eventually, pair
from vllm_tetri.admin import explain_text
from vllm_tetri.messages import Served
from vllm_tetri.policy.route import Event
from vllm_tetri.router import history, tracing
from vllm_tetri.router.explain import explain, parts, replayable
from vllm_tetri.router.history import Ended
from vllm_tetri.router.table import Mark, RequestTable, Trace
from vllm_tetri.types import InstanceId, RequestId, Role

P, D = InstanceId("p"), InstanceId("d")
SPLIT = [
    Mark(Event.PREFILL_SENT, P, 100.002),
    Mark(Event.PREFILLED, D, 100.4),
    Mark(Event.ANSWERING, D, 100.45),
    Mark(Event.FINISH, D, 101.45),
]


def ended(marks: list[Mark], **more: object) -> Ended:
    usual = {
        "id": RequestId("r"), "route": "split", "outcome": "ok", "problem": "", "arrival_s": 100.0,
        "ended_s": 101.45, "first_byte_s": 100.402, "generated": 50, "prompt_tokens": 7,
        "predicted": None, "prefill": P, "decode": D, "reason": "why", "expected_s": 0.0,
        "expected_error_s": 0.0, "marks": marks, "served": [],
    }  # fmt: skip
    return Ended(**(usual | more))  # type: ignore[arg-type]


def sums(row: Ended) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for each in parts(row):
        key = each.what, each.instance
        found[key] = round(found.get(key, 0) + each.end_s - each.begin_s, 6)
    return found


def test_a_split_request() -> None:
    served = [
        (P, Served("cmpl-r-0", queue_s=0.18, compute_s=0.19)),
        (D, Served("cmpl-r-0", queue_s=0.3, compute_s=0.02, output_s=1.0)),
    ]
    row = ended(SPLIT, served=served)
    assert sums(row) == {
        ("router", ""): 0.004,  # before it was sent, and to show the first token
        ("http", "p"): 0.028,
        ("queue", "p"): 0.18,
        ("compute", "p"): 0.19,
        ("hand-over", "d"): 0.028,  # what the decode request waited before counts there
        ("compute", "d"): 0.02,
        ("output", "d"): 1.0,
    }
    shown = explain(row)
    assert sum(each["s"] for each in shown["parts"]) == pytest.approx(shown["jct_s"])
    before_s = sum(each["before_first_token_s"] for each in shown["parts"])
    assert before_s == pytest.approx(shown["ttft_s"]) == pytest.approx(0.402)
    text = explain_text(shown)
    assert "TTFT 402 ms = router 4 ms + http 28 ms + queue 180 ms + compute 190 ms" in text
    assert "JCT 1.45e+03 ms" not in text
    assert "hand-over 28 ms" in text


def test_what_an_instance_did_not_tell_is_not_divided() -> None:
    marks = [Mark(Event.PREFILL_SENT, P, 100.1), Mark(Event.WHOLE_SENT, D, 100.6), *SPLIT[2:]]
    marks[2] = Mark(Event.ANSWERING, D, 100.7)
    row = ended(marks, first_byte_s=100.7)
    assert sums(row) == {
        ("router", ""): 0.1, ("at instance", "p"): 0.5, ("at instance", "d"): 0.1,
        ("output", "d"): 0.75,
    }  # fmt: skip


def test_an_answer_that_is_not_streamed_has_its_output_before_the_first_byte() -> None:
    marks = [Mark(Event.WHOLE_SENT, P, 100.0), Mark(Event.ANSWERING, P, 101.44)]
    told = Served("chatcmpl-r", queue_s=0.1, compute_s=0.2, output_s=1.0)
    row = ended(marks, generated=0, first_byte_s=101.44, served=[(P, told)])
    assert sums(row)[("output", "p")] == pytest.approx(1.01)
    assert sums(row)[("http", "p")] == pytest.approx(0.14)
    told = told.__class__("chatcmpl-r", 0.1, 0.2, output_s=1.0, prompt_tokens=7, output_tokens=3)
    (found,) = replayable([row._replace(served=[(P, told)], decode=P)])
    assert found["ttft_s"] == pytest.approx(0.44)
    made = history.History()
    entry = RequestTable().enter("r", now=100.0)
    entry.expected_s, entry.first_byte_s = 0.3, 109.0
    made.record(entry, "whole", "ok", "", 109.0)
    entry.record_events(1)
    assert made.record(entry, "whole", "ok", "", 109.0).expected_error_s == 0  # of the one before


def test_the_length_is_that_of_the_instance_that_wrote_the_end() -> None:
    first, last = Served("cmpl-r", output_tokens=1), Served("cmpl-r", output_tokens=9)
    assert ended(SPLIT, served=[(D, last), (P, first)]).output_tokens == 9  # told in any order
    row = ended(SPLIT, served=[(P, first)])
    assert row.output_tokens is None
    assert replayable([row]) == []


def test_two_legs_at_one_instance_are_told_apart() -> None:
    marks = [
        Mark(Event.PREFILL_SENT, P, 100.0), Mark(Event.WHOLE_SENT, P, 102.6),
        Mark(Event.ANSWERING, P, 102.65), Mark(Event.FINISH, P, 112.65),
    ]  # fmt: skip
    prefill = Served("cmpl-r", queue_s=2.0, compute_s=0.5, cached_tokens=3)
    told = [(P, prefill), (P, Served("cmpl-r", compute_s=0.02, output_s=10.0, output_tokens=9))]
    row = ended(marks, decode=P, ended_s=112.65, first_byte_s=102.65, served=told)
    assert sums(row)[("queue", "p")] == pytest.approx(2.0)
    assert sums(row)[("compute", "p")] == pytest.approx(0.52)
    (found,) = replayable([row])
    assert (found["cached_tokens"], found["output_tokens"]) == (3, 9)


def test_an_instance_tells_the_length_of_a_prompt_that_no_other_took_over() -> None:
    told = Served("cmpl-r", prompt_tokens=7, output_tokens=3)
    marks = [Mark(Event.WHOLE_SENT, P, 100.0), Mark(Event.ANSWERING, P, 100.4)]
    row = ended(marks, route="whole", prompt_tokens=None, decode=P)
    assert replayable([row, row._replace(served=[(D, told)])]) == []
    (found,) = replayable([row._replace(served=[(P, told)])])
    assert (found["prompt_tokens"], found["output_tokens"]) == (7, 3)


def test_a_request_that_was_sent_nowhere() -> None:
    row = ended([], outcome="late", problem="too late", first_byte_s=None, ended_s=100.5)
    assert sums(row) == {("router", ""): 0.5}
    assert "too late" in explain_text(explain(row))
    assert "sent nowhere" in explain_text(explain(row._replace(reason="")))


async def test_a_router_explains_what_it_serves_and_served() -> None:
    async with cluster(*pair()) as made:
        status, _, headers = await made.ask()
        assert status == 200
        name = headers["x-request-id"]
        found = await made.get(f"/tetri/v1/requests/{name}")
        assert (found["outcome"], found["route"]) == ("ok", "split")
        instance: FakeInstance = made[found["decode"]]
        instance.agent.publish(Served(f"cmpl-{name}-0-1a2b", queue_s=0.5))

        def kept() -> Ended:
            row = made.scheduler.history.get(RequestId(name))
            assert row is not None
            return row

        await eventually(lambda: [each for each, _ in kept().served] == [found["decode"]])
        assert (await made.get("/tetri/v1/history"))["requests"] == []  # no lengths are known
        first: FakeInstance = made[found["prefill"]]
        first.agent.publish(Served(f"cmpl-{name}-0-1a2b", cached_tokens=1))
        await eventually(lambda: len(kept().served) == 2)
        instance.agent.publish(Served(f"cmpl-{name}-0-1a2b", 0.5, output_tokens=9))
        await eventually(lambda: len(kept().served) == 3)
        told = await made.get("/tetri/v1/history")
        assert [each["role"] for each in told["instances"]] == ["prefill", "decode"]
        assert told["instances"][0]["load"]["cost"].keys() >= {"base_s", "confidence"}
        (shown,) = told["requests"]
        assert shown["model"] == told["instances"][0]["model"] == "tiny"
        assert (shown["route"], shown["output_tokens"], shown["cached_tokens"]) == ("split", 9, 1)
        assert (await made.order("mode", {"mode": "whole"}))[0] == 200
        assert (await made.get("/tetri/v1/history"))["requests"] == []  # in this mode
        async with made.client.get(f"{made.url}/tetri/v1/requests/unknown") as response:
            assert response.status == 404
            assert "'unknown'" in (await response.json())["error"]["message"]


async def test_what_is_told_of_a_request_is_not_of_one_whose_name_begins_alike() -> None:
    async with cluster(*pair()) as made:
        tell = made.scheduler.on_published
        assert (await made.ask(headers={"X-Request-Id": "job-1"}))[0] == 200
        other = made.scheduler.table.enter("job", now=0.0)
        tell(P, Served("cmpl-job-1-0-1a2b", output_tokens=9))
        tell(P, Served("cmpl-job-0-1a2b", output_tokens=8))
        kept = made.scheduler.history.get(RequestId("job-1"))
        assert kept is not None
        assert [told.output_tokens for _, told in (*kept.served, *other.served)] == [9, 8]
        made.scheduler.table.leave(other)


async def test_a_router_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 2)
    async with cluster(FakeInstance("b", Role.BOTH)) as made:
        names = [(await made.ask())[2]["x-request-id"] for _ in range(3)]
        kept = made.scheduler.history
        assert [row.id for row in kept.since(0)] == names[1:]
        assert kept.get(names[0]) is None
        last = kept.get(names[2])
        assert last is not None
        assert kept.since(last.ended_s - 1e-6) == [last]


def test_a_trace_goes_on_unless_its_client_samples_it_out() -> None:
    parent = "00-" + "1" * 32 + "-" + "2" * 16
    trace = Trace({"traceparent": f"{parent}-01"})
    first = trace.headers_to(P, {"traceparent": f"{parent}-01", "a": "b"})
    assert first["a"] == "b"
    assert first["traceparent"].split("-")[1] == "1" * 32
    assert first["traceparent"] != trace.headers_to(D, {})["traceparent"]
    assert first["traceparent"] == trace.headers_to(P, {})["traceparent"]
    out = {"traceparent": f"{parent}-00"}
    assert Trace(out).headers_to(P, out) == out
    assert not Trace({"Traceparent": out["traceparent"]}).is_sampled
    assert Trace({"traceparent": "nonsense"}).headers_to(P, {})["traceparent"].startswith("00-")


def test_a_collector_that_does_not_respond_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as collector:
        traces = tracing.Tracing(f"http://127.0.0.1:{collector.getsockname()[1]}")
        traces.end(Trace({}), ended(SPLIT))
        began_s = time.monotonic()
        traces.close()
    assert time.monotonic() - began_s < 5
