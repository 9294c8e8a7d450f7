"""What is watched beside others: Figures 3 to 5 without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from examples.benchmarks import interference
from examples.benchmarks.client import Reply, Request

LOADS = interference.loads(Random(0), [4, 16])


def reply(due_s: float, token_s: Sequence[float]) -> Reply:
    """A reply whose tokens came at these seconds after the start."""
    gaps = [round(1e6 * (b - a)) for a, b in pairwise(token_s)]
    times = {"ttft_s": token_s[0] - due_s, "jct_s": token_s[-1] - due_s, "due_s": due_s}
    return Reply(200, gaps_us=gaps, num_tokens=len(token_s), **times)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_what_its_name_says(name: str) -> None:
    requests, (_, _, what) = LOADS[name], name.partition(": ")
    for each in requests:
        assert len(each.prompt) in (interference.LIGHT, interference.HEAVY)
        if each.after:
            place, tokens = each.after
            # What is waited for does not wait itself for what comes later, and is long enough.
            assert requests[place].after is None or place < requests.index(each)
            assert tokens <= requests[place].output_tokens
    if name.startswith(("4c", "4d")):
        count = int(what.split(", ")[1].split()[0])
        decodes = [each for each in requests if each.output_tokens == interference.DECODE]
        assert len(decodes) == count
        assert len(requests) == count + len(interference.BURSTS)
    if what == "half heavy":
        size = int(name.partition(":")[0].split()[-1])
        heavy = [each for each in requests if each.output_tokens > 512]
        assert len(requests) == size
        assert len(heavy) == size // 2
        assert {each.after for each in requests} == {None, (size - 1, interference.HALF_WAY)}


def test_the_plain_load_of_a_figure_comes_first() -> None:
    cells = [{"load": name, "probe_ms": 10.0 + place} for place, name in enumerate(LOADS)]
    compared = {each["load"]: each["slowdown"] for each in interference.compare(cells)}
    plain = [name for name in compared if ", 0 " in name or name.endswith("all light")]
    assert len(plain) == 9
    assert all(compared[name] == 1.0 for name in plain)
    assert all(value > 1.0 for name, value in compared.items() if name not in plain)


def test_only_steps_that_prompts_share_count_as_beside_them() -> None:
    # A token every 10 ms; a step of 50 ms holds prompts that came with the token at 1.02 s.
    watched = reply(0.9, [1.00, 1.01, 1.02, 1.03, 1.08, 1.09, 1.10])
    others = [reply(1.0205, [1.08]), reply(1.0207, [1.081])]
    (burst,) = interference.gaps_beside(watched, others)
    assert burst == pytest.approx([0.05])
    # Too short for a step of its own: the one under way had it.
    (burst,) = interference.gaps_beside(watched, [reply(1.0205, [1.024])])
    assert burst == pytest.approx([0.01])
    bursts = interference.gaps_beside(watched, [*others, reply(1.0801, [1.10])])
    assert [len(each) for each in bursts] == [1, 1]


def test_a_decode_beside_prompts_is_slower_by_its_steps_with_them() -> None:
    plain, name = "4b: light decode, 0 heavy prompts", "4b: light decode, 1 heavy prompts"
    times = [0.0]
    for step in range(95):
        times.append(times[-1] + {25: 0.06, 49: 0.10}.get(step, 0.02))
    prompts = [reply(times[24] + 1e-4, [times[26]]), reply(times[48] + 1e-4, [times[50]])]
    alone = [reply(0.0, [0.02 * place for place in range(96)])]
    cells = [
        {"load": each, **interference.figures_of(each, LOADS[each], replies)}
        for each, replies in ((plain, alone), (name, [reply(0.0, times), *prompts]))
    ]
    _, beside = interference.compare(cells)
    assert beside["slowdown"] == pytest.approx(4, abs=0.01)
    assert beside["longest"] == pytest.approx(4, abs=0.01)  # each burst had one step only


def test_of_a_batch_only_light_decodes_are_watched_and_all_tokens_count() -> None:
    name = "5, batch of 4: half heavy"
    light = [1.0 + 0.1 * place for place in range(interference.LIGHT_DECODE)]
    heavy = [0.1 * place for place in range(interference.HEAVY_DECODE)]
    replies = [reply(0.95, light), reply(0.95, light), reply(0.0, heavy), reply(0.0, heavy)]
    found = interference.figures_of(name, LOADS[name], replies)
    assert found["probe_ms"] == pytest.approx(100, rel=0.01)
    assert found["tokens_per_s"] == pytest.approx(40, rel=0.01)


def test_a_prompt_beside_decodes_is_the_mean_of_all_that_came() -> None:
    name = "4c: light prompt, 7 light decodes"
    replies = [reply(1.0, [1.1]), reply(2.0, [2.2]), reply(3.0, [3.3]), *[reply(0, [0.5])] * 7]
    requests: list[Request] = LOADS[name]
    assert interference.figures_of(name, requests, replies)["probe_ms"] == pytest.approx(200)
