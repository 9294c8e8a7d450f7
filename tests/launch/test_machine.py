"""Cores, priorities and GPUs per instance, and what vLLM says of its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch import machine
from vllm_tetri.launch.machine import (
    MAX_KV_BYTES,
    PREFILL_NICE,
    Machine,
    ServeOptions,
    ask_vllm,
    cores_of,
    cpu_facts,
    inspect,
    kv_bytes_each,
    place,
    serve_options_in,
)
from vllm_tetri.types import Role

GIB = 1 << 30
PAIR = [Role.PREFILL, Role.DECODE]


def cpu(cores: int, memory_bytes: int = 32 * GIB) -> Machine:
    return Machine(cores_of(range(cores), Path("nowhere")), gpus=(), memory_bytes=memory_bytes)


def gpu(*gpus: str) -> Machine:
    return Machine(cores=((0,), (1,)), gpus=gpus, memory_bytes=GIB)


def test_own_cores_are_neighbours_with_as_many_threads() -> None:
    prefill, decode = place(PAIR, cpu(5))
    assert (prefill.cores, decode.cores) == ((0, 1), (2, 3, 4))
    assert dict(decode.environment) == {
        "OMP_NUM_THREADS": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    assert prefill.nice == decode.nice == 0


def test_instances_share_no_core_with_two_threads_and_use_one_thread_of_each(
    tmp_path: Path,
) -> None:
    for number in range(8):
        topology = tmp_path / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    cores = cores_of({7, 0, 1, 2, 4, 5, 6, 3}, tmp_path)
    assert cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    prefill, decode = place(PAIR, Machine(cores, (), GIB))
    assert (prefill.cores, decode.cores) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert dict(decode.environment)["OMP_NUM_THREADS"] == "2"
    assert cores_of({0, 5}, tmp_path) == ((0,), (5,))  # what a container may use


def test_prefill_yields_on_shared_cores_and_waiting_threads_soon_sleep() -> None:
    prefill, decode = place(PAIR, cpu(4), "shared-cores")
    assert prefill.cores == decode.cores == (0, 1, 2, 3)
    assert (prefill.nice, decode.nice) == (PREFILL_NICE, 0)
    environment = dict(decode.environment)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["KMP_BLOCKTIME"] == "0"
    assert 500 <= int(environment["GOMP_SPINCOUNT"]) <= 3000


def test_instances_of_several_workers_which_poll_are_equals() -> None:
    assert [each.nice for each in place(PAIR, cpu(2), workers=2)] == [0, 0]


def test_too_few_cores_are_shared_unless_own_cores_were_asked_for() -> None:
    assert [p.cores for p in place(PAIR, cpu(1))] == [(0,), (0,)]
    with pytest.raises(ConfigError, match=r"2 instances need 2 cores.*--placement shared-cores"):
        place(PAIR, cpu(1), "own-cores")


def test_every_worker_has_a_core_of_its_own_or_all_are_shared() -> None:
    shared = place(PAIR, cpu(3), workers=2)
    assert [p.cores for p in shared] == [(0, 1, 2)] * 2
    assert dict(shared[0].environment)["OMP_NUM_THREADS"] == "1"
    own = place(PAIR, cpu(8), workers=2)
    assert [p.cores for p in own] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert dict(own[0].environment)["OMP_NUM_THREADS"] == "2"


@given(cores=st.integers(1, 64), instances=st.integers(1, 64))
def test_every_core_is_handed_out_once(cores: int, instances: int) -> None:
    if instances > cores:
        return
    placements = place([Role.BOTH] * instances, cpu(cores))
    assert [core for each in placements for core in each.cores] == list(range(cores))
    sizes = [len(each.cores) for each in placements]
    assert max(sizes) - min(sizes) <= 1


def test_gpus_are_handed_out_in_turn() -> None:
    placements = place([*PAIR, Role.DECODE], gpu("0", "1"))
    assert [dict(p.environment)["CUDA_VISIBLE_DEVICES"] for p in placements] == ["0", "1", "0"]
    assert [p.gpu_sharers for p in placements] == [2, 1, 2]
    assert all(not p.cores for p in placements)


def test_tensor_parallel_instances_get_neighbouring_gpus() -> None:
    placements = place(PAIR, gpu("4", "5", "6", "7"), workers=2)
    assert [dict(p.environment)["CUDA_VISIBLE_DEVICES"] for p in placements] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        place(PAIR, gpu("0"), workers=2)


def test_gpus_have_the_numbers_of_cuda_or_the_names_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ServeOptions(frozenset(), num_gpus=2, platform="cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert inspect(found).gpus == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f")
    assert inspect(found).gpus == ("3", "GPU-1f")
    assert inspect(replace(found, num_gpus=0)).gpus == ()  # by the CPU build of vLLM


class Platform(SimpleNamespace):
    """What `up` and `doctor` ask vLLM's platform."""

    device_type = "xpu"
    device_name = "xpu"
    device_control_env_var = "ZE_AFFINITY_MASK"

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def device_count(self) -> int:
        return 2


def options_on(platform: Any) -> ServeOptions:
    return ServeOptions(frozenset(), **machine.gpus_of(platform))


def test_gpus_of_other_makers_are_named_as_vllm_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2,3")
    placements = place(PAIR, inspect(options_on(Platform())))
    assert [p.environment for p in placements] == [
        (("ZE_AFFINITY_MASK", "2"),), (("ZE_AFFINITY_MASK", "3"),)
    ]  # fmt: skip


@pytest.mark.parametrize(("visible", "named"), [("9", 1), ("0,9", 2), ("-1", 1)])
def test_a_gpu_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, visible: str, named: int
) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = ServeOptions(frozenset(), num_gpus=named - 1, platform="cuda")
    with pytest.raises(
        ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible} names {named} GPUs"
    ) as e:
        inspect(found)
    assert f"can use {named - 1} of them" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_gpu_build_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="finds no GPU: check the driver"):
        inspect(options_on(Platform(device_type="")))
    # vLLM computes on the CPU with any build if it is told so.
    assert inspect(options_on(Platform(device_type="cpu"))).gpus == ()


@pytest.mark.parametrize(
    ("instances", "memory_bytes", "expected"),
    [(2, 64 * GIB, MAX_KV_BYTES), (2, 8 * GIB, GIB // 2), (100, 1 << 20, 1 << 20)],
)
def test_kv_cache_is_small_and_fits(instances: int, memory_bytes: int, expected: int) -> None:
    assert kv_bytes_each(instances, cpu(2, memory_bytes)) == expected


def test_words_show_the_names_of_options_and_the_keys() -> None:
    words = ["--a-b", "1", "--c_d=2", "plain", "-O3", "--api_key", "x", "y", "--api-key=z"]
    assert serve_options_in(words) == ServeOptions(
        frozenset({"a-b", "c-d", "O3", "api-key"}), ("x", "y", "z")
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor_parallel_size=2"],
        ["--data-parallel-size=2"],
        ["-dp", "2"],
        ["-tp", "2"],
        ["-pp=2"],
        ["--prefill-context-parallel-size", "2"],
    ],
)
def test_words_show_the_workers_of_an_instance(words: list[str]) -> None:
    assert serve_options_in([*words, "--x"]).num_workers == 2
    assert serve_options_in([words[0].split("=")[0]]).num_workers == 1


@pytest.mark.slow
def test_vllms_own_parser_reads_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "tensor-parallel-size: 2\napi_key: [a, b]\nkv_cache_memory_bytes: 5M\nhost: h\n"
    )
    found = ask_vllm(["--model", "m", "--config", str(path), "--tetri-streams", "3"])
    assert found.num_workers == 2
    assert found.api_keys == ("a", "b")
    assert {"kv-cache-memory-bytes", "api-key", "tetri-streams"} <= found.names
    assert found.names & {"port", "role", "host"} == {"host"}


@pytest.mark.slow
def test_an_option_that_vllm_refuses_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^after --: unrecognized arguments: --no-such$"):
        ask_vllm(["--model", "m", "--no-such"])


def test_what_fails_without_regard_to_options_does_not_blame_them() -> None:
    with pytest.raises(ConfigError, match=r"(?s)^(?!after --).*no_such_module"):
        machine.ask("no_such_module", ["--model", "m"])


def test_the_kernel_says_what_the_cpu_can_do(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: Fast 9000\nflags\t\t: avx2 avx512f\n")
    assert cpu_facts(path) == ("Fast 9000", {"avx2", "avx512f"})
    assert cpu_facts(tmp_path / "none")[1] == set()
