"""Where the time of a request went: parts that add up to what the client saw. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm_tetri.messages import Served
from vllm_tetri.policy.route import Event
from vllm_tetri.router.history import Ended
from vllm_tetri.types import InstanceId

_SENT = (Event.PREFILL_SENT, Event.WHOLE_SENT)


class Part(NamedTuple):
    """A stretch of a request's time, in seconds since its arrival.

    `what` is one of: router; queue (waiting in an engine, at a decode instance for KV and room,
    too); compute (to the first new token); http (HTTP, API server, tokens and text); hand-over;
    output; at instance (what an instance has not told, as when it died).
    """

    what: str
    instance: InstanceId
    begin_s: float
    end_s: float

    def before_s(self, until_s: float) -> float:
        """Return how much of it is before a time."""
        return min(self.end_s, max(self.begin_s, until_s)) - self.begin_s


def parts(row: Ended) -> list[Part]:
    """Divide the time of a request."""
    return [each for each in _parts(row) if each.end_s > each.begin_s]


def _parts(row: Ended) -> Iterator[Part]:
    none, end_s = InstanceId(""), row.ended_s - row.arrival_s
    marks = [(each.event, each.instance, each.at_s - row.arrival_s) for each in row.marks]
    told = _by_leg(row)
    begin_s = marks[0][2] if marks else end_s
    yield Part("router", none, 0.0, begin_s)
    ends = [*(at_s for _, _, at_s in marks[1:]), end_s] if marks else []
    for (event, instance, begin_s), until_s in zip(marks, ends, strict=True):
        if _is_leg(event):
            served = told[instance].pop(0) if told.get(instance) else None
            yield from _leg(row, event, instance, served, begin_s, until_s)
        elif event is Event.ANSWERING:
            yield Part("output", instance, begin_s, until_s)
        else:
            yield Part("router", none, begin_s, until_s)


def _by_leg(row: Ended) -> dict[InstanceId, list[Served | None]]:
    """Return what each instance told of its legs, in their order; of one leg with several choices
    what the one told that took longest."""
    told: dict[InstanceId, list[Served | None]] = {}
    for name in {name for name, _ in row.served}:
        found = [each for who, each in row.served if who == name]
        legs = [each for each in row.marks if each.instance == name and _is_leg(each.event)]
        missing = len(legs) - len(found)  # of attempts that failed
        told[name] = [max(found, key=_took_s)] if len(legs) < 2 else [*[None] * missing, *found]
    return told


def _is_leg(event: Event) -> bool:
    return event in _SENT or event is Event.PREFILLED


def _leg(
    row: Ended,
    event: Event,
    instance: InstanceId,
    served: Served | None,
    begin_s: float,
    until_s: float,
) -> Iterator[Part]:
    """Divide the time in which an instance had the request and sent nothing. What it tells may
    have begun before, as a decode request is sent early: it counts from the end."""
    if event is Event.PREFILLED and row.first_byte_s is not None:
        shown_s = row.first_byte_s - row.arrival_s
        if begin_s < shown_s < until_s:
            yield Part("router", InstanceId(""), begin_s, shown_s)
            begin_s = shown_s
    # What is not told, the wait in the engine, and what remains.
    words = ("at instance", "queue", "http")
    untold, waiting, other = ("hand-over",) * 3 if event is Event.PREFILLED else words
    if served is None:
        yield Part(untold, instance, begin_s, until_s)
        return
    told = [(waiting, served.queue_s), ("compute", served.compute_s)]
    if not row.generated:
        told.append(("output", served.output_s))
    found = list[Part]()
    for what, took_s in reversed(told):
        found.append(Part(what, instance, max(begin_s, until_s - took_s), until_s))
        until_s = found[-1].begin_s
    yield Part(other, instance, begin_s, until_s)
    yield from reversed(found)


def _took_s(served: Served) -> float:
    return served.queue_s + served.compute_s + served.output_s


def explain(row: Ended) -> dict[str, Any]:
    """Return what `GET /tetri/v1/requests/{id}` shows of a request: durations in seconds, of which
    those before the first byte add up to `ttft_s` and all of them to `jct_s`."""
    jct_s = row.ended_s - row.arrival_s
    ttft_s = None if row.first_byte_s is None else row.first_byte_s - row.arrival_s
    shown = []
    for each in parts(row):
        before_s = each.before_s(jct_s if ttft_s is None else ttft_s)
        shown.append(
            {
                "what": each.what,
                "instance": each.instance,
                "s": round(each.end_s - each.begin_s, 6),
                "before_first_token_s": round(before_s, 6),
            }
        )
    kept = (
        "id", "route", "outcome", "problem", "generated", "prompt_tokens", "predicted", "prefill",
        "decode", "reason", "output_tokens",
    )  # fmt: skip
    return {
        **{name: getattr(row, name) for name in kept},
        "ttft_s": ttft_s,
        "jct_s": jct_s,
        "expected_ttft_s": row.expected_s or None,
        "expected_error_s": row.expected_error_s if row.expected_s else None,
        "parts": shown,
        "timeline": [
            {"s": round(each.at_s - row.arrival_s, 6), "event": each.event, "at": each.instance}
            for each in row.marks
        ],
        "instances": [
            {"instance": instance, **{name: getattr(each, name) for name in each.__struct_fields__}}
            for instance, each in row.served
        ],
    }


def _first_token_s(row: Ended, first_byte_s: float) -> float:
    """Return after how many seconds the first token was there, of which a client that asks for no
    stream gets nothing before the whole output."""
    if row.generated:
        return first_byte_s
    done = (mark.at_s - row.arrival_s for mark in row.marks if mark.event is Event.PREFILLED)
    outputs = (each.before_s(first_byte_s) for each in parts(row) if each.what == "output")
    return next(done, first_byte_s - sum(outputs))


def replayable(rows: Iterable[Ended]) -> list[dict[str, Any]]:
    """Return what a simulation needs of each request that was answered and whose lengths are known;
    `front_s` is the time outside engines before the first token."""
    found = []
    for row in rows:
        told = (each for name, each in row.served if name == row.prefill)
        first = next(told, Served(row.id))
        prompt_tokens = row.prompt_tokens or first.prompt_tokens
        if row.outcome == "ok" and row.first_byte_s and prompt_tokens and row.output_tokens:
            ttft_s = _first_token_s(row, row.first_byte_s - row.arrival_s)
            outside = [each for each in parts(row) if each.what in ("router", "http")]
            kept = (
                "route", "output_tokens", "predicted", "prefill", "decode", "arrival_s", "model",
            )  # fmt: skip
            found.append(
                {
                    **{name: getattr(row, name) for name in kept},
                    "ttft_s": ttft_s,
                    "jct_s": row.ended_s - row.arrival_s,
                    "prompt_tokens": prompt_tokens,
                    "cached_tokens": first.cached_tokens,
                    "front_s": sum(each.before_s(ttft_s) for each in outside),
                }
            )
    return found
