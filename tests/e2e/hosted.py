"""A cluster on several hosts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.e2e.cluster import ARENA_BYTES, CHUNK, PASSIVE, SERVE, UNIPROC, Cluster, Process, answers
from tests.faults.hosts import Hosts

# Shorter than the defaults (30 s, 60 s), so that tests take seconds.
TRANSFER_TIMEOUT_S, HOLD_TIMEOUT_S = 5, 10
CONTROL_PORT, KV_PORT, HTTP_PORT = 18555, 18600, 8000
INSTANCES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


class Hosted(Cluster):
    """A router and three instances, each on a host of its own; `parts` are their processes."""

    def __init__(self, model: Path, folder: Path, hosts: Hosts, secret: Path) -> None:
        address = hosts.addresses["router"]
        self.url = f"http://{address}:{HTTP_PORT}"
        control = f"tcp://{address}:{CONTROL_PORT}"
        Process.__init__(
            self,
            ["vllm_tetri.cli", "router", "--host", address, "--port", str(HTTP_PORT),
             "--control", control, "--secret-file", str(secret), "--flip", "off",
             "--mode", "split"],
            folder / "router.log",
            within=hosts.within("router"),
        )  # fmt: skip
        self.parts = {
            name: _instance(name, role, model, folder, hosts, secret, control)
            for name, role in INSTANCES.items()
        }

    def ready(self) -> None:
        self.wait_for(lambda: answers(f"{self.url}/health"), "the router")
        for name, part in self.parts.items():
            part.wait_for(partial(self.is_ready, name), name)

    def is_ready(self, name: str) -> bool:
        """Whether the router gives it requests."""
        return self.state_of(name) == "ready"

    def stop(self) -> int:
        for part in self.parts.values():
            part.stop()
        return super().stop()


def _instance(
    name: str, role: str, model: Path, folder: Path, hosts: Hosts, secret: Path, control: str
) -> Process:
    address = hosts.addresses[name]
    return Process(
        ["vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--role", role,
         "--distributed-executor-backend", UNIPROC, "--host", address, "--port", str(HTTP_PORT),
         "--tetri-instance", name, "--tetri-kv-port", str(KV_PORT), "--tetri-control", control,
         "--tetri-secret-file", str(secret),
         "--tetri-link", "tcp",  # they share memory, which no cut of the network touches
         "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK),
         "--tetri-transfer-timeout", str(TRANSFER_TIMEOUT_S),
         "--tetri-hold-timeout", str(HOLD_TIMEOUT_S)],
        folder / f"{name}.log",
        within=hosts.within(name),
        VLLM_HOST_IP=address,
        **PASSIVE,
    )  # fmt: skip
