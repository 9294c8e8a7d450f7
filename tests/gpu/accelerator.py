"""The devices of stage A: the package's `CudaDevice`, or the tests' fake device in its place, with
what only this stage asks of them. On a CPU a shared file stands for device memory."""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.transport.fake_device import FakeDevice
from vllm_tetri.transport.device import Copies, CopyBatch, CudaDevice

_OPERATORS = "_C_cache_ops"  # vLLM's name for them


def accelerator(device: str) -> Cuda | Host:
    return Cuda() if device == "cuda" else Host()


def copies_of(sources: list[int], targets: list[int], sizes: list[int]) -> Copies:
    return Copies(*(np.asarray(each, dtype=np.int64) for each in (sources, targets, sizes)))


class Host(FakeDevice):
    """Streams are threads that are late, and memory has poison where a copy is not done."""

    kind = "cpu"
    has_batches = False

    def __init__(self, delay_s: float = 0.0003) -> None:
        super().__init__(delay_s=delay_s)
        self._files: dict[int, int] = {}  # by address

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the device, which other processes can open."""
        file = os.memfd_create("tetri-gpu")
        os.truncate(file, num_bytes)
        tensor = self._map(file)
        self._files[tensor.data_ptr()] = file
        return tensor

    def _map(self, file: int) -> torch.Tensor:
        tensor = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        self.own(tensor)
        return tensor

    def share(self, num_bytes: int) -> tuple[int, bytes]:
        address = self.allocate(num_bytes).data_ptr()
        return address, f"/proc/{os.getpid()}/fd/{self._files[address]}".encode()

    def open_shared(self, handle: bytes, num_bytes: int) -> int:
        with Path(handle.decode()).open("r+b") as file:
            return self._map(file.fileno()).data_ptr()

    def close_shared(self, address: int) -> None:
        """Nothing to do: the mapping goes with this object."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What runs this work on the compute stream again and again."""
        return lambda: self.run(work)

    def compute_after(self, event: Any) -> None:
        """Let what is computed from now on start after the event."""
        self.compute.submit(event.wait_on_stream)

    def close(self) -> None:
        """End all streams; AssertionError if a copy touched what it must not."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        super().close()
        assert not self.faults, self.faults[0]


class Cuda(CudaDevice):
    """The first visible GPU. The compute stream is the calling thread's current one."""

    kind = "cuda"

    def __init__(self) -> None:
        batch = _batched_copy()
        self.has_batches = batch is not None
        super().__init__(torch.device("cuda", 0), batch)
        torch.cuda.set_stream(torch.cuda.Stream())  # of its own, as vLLM's

    def own(self, *tensors: torch.Tensor) -> None:
        """Nothing to do: the driver knows."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # allocates what the capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            work()
        return graph.replay

    def compute_after(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        """Wait for everything."""
        self.synchronize()


def _batched_copy() -> CopyBatch | None:
    """vLLM's batched block copy, from its library alone; None where that is absent."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for library in Path(folder).glob("_C_stable_libtorch*.so"):
            torch.ops.load_library(str(library))
            batch = getattr(torch.ops, _OPERATORS).swap_blocks_batch
            return partial(_batch, batch)
    return None


def _batch(batch: Callable[..., None], *columns: torch.Tensor) -> None:
    batch(*columns, False)
