"""Cores, priorities and GPUs per instance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.placement import (
    MAX_KV_BYTES,
    MAX_STEP_LOSS,
    MIN_PROMPT_GAIN,
    PREFILL_NICE,
    Machine,
    Measured,
    Sharing,
    choose_sharing,
    extremes,
    kv_bytes_each,
    place,
)
from vllm_tetri.types import Role

GIB = 1 << 30
PAIR = [Role.PREFILL, Role.DECODE]


def cpu(cores: int, memory_bytes: int = 32 * GIB) -> Machine:
    return Machine(cores=tuple(range(cores)), gpus=(), memory_bytes=memory_bytes)


def test_split_gives_neighbouring_cores_and_as_many_threads() -> None:
    prefill, decode = place(PAIR, cpu(5), Sharing.SPLIT)

    assert (prefill.cores, decode.cores) == ((0, 1), (2, 3, 4))
    assert dict(decode.environment) == {
        "OMP_NUM_THREADS": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    assert prefill.nice == decode.nice == 0


def test_shared_gives_all_cores_and_lets_prefill_yield() -> None:
    prefill, decode = place(PAIR, cpu(4), Sharing.SHARED)

    assert prefill.cores == decode.cores == (0, 1, 2, 3)
    assert (prefill.nice, decode.nice) == (PREFILL_NICE, 0)


def test_shared_threads_sleep_while_they_wait() -> None:
    for placement in place(PAIR, cpu(2), Sharing.SHARED):
        environment = dict(placement.environment)
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert environment["GOMP_SPINCOUNT"] == environment["KMP_BLOCKTIME"] == "0"


def test_split_needs_a_core_for_each() -> None:
    with pytest.raises(ValueError, match=r"2 instances needs as many cores.*--placement shared"):
        place(PAIR, cpu(1), Sharing.SPLIT)


def test_auto_shares_where_cores_do_not_suffice() -> None:
    assert [p.cores for p in place(PAIR, cpu(1), Sharing.AUTO)] == [(0,), (0,)]


SPLIT = Measured(
    prompt_alone_tokens_per_s=1000,
    prompt_beside_tokens_per_s=900,
    step_alone_p50_s=0.010,
    step_alone_p99_s=0.012,
    step_beside_p50_s=0.011,
    step_beside_p99_s=0.020,
)


@pytest.mark.parametrize(
    ("gain", "loss", "choice"),
    [
        (MIN_PROMPT_GAIN, MAX_STEP_LOSS, Sharing.SHARED),
        (1.9, 0.5, Sharing.SHARED),
        (MIN_PROMPT_GAIN - 0.01, 1.0, Sharing.SPLIT),
        (1.9, MAX_STEP_LOSS + 0.01, Sharing.SPLIT),
    ],
)
def test_cores_are_shared_if_prompts_gain_and_decode_steps_hardly_lose(
    gain: float, loss: float, choice: Sharing
) -> None:
    shared = replace(
        SPLIT,
        prompt_alone_tokens_per_s=SPLIT.prompt_alone_tokens_per_s * gain,
        step_beside_p99_s=SPLIT.step_beside_p99_s * loss,
    )
    chosen, reason = choose_sharing(SPLIT, shared)

    assert chosen is choice
    assert f"{gain:.2f} x" in reason
    assert f"{loss:.2f} x" in reason


def test_what_happens_beside_and_in_the_median_does_not_decide() -> None:
    shared = replace(
        SPLIT, prompt_alone_tokens_per_s=2000, prompt_beside_tokens_per_s=1, step_beside_p50_s=9
    )

    assert choose_sharing(SPLIT, shared)[0] is Sharing.SHARED


@pytest.mark.parametrize(
    ("roles", "pair"),
    [
        ([Role.DECODE, Role.PREFILL, Role.BOTH], (Role.PREFILL, Role.DECODE)),
        ([Role.BOTH, Role.BOTH], (Role.BOTH, Role.BOTH)),
        ([Role.BOTH, Role.DECODE], (Role.BOTH, Role.DECODE)),
    ],
)
def test_those_who_differ_most_stand_for_all(roles: list[Role], pair: tuple[Role, Role]) -> None:
    assert extremes(roles) == pair


def test_gpus_go_round() -> None:
    machine = Machine(cores=(0, 1), gpus=("0", "1"), memory_bytes=GIB)
    placements = place([*PAIR, Role.DECODE], machine, Sharing.AUTO)

    assert [dict(p.environment)["CUDA_VISIBLE_DEVICES"] for p in placements] == ["0", "1", "0"]
    assert [p.gpu_sharers for p in placements] == [2, 1, 2]
    assert all(not p.cores for p in placements)


def test_tensor_parallel_instances_get_neighbouring_gpus() -> None:
    machine = Machine(cores=(0,), gpus=("4", "5", "6", "7"), memory_bytes=GIB)
    placements = place(PAIR, machine, Sharing.AUTO, gpus_each=2)

    assert [dict(p.environment)["CUDA_VISIBLE_DEVICES"] for p in placements] == ["4,5", "6,7"]


def test_too_few_gpus_for_one_instance_is_said() -> None:
    machine = Machine(cores=(0,), gpus=("0",), memory_bytes=GIB)
    with pytest.raises(ValueError, match="needs 2 GPUs"):
        place(PAIR, machine, Sharing.AUTO, gpus_each=2)


@given(cores=st.integers(1, 64), instances=st.integers(1, 64))
def test_split_hands_out_every_core_once(cores: int, instances: int) -> None:
    if instances > cores:
        return
    placements = place([Role.BOTH] * instances, cpu(cores), Sharing.SPLIT)
    handed_out = [core for placement in placements for core in placement.cores]

    assert handed_out == list(range(cores))
    sizes = [len(placement.cores) for placement in placements]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("instances", "memory_bytes", "expected"),
    [(2, 64 * GIB, MAX_KV_BYTES), (2, 8 * GIB, GIB // 2), (100, 1 << 20, 1 << 20)],
)
def test_kv_cache_is_small_and_fits(instances: int, memory_bytes: int, expected: int) -> None:
    assert kv_bytes_each(instances, cpu(2, memory_bytes)) == expected
