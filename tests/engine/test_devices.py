"""What follows from the device that vLLM computes on, with imagined platforms."""

from __future__ import annotations

import os
from pathlib import Path
from platform import node
from types import SimpleNamespace

import pytest
import torch

from tests.engine.harness import Engine, vllm_config
from tests.engine.pair import Pair, prompt
from tests.transport.fake_device import FakeDevice
from tests.transport.fake_nccl import FakeNccl
from vllm_tetri.engine import compat, identity, roles, step, worker
from vllm_tetri.errors import ConfigError, TransferError
from vllm_tetri.types import Role


class Platform(SimpleNamespace):
    """vLLM's platform of a GPU host, as far as it is asked."""

    device_name = "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"

    def get_device_uuid(self, device_id: int) -> str:
        if self.device_name == "xpu":
            raise NotImplementedError
        return f"GPU-{device_id}f"

    def get_device_numa_node(self, device_id: int) -> int:
        return 1


@pytest.mark.parametrize(
    ("platform", "place"),
    [
        (Platform(), "GPU-0f"),
        (Platform(device_name="rocm"), "rocm 0 of 2,3"),
        (Platform(device_name="xpu", device_control_env_var="NOT_SET"), "xpu 0 of all"),
    ],
)
def test_instances_on_a_gpu_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, platform: Platform, place: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for module in (roles, compat):
        monkeypatch.setattr(module, "current_platform", platform)
    assert roles.device_place(0) == f"{node()} {place}"


def test_an_arena_is_opened_on_the_cores_next_to_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    near = {max(before)}
    (tmp_path / "node1").mkdir()
    cores = tmp_path / "node1/cpulist"
    for text, expected in (
        (f"{max(before)},4000-4003\n", near),
        ("4000-4003\n", before),  # none of them is ours
        ("\n", before),  # a node of memory alone
    ):
        cores.write_text(text)
        with roles.near_device(0, tmp_path):  # of a CPU host
            assert os.sched_getaffinity(0) == before
        with monkeypatch.context() as patched:
            patched.setattr(compat, "current_platform", Platform())
            with roles.near_device(0, tmp_path):
                assert os.sched_getaffinity(0) == expected
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("rank_local", "gpu"), [(None, 0), (0, 0), (2, 4)])
def test_every_rank_has_gpus_of_its_own(rank_local: int | None, gpu: int) -> None:
    parallel = SimpleNamespace(
        data_parallel_rank_local=rank_local, data_parallel_index=0, world_size=2
    )
    assert roles.first_gpu(SimpleNamespace(parallel_config=parallel)) == gpu


def test_only_kv_of_cpus_and_cuda_gpus_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vllm_config(tmp_path, Role.BOTH)
    for name, is_told in (("cuda", False), ("rocm", True), ("xpu", True)):
        monkeypatch.setattr(identity, "current_platform", Platform(device_name=name))
        reasons = [why for why, applies in identity.reasons_alone(real).items() if applies]
        assert [f"runs on {name}" in why for why in reasons] == [True] * is_told


@pytest.mark.parametrize(
    ("shard_bytes", "num_ranks", "given", "is_large"),
    [
        (20_480, 1, None, False),  # ten blocks of two layers of 1 KiB
        (20_480, 2, None, False),
        (20_479, 2, None, True),
        (20_480, 1, 20_479, True),
        (1, 2, 40_960, False),
    ],
)
def test_a_load_is_large_by_what_a_shard_of_the_kv_copies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_bytes: int,
    num_ranks: int,
    given: int | None,
    is_large: bool,
) -> None:
    monkeypatch.setattr(step, "CPU_LOAD_BYTES", shard_bytes)
    pair = Pair(tmp_path, num_ranks=num_ranks, load_budget_bytes=given, arena_bytes=1 << 20)
    pair.sent("a", tokens := prompt(160))
    request = pair.receive("a", tokens)
    receives, found = pair.decode.endpoint.receives, []
    pair.decode.run_until(
        lambda: found.append(receives.match(request, 0, is_busy=True)) or found[-1][0] is not None
    )
    assert found[-1] == (159, is_large)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    pair.end("a")
    pair.close()


def test_an_arena_of_a_device_takes_half_of_its_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "on_device", True)
    monkeypatch.setattr(FakeDevice, "free_bytes", lambda self: 40_960)
    pair = Pair(tmp_path, link="ipc")
    assert pair.decode.endpoint.receiver.stats().arena_total_bytes == 20_480
    assert pair.decode.info.arena_tokens == 10 * 16  # of two layers of 1 KiB
    pair.close()


@pytest.mark.parametrize("link", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("on_device", "num_ranks", "error", "words"),
    [
        (False, 1, ConfigError, "the KV of this instance is in host memory; use auto"),
        (True, 2, ConfigError, "this instance has 2 workers; use auto"),
        (True, 1, TransferError, "no room for a receive arena .* Lower --gpu-memory-utilization"),
    ],
)
def test_an_arena_of_a_device_is_refused_where_it_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
    on_device: bool,
    num_ranks: int,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(Engine, "on_device", on_device)
    monkeypatch.setattr(worker, "load_nccl", FakeNccl)
    monkeypatch.setattr(FakeDevice, "free_bytes", lambda self: 100)
    with pytest.raises(error, match=words):
        Engine(tmp_path, Role.DECODE, link=link, num_ranks=num_ranks)


@pytest.mark.parametrize("path", ["", "/no/libnccl.so.2", "libc.so.6"])
def test_nccl_that_cannot_be_loaded_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    monkeypatch.setattr(Engine, "on_device", True)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", path)
    monkeypatch.setattr(torch.version, "cuda", None)
    words = f"cannot load NCCL .*{path}.*Install nvidia-nccl.*VLLM_NCCL_SO_PATH.*--tetri-link auto"
    with pytest.raises(ConfigError, match=words) as error:
        Engine(tmp_path, Role.DECODE, link="nccl")
    assert "\n" not in str(error.value)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
