"""From the options of `up` to command lines."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.launch.planned import CPU, GPU, GPUS, make_plan, options, parsed
from vllm_tetri.config import DEFAULT_CONTROL, DEFAULT_MODE
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import Machine, claim, free_port, is_port_free


def command(machine: Machine, *words: str, tail: tuple[str, ...] = ()) -> list[str]:
    return make_plan(options(*words, tail=tail), machine).instances[0].command(1234)


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


def test_only_one_of_two_clusters_that_start_at_once_takes_the_default_address() -> None:
    with claim(port := free_port()) as is_first, claim(port) as is_second:
        assert (is_first, is_second) == (True, False)
        with claim(free_port()) as is_third:
            assert is_third
    with claim(port) as is_free_again:
        assert is_free_again
    plan = make_plan(options("--routers=2"), CPU, may_take_default=False)
    controls = plan.control.split(",")
    assert len(set(controls)) == 2
    assert DEFAULT_CONTROL not in controls


def test_routers_take_the_ports_that_follow_or_say_which_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port ({port - 1}|{port}) .* in use"):
            make_plan(options(f"--port={port - 1}", "--routers=2"), CPU)
        with pytest.raises(ConfigError, match=f"port {port} .* in use.*--shared-port"):
            make_plan(options(f"--shared-port={port}", "--routers=2"), CPU)
    with pytest.raises(ConfigError, match=r"65536 .* does not exist|65535 .* in use"):
        make_plan(options("--port=65535", "--routers=2"), CPU)


def test_a_port_that_only_root_may_take_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def by_a_user(address: tuple[str, int], **more: Any) -> socket.socket:
        if address[1] == 443:
            raise PermissionError
        return create(address, **more)

    monkeypatch.setattr(socket, "create_server", by_a_user)
    with pytest.raises(ConfigError, match=r"port 443 .* needs root or CAP_NET_BIND_SERVICE"):
        make_plan(options("--port=443", "--host=127.0.0.1"), CPU)


def test_routers_share_a_port_that_no_instance_gets() -> None:
    port = free_port()
    plan = make_plan(options(f"--shared-port={port}", "--routers=2"), CPU)
    for each in plan.routers:
        words = each.command(each.port)
        assert words[words.index("--shared-port") + 1] == str(port)
    with pytest.raises(ConfigError, match="--shared-port 8123: a router has port 8123"):
        make_plan(options("--port=8122", "--routers=2", "--shared-port=8123"), CPU)
    with pytest.raises(ConfigError, match=f"a router has port {port}"):
        make_plan(options(f"--shared-port={port}", f"--instance-port-base={port}"), CPU)


def test_instances_take_fixed_ports_or_say_which_is_taken() -> None:
    assert {spec.port for spec in make_plan(options(), CPU).instances} == {0}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*--instance-port-base"):
            make_plan(options(f"--instance-port-base={port}"), CPU)
    # Below the ports that the kernel gives to whatever else runs here.
    port = next(
        port for port in range(20_000, 30_000, 3) if all(map(is_port_free, range(port, port + 3)))
    )
    base = f"--instance-port-base={port}"
    ports = [spec.port for spec in make_plan(options(base, "--decode=2"), CPU).instances]
    assert ports == [port, port + 1, port + 2]
    with pytest.raises(ConfigError, match=f"a router has port {port}; choose another"):
        make_plan(options(base, f"--port={port}"), CPU)


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
        ("--kv-cache-memory", "1", "-cc.mode=3"),  # as vLLM's parser takes them
    ],
)
def test_the_users_own_choice_stands(tail: tuple[str, ...]) -> None:
    words = command(CPU, tail=tail)
    assert "--enforce-eager" not in words
    assert str(1 << 30) not in words


def test_gpu_instances_keep_vllms_choices_and_share_a_gpus_memory() -> None:
    words = command(GPU)
    assert "--enforce-eager" not in words
    assert "--kv-cache-memory-bytes" not in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.450"


def test_the_routers_options_go_to_the_router() -> None:
    given = ("--max-in-flight=7", "--flip=idle", "--flip-after=5", "--tpot-slo=0.5")
    words = make_plan(options(*given), CPU).routers[-1].command(1)
    for option, value in (("max-in-flight", "7"), ("flip", "idle"), ("flip-after", "5.0")):
        assert words[words.index(f"--{option}") + 1] == value
    assert words[words.index("--tpot-slo") + 1] == "0.5"
    assert "--refuse-late" not in words
    with pytest.raises(ConfigError, match="needs a target"):
        make_plan(options("--refuse-late"), CPU)


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
        (("--mode=whole", "--prefill=0", "--decode=0"), "no instance to start"),
        (("--prefill=0",), "needs a prefill instance"),
        (("--decode=0",), "needs a decode instance"),
        (("--prefill=9", "--placement=own-cores"), "need 10 cores"),
    ],
)
def test_impossible_clusters_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(options(*words), CPU)


def test_the_router_is_told_the_mode() -> None:
    for words, mode in (((), DEFAULT_MODE), (("--mode=whole",), "whole")):
        router = make_plan(parsed(*words), CPU).routers[-1].command(1)
        assert router[router.index("--mode") + 1] == mode


FOUR = ["both-0", "both-1", "both-2", "both-3"]


@pytest.mark.parametrize(
    ("machine", "words", "expected"),
    [
        (CPU, "", ["both-0"]),  # the default mode is adaptive
        (CPU, "--mode=split", ["prefill-0", "decode-0"]),
        (GPUS, "--mode=split", ["prefill-0", "decode-0"]),
        (GPU, "--mode=adaptive", ["both-0"]),
        (GPUS, "--mode=adaptive", FOUR),  # one per device
        (GPUS, "--mode=whole", FOUR),
        *[
            (machine, f"--mode={mode} {counts}", expected)
            for mode in ("split", "adaptive", "whole")
            for machine, counts, expected in (
                (GPUS, "--prefill=1 --decode=2", ["prefill-0", "decode-0", "decode-1"]),
                (CPU, "--both=2", ["both-0", "both-1"]),
                (CPU, "--prefill=0 --decode=0 --both=2", ["both-0", "both-1"]),
                (CPU, "--both=1 --decode=1", ["decode-0", "both-0"]),
                (CPU, "--prefill=1", ["prefill-0", "decode-0"]),
            )
        ],
        (CPU, "--mode=adaptive --prefill=0 --decode=2", ["decode-0", "decode-1"]),
    ],
)
def test_mode_counts_and_devices_say_which_instances_start(
    machine: Machine, words: str, expected: list[str]
) -> None:
    plan = make_plan(parsed(*words.split()), machine)
    assert [spec.name for spec in plan.instances] == expected
    assert plan.routers[-1].name == "router"


def test_an_instance_takes_as_many_devices_as_its_tensor_parallel_size() -> None:
    plan = make_plan(options("--mode=whole"), GPUS, gpus_each=2)
    assert [spec.name for spec in plan.instances] == ["both-0", "both-1"]


def test_tensor_parallel_workers_that_share_cores_may_be_late() -> None:
    given = ("--prefill=1", "--decode=1")
    for machine, gpus_each, is_late in ((CPU, 1, False), (CPU, 4, True), (GPUS, 2, False)):
        words = make_plan(options(*given), machine, gpus_each=gpus_each).routers[-1].command(1)
        assert ("--silent-after" in words) is is_late
