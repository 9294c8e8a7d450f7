"""What was sent since the newest view, and the cheapest of many instances."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import COST, Known, known, serving, times, view
from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.ledger import Ranked
from vllm_tetri.types import InstanceId, InstanceView

NOW = 100.0
NEED = Need(600, 80)


def pair(reported_s: float, now: float, **more_of_answer: Any) -> tuple[InstanceView, InstanceView]:
    age_s = now - reported_s
    return (
        serving("p", "prefill", age_s=age_s),
        serving("d", "decode", **{"age_s": age_s, **more_of_answer}),
    )


def counted(sites: Known) -> tuple[float, float]:
    """Prompt tokens at the one, decodes at the other."""
    return sites.by_id[InstanceId("p")].queued_tokens, sites.by_id[InstanceId("d")].decodes


def test_what_is_sent_counts_at_once() -> None:
    sites = known(*pair(NOW, NOW))
    p, d = (sites.by_id[InstanceId(name)] for name in "pd")
    free_tokens = d.free_tokens
    sites.send(p.id, d.id, NEED, NOW)
    p, d = (sites.by_id[InstanceId(name)] for name in "pd")
    assert counted(sites) == (600, 1)
    assert d.left_tokens == 80
    assert d.free_tokens == free_tokens - 680
    sites.send(p.id, d.id, Need(10, 20), NOW)
    assert counted(sites) == (610, 2)
    assert d.left_tokens == 80  # what one has read does not change
    assert sites.by_id[d.id].left_tokens == 50
    assert (p.decodes, d.queued_tokens) == (0, 0)
    sites.send(None, d.id, NEED, NOW)  # the prompt is computed already
    sites.send(p.id, None, NEED, NOW)  # the output has no place yet
    assert counted(sites) == (1210, 3)


def test_what_is_sent_counts_until_reports_show_it() -> None:
    sites = Known(grace_s=0.1)
    sites.renew(view(*pair(NOW, NOW)), NOW)
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW + 0.01)
    sites.renew(view(*pair(NOW, NOW + 0.05)), NOW + 0.05)  # still the old report
    assert counted(sites) == (600, 1)
    sites.renew(view(*pair(NOW + 0.1, NOW + 0.12)), NOW + 0.12)  # within the grace
    assert counted(sites) == (600, 1)
    sites.renew(view(*pair(NOW + 0.2, NOW + 0.21)), NOW + 0.21)
    assert counted(sites) == (0, 0)
    sites.renew(view(*pair(NOW + 0.2, NOW + 0.3)), NOW + 0.3)
    assert counted(sites) == (0, 0)


def test_an_answer_counts_from_when_its_instance_knows_of_it() -> None:
    sites = known(*pair(NOW, NOW))
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW, after_s=2.0)
    assert counted(sites) == (600, 1)
    sites.renew(view(*pair(NOW + 1, NOW + 1)), NOW + 1)  # the prompt is still computed
    assert counted(sites) == (0, 1)
    sites.renew(view(*pair(NOW + 3, NOW + 3)), NOW + 3)
    assert counted(sites) == (0, 0)


def test_what_went_to_an_instance_that_is_gone_is_forgotten() -> None:
    sites = known(*pair(NOW, NOW))
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW)
    sites.renew(view(serving("p", "prefill", age_s=0.01)), NOW + 0.01)
    assert sites.by_id[InstanceId("p")].queued_tokens == 600
    sites.renew(view(*pair(NOW + 5, NOW + 5)), NOW + 5)
    assert counted(sites) == (0, 0)


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from("pd"), st.sampled_from("pd"))))
def test_all_that_is_sent_and_not_reported_counts_and_nothing_else(
    sent: list[tuple[float, str, str]],
) -> None:
    sites = Known(grace_s=0.1)
    sites.renew(view(*pair(NOW, NOW)), NOW)
    for since_s, prompt, answer in sorted(sent):
        sites.send(InstanceId(prompt), InstanceId(answer), NEED, NOW + since_s)
    sites.renew(view(*pair(NOW + 0.6, NOW + 1)), NOW + 1)
    new = [each for each in sent if NOW + each[0] >= NOW + 0.6 - 0.1 + 1e-6]
    fresh = [each for each in new if each[0] > 0.8]  # computing a prompt takes 0.36 s at least
    old = [each for each in sent if NOW + each[0] <= NOW + 0.6 - 0.1 - 1e-6]
    for name in "pd":
        found = sites.by_id[InstanceId(name)].queued_tokens / 600
        here = sum(each[1] == name for each in sent)
        assert sum(each[1] == name for each in fresh) <= found
        assert found <= here - sum(each[1] == name for each in old)
    total = sum(each.decodes for each in sites.by_id.values())
    assert len(new) <= total <= len(sent) - len(old)


def test_a_prompt_counts_until_it_should_be_computed() -> None:
    """At this pace one of 600 tokens takes two steps, 0.105 s together."""
    quick = times(COST, 0.25)
    sites = known(serving("p", "prefill", cost=quick), serving("d", "decode", cost=quick))
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW)
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW + 0.02)  # computed after the first
    before = sites.by_id[InstanceId("p")]
    for now, left in ((0.1, 1200), (0.13, 600), (0.22, 600), (0.25, 0), (0.3, 0)):
        sites.state.advance(NOW + now)
        assert counted(sites) == (left, 2), "outputs count until reports show them"
    assert before.queued_tokens == 1200, "what one has read does not change"
    sites.renew(view(*pair(NOW, NOW + 0.4)), NOW + 0.4)  # still the old report
    assert counted(sites) == (0, 2)


def test_an_instance_that_does_not_report_any_more_does_not_look_idle() -> None:
    sites = known(serving("p", "prefill", queued_tokens=1000), serving("d", "decode"))
    sites.send(InstanceId("p"), InstanceId("d"), NEED, NOW)
    sites.state.advance(NOW + 10)
    assert counted(sites) == (1600, 1)
    silent = serving("p", "prefill", queued_tokens=1000, age_s=10)
    sites.renew(view(silent, serving("d", "decode")), NOW + 10)
    sites.state.advance(NOW + 20)
    assert counted(sites) == (1600, 0)


def test_a_queue_that_was_reported_ends_when_it_should() -> None:
    quick, slow = (
        serving(name, "prefill", queued_tokens=512, age_s=0.05, cost=times(COST, factor))
        for name, factor in (("quick", 0.05), ("slow", 1.0))
    )
    sites = known(quick, slow)
    sites.send(InstanceId("quick"), None, NEED, NOW)
    sites.state.advance(NOW)
    queued = {name: row.queued_tokens for name, row in sites.by_id.items()}
    assert queued == {"quick": 600, "slow": 512}, "0.025 s after the report, 0.3 s after it"


def test_an_instance_whose_queue_should_have_ended_is_idle_for_its_neighbours() -> None:
    sites = known(serving("a", device="x"), serving("b", device="x"))
    sites.send(InstanceId("a"), None, Need(100, 10), NOW)
    assert sites.by_id[InstanceId("b")].busy_others == 1
    sites.state.advance(NOW + 0.1)
    assert sites.by_id[InstanceId("b")].busy_others == 0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5000), st.booleans()), max_size=20),
    st.lists(st.floats(0, 3), max_size=20),
)
def test_queues_only_shrink_with_time_and_end(
    sent: list[tuple[float, int, bool]], looks: list[float]
) -> None:
    quick = times(COST, 1e-4)
    sites = known(serving("p", "prefill", queued_tokens=300, cost=quick), serving("d", "decode"))
    for since_s, tokens, is_whole in sorted(sent):
        decode = InstanceId("p") if is_whole else None
        sites.send(InstanceId("p"), decode, Need(tokens, 10), NOW + 0.1 * since_s)
    queued = sites.by_id[InstanceId("p")].queued_tokens
    assert queued == 300 + sum(tokens for _, tokens, _ in sent)
    for since_s in sorted(looks):
        sites.state.advance(NOW + since_s)
        left = sites.by_id[InstanceId("p")].queued_tokens
        assert 0 <= left <= queued
        queued = left
    sites.state.advance(NOW + 1000)
    assert sites.by_id[InstanceId("p")].queued_tokens == 0


# -- the cheapest of many -------------------------------------------------------------

names = st.integers(0, 11)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.lists(st.tuples(names, st.integers(1, 4), st.integers(0, 4), st.frozensets(names))),
)
def test_the_cheapest_are_found_as_by_sorting_whatever_was_sent(
    queued: list[int], steps: list[tuple[int, int, int, frozenset[int]]]
) -> None:
    rows = [serving(f"i{number}", queued_tokens=tokens) for number, tokens in enumerate(queued)]
    made = known(*rows)
    ranked = Ranked(made.state, made.bases, lambda row: row.queued_tokens)
    for number, tokens, count, some in steps:
        made.send(InstanceId(f"i{number}"), None, Need(tokens, 0), NOW)
        taken = {InstanceId(f"i{each}") for each in some}
        able = [row for row in made.by_id.values() if row.id not in taken]
        best = sorted(able, key=lambda row: row.queued_tokens)[:count]
        assert ranked.least(count, taken) == best
        assert ranked.named([*sorted(taken), InstanceId("gone")]) == [
            made.by_id[name] for name in sorted(taken) if name in made.by_id
        ]
        assert ranked.named(made.by_id, taken) == able


def test_few_of_many_are_looked_at() -> None:
    made = known(*(serving(f"i{number}", queued_tokens=number) for number in range(100)))
    looked = list[InstanceId]()

    def cost(row: InstanceRow) -> float:
        looked.append(row.id)
        return row.queued_tokens

    ranked = Ranked(made.state, made.bases, cost)
    assert not looked
    for number in range(50):
        (best,) = ranked.least(1)
        assert best.id == f"i{number}"
        made.send(best.id, None, Need(1000, 0), NOW)
    assert len(looked) == 100 + 49
