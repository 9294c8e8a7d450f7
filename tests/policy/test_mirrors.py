from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import alone, serving, view
from vllm_tetri.policy.mirrors import LongOutput, Mirror, MirrorOrder, choose_mirrors
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import InstanceId, InstanceView, RequestId

EVERY, PROMPT, PID = 100, 800, 1


def output(
    name: str, source: str = "a", generated: int = EVERY, mirror: Mirror | None = None
) -> LongOutput:
    return LongOutput(RequestId(name), "tiny", InstanceId(source), generated, PROMPT, mirror)


def chosen(
    outputs: list[LongOutput], *instances: InstanceView, busy: tuple[str, ...] = ()
) -> list[MirrorOrder]:
    table = TableMaker().make(view(*instances), 0.0)
    return choose_mirrors(table, outputs, list(map(InstanceId, busy)), EVERY)


def decoding(name: str, decodes: int = 2, device: str = "", **load: Any) -> InstanceView:
    return serving(name, "decode", decodes=decodes, device=device, **load)


def copy(instance: str, num_tokens: int = 900, generated: int = EVERY) -> Mirror:
    return Mirror(InstanceId(instance), PID, num_tokens, generated)


A, B, C = decoding("a"), decoding("b", 3), decoding("c", 1)


def test_an_output_goes_to_the_fastest_other_instance() -> None:
    assert chosen([output("x")], A, B, C) == [MirrorOrder("x", "a", "c", 0)]
    assert chosen([output("x", generated=EVERY - 1)], A, B, C) == []
    assert chosen([output("x")], A) == []
    assert chosen([output("x", "gone")], A, B) == []
    assert chosen([output("x")], alone("a", "decode"), B) == []


def test_it_goes_to_another_device_if_there_is_one() -> None:
    here, near, far = decoding("a", device="1"), decoding("b", 1, "1"), decoding("c", 9, "2")
    assert [each.target for each in chosen([output("x")], here, near, far)] == ["c"]
    assert [each.target for each in chosen([output("x")], here, near)] == ["b"]


def test_what_it_has_grown_by_goes_where_the_rest_is() -> None:
    grown = output("x", generated=2 * EVERY, mirror=copy("b"))
    assert chosen([grown], A, B, C) == [MirrorOrder("x", "a", "b", 900)]
    assert chosen([grown._replace(generated=2 * EVERY - 1)], A, B, C) == []
    assert chosen([grown], A, C) == [MirrorOrder("x", "a", "c", 0)]  # it has left
    other = grown._replace(mirror=copy("b")._replace(pid=PID + 1))  # it was started again
    assert chosen([other], A, B) == [MirrorOrder("x", "a", "b", 0)]


def test_a_target_has_room_for_it_and_serves_its_model() -> None:
    full = decoding("c", 1, blocks_used=100_000)
    assert chosen([output("x")], A, B, full) == [MirrorOrder("x", "a", "b", 0)]
    assert chosen([output("x")], A, full) == []
    assert chosen([output("x")._replace(model="adapter")], A, B) == []


def test_after_a_death_the_copy_is_where_the_output_runs() -> None:
    resumed = output("x", "b", 1 * EVERY, copy("b"))
    assert chosen([resumed], A, B) == [MirrorOrder("x", "b", "a", 0)]


def test_the_largest_goes_first_and_an_instance_takes_part_in_one() -> None:
    outputs = [output("x"), output("y", generated=2 * EVERY), output("z", "b")]
    assert chosen(outputs, A, B, C) == [MirrorOrder("y", "a", "c", 0)]
    assert chosen(outputs, A, B, C, busy=("c",)) == [MirrorOrder("y", "a", "b", 0)]
    assert chosen(outputs, A, B, C, busy=("a",)) == [MirrorOrder("z", "b", "c", 0)]
    grown = output("w", generated=9 * EVERY, mirror=copy("c"))
    assert chosen([grown], A, B, C, busy=("c",)) == []


@given(
    sources=st.lists(st.sampled_from("abcd"), max_size=12), busy=st.sets(st.sampled_from("abcd"))
)
def test_no_instance_takes_part_in_two_copies(sources: list[str], busy: set[str]) -> None:
    outputs = [output(str(at), name, EVERY + at) for at, name in enumerate(sources)]
    orders = chosen(outputs, A, B, C, decoding("d"), busy=tuple(busy))
    taking_part = [name for each in orders for name in (each.source, each.target)]
    assert len(set(taking_part)) == len(taking_part)
    assert not busy & set(taking_part)
