"""From the options of `up` to command lines."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch import up
from vllm_tetri.launch.plan import given_options, make_plan
from vllm_tetri.policy.placement import Machine

CPU = Machine(cores=(0, 1), gpus=(), memory_bytes=32 << 30)
GPU = Machine(cores=(0, 1), gpus=("0",), memory_bytes=32 << 30)


def options(*words: str, tail: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    namespace = parser.parse_args(["model", "--port=0", "--prefill=1", "--decode=1", *words])
    namespace.tail = list(tail)
    return namespace


def command(machine: Machine, *words: str, tail: tuple[str, ...] = ()) -> list[str]:
    return make_plan(options(*words, tail=tail), machine).specs[0].command(1234)


def test_cpu_instances_start_eager_with_a_stated_kv_cache() -> None:
    words = command(CPU)

    assert "--enforce-eager" in words
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert words[-2:] == ["--port", "1234"]


@pytest.mark.parametrize(
    "tail",
    [
        ("--kv-cache-memory-bytes=1", "--no-enforce-eager"),
        ("--kv_cache_memory_bytes", "1", "-O", "3"),
    ],
)
def test_the_users_own_choice_stands(tail: tuple[str, ...]) -> None:
    words = command(CPU, tail=tail)

    assert "--enforce-eager" not in words
    assert str(1 << 30) not in words


def test_a_choice_in_a_config_file_stands_too(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("kv_cache_memory_bytes: 5\n")

    assert str(1 << 30) not in command(CPU, tail=("--config", str(path)))


def test_gpu_instances_keep_vllms_choices_and_share_a_gpus_memory() -> None:
    words = command(GPU)

    assert "--enforce-eager" not in words
    assert "--kv-cache-memory-bytes" not in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.450"


def test_sizes_are_passed_on() -> None:
    words = command(CPU, "--arena-bytes=64M", "--kv-bytes=2GiB")

    assert words[words.index("--tetri-arena-bytes") + 1] == str(64 << 20)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2 << 30)


def test_many_instances_share_two_cores_and_have_names_of_their_own() -> None:
    plan = make_plan(options("--prefill=2", "--decode=2"), CPU)

    assert [spec.name for spec in plan.instances] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    ]
    assert {spec.placement.cores for spec in plan.instances} == {(0, 1)}
    assert [spec.placement.nice > 0 for spec in plan.instances] == [True, True, False, False]


def test_a_bound_on_requests_goes_to_the_router() -> None:
    words = make_plan(options("--max-in-flight=7"), CPU).specs[-1].command(1)

    assert words[words.index("--max-in-flight") + 1] == "7"
    assert "--max-in-flight" not in make_plan(options(), CPU).specs[-1].command(1)


def test_when_roles_change_is_the_routers_business() -> None:
    words = make_plan(options("--flip=idle", "--flip-after=5"), CPU).specs[-1].command(1)

    assert words[words.index("--flip") + 1] == "idle"
    assert words[words.index("--flip-after") + 1] == "5.0"
    assert "--flip" not in make_plan(options(), CPU).specs[-1].command(1)


@pytest.mark.parametrize("word", ["--port=1", "--role", "--tetri-control=x", "--tetri_instance=x"])
def test_what_up_sets_itself_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot be given after --"):
        make_plan(options(tail=(word,)), CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill=0", "--decode=0"), "no instance to start"),
        (("--prefill=0",), "needs a prefill instance"),
        (("--decode=0",), "needs a decode instance"),
        (("--prefill=9", "--placement=split"), "needs as many cores"),
    ],
)
def test_impossible_clusters_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(options(*words), CPU)


def test_only_both_instances_make_a_cluster() -> None:
    plan = make_plan(options("--prefill=0", "--decode=0", "--both=2"), CPU)

    assert [spec.name for spec in plan.specs] == ["both-0", "both-1", "router"]


def test_option_names_are_found_however_they_are_written() -> None:
    assert given_options(["--a-b", "1", "--c_d=2", "plain", "-O3"]) == {"a-b", "c-d", "O3"}


def test_a_predictor_is_for_every_instance() -> None:
    specs = make_plan(options("--predictor", "folder"), CPU).instances
    for spec in specs:
        words = spec.command(1234)
        assert words[words.index("--tetri-predictor") + 1] == "folder"
