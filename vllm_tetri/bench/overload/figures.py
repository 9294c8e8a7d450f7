"""What an overload comes to, and what a cluster promises under it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_tetri.bench.overload.turn import End, Reply
from vllm_tetri.bench.promise import Promise
from vllm_tetri.bench.soak.usage import Usage
from vllm_tetri.bench.stats import quantile

# A first token is normal again that takes at most so many times the p99 of normal service.
AS_NORMAL = 2.0
BACK_S = 5.0
# Capacity is what a closed loop reaches, which itself is known to a few percent only.
LEAST_GOODPUT = 0.8
# The router may have 4,096 requests in flight, with some 30 KiB each. What it and instances
# have beyond that must not depend on how long an overload lasts; what an allocator keeps of
# it does a little.
_MORE_BYTES = 128 << 20
_MORE = 0.5
_MORE_LATER_BYTES = 32 << 20
_MORE_LATER = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the run; latencies in seconds, 0 where there is nothing to take them of.

    Attributes:
        seconds: That it lasted.
        sent, served, refused, bad: Requests that were due in it.
        served_per_s: Answers that ended within it, whenever they were asked for.
        first_p50_s, first_p99_s: Time to the first token of those served.
        done_p50_s, done_p99_s: Time to their last one.
        refusal_p50_s, refusal_p99_s: Time until a refusal.
        again_p50_s: What refused ones were told to wait.
    """

    name: str
    seconds: float
    sent: int
    served: int
    refused: int
    bad: int
    served_per_s: float
    first_p50_s: float
    first_p99_s: float
    done_p50_s: float
    done_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    again_p50_s: float


def row(name: str, replies: Sequence[Reply], begin_s: float, end_s: float) -> Row:
    """Of the requests that were due between two times of their turn."""
    due = [each for each in replies if begin_s <= each.at_s < end_s]
    served = [each for each in due if each.end is End.SERVED]
    refused = [each for each in due if each.end is End.REFUSED]
    ended = [
        each
        for each in replies
        if each.end is End.SERVED and begin_s <= each.at_s + each.done_s < end_s
    ]
    first_s, done_s = [each.first_s for each in served], [each.done_s for each in served]
    refusal_s = [each.done_s for each in refused]
    return Row(
        name=name,
        seconds=end_s - begin_s,
        sent=len(due),
        served=len(served),
        refused=len(refused),
        bad=len(due) - len(served) - len(refused),
        served_per_s=len(ended) / (end_s - begin_s),
        first_p50_s=_quantile(first_s, 0.5),
        first_p99_s=_quantile(first_s, 0.99),
        done_p50_s=_quantile(done_s, 0.5),
        done_p99_s=_quantile(done_s, 0.99),
        refusal_p50_s=_quantile(refusal_s, 0.5),
        refusal_p99_s=_quantile(refusal_s, 0.99),
        again_p50_s=_quantile([each.retry_after_s for each in refused], 0.5),
    )


def back_s(
    replies: Sequence[Reply], begin_s: float, end_s: float, *, normal_s: float
) -> float | None:
    """When service is normal again, in seconds from `begin_s`: behind the last request that
    was not served as usual. None if that comes too late to say so.

    Args:
        normal_s: Longest time to the first token that is usual.
    """
    due = [each for each in replies if begin_s <= each.at_s < end_s]
    unusual = [each.at_s for each in due if each.end is not End.SERVED or each.first_s > normal_s]
    if not unusual:
        return 0.0
    later = [each for each in due if each.at_s > max(unusual)]
    if not later or end_s - max(unusual) < BACK_S:
        return None
    return max(unusual) - begin_s


def promises_of_answers(
    replies: Sequence[Reply],
    overload: Row,
    capacity: float,
    waited_s: float | None,
    *,
    num_after: int,
) -> list[Promise]:
    """What clients are promised.

    Args:
        replies: Of the whole run.
        overload: The row of the overload.
        capacity: Requests per second that a cluster can serve.
        waited_s: What `back_s` says.
        num_after: Requests that came when the overload was over.
    """
    bad = sum(each.end is End.BAD for each in replies)
    part = overload.served_per_s / capacity if capacity else 0.0
    goodput = f"{overload.served_per_s:.2f} a second, {part:.2f} of {capacity:.2f}"
    back = "not while it was looked at" if waited_s is None else f"after {waited_s:.1f} s"
    is_back = waited_s is not None and waited_s <= BACK_S if num_after else None
    return [
        Promise("every answer is whole, or a clear refusal", not bad, f"{bad} are neither"),
        Promise("an overload takes nothing from the throughput", part >= LEAST_GOODPUT, goodput),
        Promise(
            f"service is normal within {BACK_S:g} s after it",
            is_back,
            back if num_after else "no request came then",
        ),
    ]


def promises_of_memory(
    before: Mapping[str, Usage], during: Sequence[Mapping[str, Usage]]
) -> list[Promise]:
    """Memory is bounded: little more than at rest, and not more the longer it lasts.

    Args:
        before: At rest, by process group.
        during: One sample after the other.
    """
    found = []
    for name, rest in before.items():
        sizes = [each[name].rss_bytes for each in during if name in each]
        if len(sizes) < 2:
            found.append(Promise(f"memory of {name} is bounded", None, "too few samples"))
            continue
        half = len(sizes) // 2
        early, late = max(sizes[:half]), max(sizes[half:])
        limit = max((1 + _MORE) * rest.rss_bytes, rest.rss_bytes + _MORE_BYTES)
        later_limit = max((1 + _MORE_LATER) * early, early + _MORE_LATER_BYTES)
        is_kept = max(early, late) <= limit and late <= later_limit
        said = (
            f"{_mib(rest.rss_bytes)} at rest, at most {_mib(early)} in the first half, "
            f"{_mib(late)} in the second"
        )
        found.append(Promise(f"memory of {name} is bounded", is_kept, said))
    return found


def promise_of_lives(before: Mapping[str, Usage], during: Sequence[Mapping[str, Usage]]) -> Promise:
    """Nobody dies of it."""
    text = "nobody dies of it"
    if not during:
        return Promise(text, None, "nobody was looked at")
    fewer = {
        name
        for each in during
        for name, rest in before.items()
        if name not in each or each[name].processes < rest.processes
    }
    return Promise(text, not fewer, ", ".join(sorted(fewer)) or "nobody")


def _quantile(values: Sequence[float], part: float) -> float:
    return quantile(values, part) if values else 0.0


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
