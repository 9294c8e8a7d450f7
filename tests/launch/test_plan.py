"""From the options of `up` to command lines."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch import up
from vllm_tetri.launch.plan import DEFAULT_MODE, given_options, make_plan, with_sharing
from vllm_tetri.policy.placement import Machine, Sharing
from vllm_tetri.types import Mode

CPU = Machine(cores=(0, 1), gpus=(), memory_bytes=32 << 30)
GPU = Machine(cores=(0, 1), gpus=("0",), memory_bytes=32 << 30)
GPUS = Machine(cores=(0, 1), gpus=("0", "1", "2", "3"), memory_bytes=32 << 30)


def options(*words: str, tail: tuple[str, ...] = ()) -> argparse.Namespace:
    """In mode split, unless the words name another one."""
    return parsed("--mode=split", *words, tail=tail)


def parsed(*words: str, tail: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    namespace = parser.parse_args(["model", "--port=0", *words])
    namespace.tail = list(tail)
    return namespace


def command(machine: Machine, *words: str, tail: tuple[str, ...] = ()) -> list[str]:
    return make_plan(options(*words, tail=tail), machine).specs[0].command(1234)


def test_routers_have_ports_and_addresses_of_their_own_that_instances_know() -> None:
    plan = make_plan(options("--routers=3"), CPU)

    assert [spec.name for spec in plan.routers] == ["router-0", "router-1", "router-2"]
    assert len({spec.port for spec in plan.routers}) == 3
    commands = [spec.command(1) for spec in plan.routers]
    controls = [words[words.index("--control") + 1] for words in commands]
    assert len(set(controls)) == 3
    for spec in plan.instances:
        words = spec.command(1)
        assert words[words.index("--tetri-control") + 1] == ",".join(controls)
    assert make_plan(options(), CPU).routers[0].name == "router"


def test_routers_take_the_ports_that_follow_or_say_which_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* in use"):
            make_plan(options(f"--port={port - 1}", "--routers=2"), CPU)
    with pytest.raises(ConfigError, match="65536"):
        make_plan(options("--port=65535", "--routers=2"), CPU)


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


@pytest.mark.parametrize(
    "word",
    ["--port=1", "--role", "--tetri-control=x", "--tetri_instance=x", "--tetri-secret-file=x"],
)
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


def names(machine: Machine, *words: str, tail: tuple[str, ...] = ()) -> list[str]:
    return [spec.name for spec in make_plan(options(*words, tail=tail), machine).instances]


def test_a_pair_is_started_when_no_count_is_given() -> None:
    assert names(CPU, "--mode=split") == names(GPUS, "--mode=split") == ["prefill-0", "decode-0"]


def test_without_a_word_every_request_is_decided_for_itself() -> None:
    plan = make_plan(parsed(), CPU)
    assert DEFAULT_MODE is Mode.ADAPTIVE
    assert [spec.name for spec in plan.instances] == ["both-0"]


@pytest.mark.parametrize("mode", ["adaptive", "whole"])
def test_modes_that_serve_whole_start_one_instance_per_device(mode: str) -> None:
    word = f"--mode={mode}"

    assert names(CPU, word) == names(GPU, word) == ["both-0"]
    assert names(GPUS, word) == ["both-0", "both-1", "both-2", "both-3"]
    assert names(GPUS, word, tail=("--tensor_parallel_size=2",)) == ["both-0", "both-1"]


def test_a_lone_instance_of_a_cpu_host_has_all_cores_and_usual_threads() -> None:
    (spec,) = make_plan(options("--mode=adaptive"), CPU).instances

    assert spec.placement.cores == CPU.cores
    assert dict(spec.placement.environment)["OMP_NUM_THREADS"] == "2"
    assert "OMP_WAIT_POLICY" not in dict(spec.placement.environment)


def test_too_few_gpus_are_an_error_in_every_mode() -> None:
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        names(GPU, "--mode=whole", tail=("-tp", "2"))


@pytest.mark.parametrize("mode", ["split", "adaptive", "whole"])
def test_counts_that_are_given_count_in_every_mode(mode: str) -> None:
    word = f"--mode={mode}"

    assert names(GPUS, word, "--prefill=1", "--decode=2") == ["prefill-0", "decode-0", "decode-1"]
    assert names(CPU, word, "--both=2") == ["both-0", "both-1"]
    assert names(CPU, word, "--both=1", "--decode=1") == ["decode-0", "both-0"]
    assert names(CPU, word, "--prefill=1") == ["prefill-0", "decode-0"]


def test_only_split_needs_an_instance_of_each_kind() -> None:
    assert names(CPU, "--mode=adaptive", "--prefill=0", "--decode=2") == ["decode-0", "decode-1"]
    with pytest.raises(ConfigError, match="no instance to start"):
        names(CPU, "--mode=whole", "--prefill=0", "--decode=0")


def test_the_router_is_told_the_mode() -> None:
    for words, mode in (((), DEFAULT_MODE), (("--mode=whole",), "whole")):
        router = make_plan(parsed(*words), CPU).specs[-1].command(1)
        assert router[router.index("--mode") + 1] == mode


@pytest.mark.parametrize(
    ("machine", "words", "is_open"),
    [
        (CPU, (), True),
        (CPU, ("--both=2",), True),
        (CPU, ("--placement=split",), False),
        (CPU, ("--placement=shared",), False),
        (CPU, ("--prefill=2",), False),  # fewer cores than instances
        (CPU, ("--mode=whole",), False),
        (GPU, (), False),
    ],
)
def test_sharing_is_open_where_a_measurement_could_decide(
    machine: Machine, words: tuple[str, ...], is_open: bool
) -> None:
    assert make_plan(options(*words), machine).is_sharing_open is is_open


def test_sharing_can_be_settled_later() -> None:
    plan = make_plan(options(), CPU)
    shared = with_sharing(plan, CPU, Sharing.SHARED)

    assert [spec.placement.cores for spec in plan.instances] == [(0,), (1,)]
    assert [spec.placement.cores for spec in shared.instances] == [(0, 1), (0, 1)]
    assert [spec.name for spec in shared.specs] == [spec.name for spec in plan.specs]
    assert not shared.is_sharing_open


@pytest.mark.parametrize(
    ("tail", "dtype"),
    [((), "bfloat16"), (("--dtype", "float32"), "float32"), (("--dtype=half",), "float16")],
)
def test_cores_are_tried_with_the_dtype_that_was_asked_for(
    tail: tuple[str, ...], dtype: str
) -> None:
    assert make_plan(options(tail=tail), CPU).dtype == dtype


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
