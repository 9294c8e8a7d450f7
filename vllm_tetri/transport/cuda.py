"""The CUDA device through torch, and which mover KV tensors need.

vLLM's ``swap_blocks_batch`` submits all copies of a call at once (cuMemcpyBatchAsync). Without it
each run is one asynchronous copy by torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_tetri.transport.blocks import BlockMover, DeviceMover, HostMover
from vllm_tetri.transport.device import Copies, DeviceEvent

# Source addresses, target addresses, sizes: int64 tensors on the CPU; copies on the current stream.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

# Of one call: with driver 580 cuMemcpyBatchAsync has crashed at 51,828 (vLLM's issue 49276).
_MOST_COPIES = 4096
_OFFSET = struct.Struct("<Q")  # in the allocation that the rest of a handle names
_HANDLE_BYTES = 64  # of CUDA's handles; torch's begin with some more
_NO_COUNTER = b"/tetri-no-counter", 0  # in place of torch's count of readers; there is none


class CudaDevice:
    """The `Device` of CUDA tensors."""

    def __init__(self, device: torch.device, copy_batch: CopyBatch | None) -> None:
        self._device = device
        self._copy_batch = copy_batch or self._copy_each
        self._host: dict[int, int] = {}  # registered: sizes by address
        self._own: list[torch.Tensor] = []
        self._opened: dict[int, torch.Tensor] = {}  # by address

    def mark(self) -> DeviceEvent:
        return torch.cuda.current_stream(self._device).record_event()

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._device)

    def copy(
        self, stream: torch.cuda.Stream | None, copies: Copies, after: DeviceEvent | None
    ) -> DeviceEvent:
        columns = copies.sources, copies.targets, copies.sizes
        stream = stream or torch.cuda.current_stream(self._device)
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            stream.wait_event(after)
        every = [torch.from_numpy(each).split(_MOST_COPIES) for each in columns]

        def copy_all(_: int) -> None:
            for part in zip(*every, strict=True):
                self._copy_batch(*part)

        return self.queue(stream, copy_all)

    def queue(self, stream: torch.cuda.Stream, work: Callable[[int], None]) -> DeviceEvent:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.query()  # a thread's first call of the runtime gives it the driver's context
            work(stream.cuda_stream)
            return stream.record_event()

    def reserve(self, num_bytes: int) -> int:
        self._own.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return self._own[-1].data_ptr()

    def register(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        self._host[address] = num_bytes

    def unregister(self, address: int) -> None:
        self._host.pop(address, None)
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostUnregister(address))

    def share(self, num_bytes: int) -> tuple[int, bytes]:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        _, handle, _, offset, *counter, _, _ = memory.untyped_storage()._share_cuda_()
        # Else torch keeps the memory until a reader counts down, once for all of them.
        torch.UntypedStorage._release_ipc_counter(*counter)
        self._own.append(memory)
        return memory.data_ptr(), _OFFSET.pack(offset) + handle

    def open_shared(self, handle: bytes, num_bytes: int) -> int:
        if len(handle) < _OFFSET.size + _HANDLE_BYTES:
            raise ValueError(f"a handle of {len(handle)} bytes")
        (offset,) = _OFFSET.unpack_from(handle)
        name, no_event = handle[_OFFSET.size :], (bytes(_HANDLE_BYTES), False)
        with torch.cuda.device(self._device):
            # Peer access is enabled between the current device and that of the memory.
            index = torch.cuda.current_device()
            storage = torch.UntypedStorage._new_shared_cuda(
                index, name, num_bytes, offset, *_NO_COUNTER, *no_event
            )
        memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self._opened[memory.data_ptr()] = memory
        return memory.data_ptr()

    def close_shared(self, address: int) -> None:
        del self._opened[address]

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def _copy_each(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        columns = sources.tolist(), targets.tolist(), sizes.tolist()
        for source, target, size in zip(*columns, strict=True):
            self._bytes(target, size).copy_(self._bytes(source, size), non_blocking=True)

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        """View registered memory of the host, or memory of the device, as bytes."""
        if any(begin <= address < begin + length for begin, length in list(self._host.items())):
            memory = (ctypes.c_char * size).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8)
        for begin, memory in list(self._opened.items()):  # torch takes it for its own device's
            if begin <= address < begin + memory.nbytes:
                return memory[address - begin : address - begin + size]
        return torch.as_tensor(_Bytes(address, size), device=self._device)


class _Bytes:
    """Memory of a device for torch, by the CUDA array interface (version 2)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def _check(error: Any) -> None:
    if int(error) != 0:
        words = torch.cuda.cudart().cudaGetErrorString(error)
        raise RuntimeError(f"CUDA error {int(error)}: {words}")


def mover_for(
    tensors: Sequence[torch.Tensor], num_blocks: int, copy_batch: CopyBatch | None = None
) -> BlockMover:
    """Make the mover for the device of the KV tensors; raises ValueError where there is none."""
    devices = {tensor.device for tensor in tensors}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return HostMover(tensors, num_blocks)
    if kinds == {"cuda"} and len(devices) == 1:
        return DeviceMover(CudaDevice(devices.pop(), copy_batch), tensors, num_blocks)
    raise ValueError(f"KV tensors on {sorted(kinds)} cannot be moved; cpu and cuda can")
