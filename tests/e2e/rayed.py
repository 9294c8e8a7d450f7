"""A Ray cluster of three nodes on this machine: a head without CPUs, and two for instances."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ARENA_BYTES, CHUNK, SERVE, Cluster, Process

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
CPUS = 3  # of a node: one has room for all instances
USUAL = {"object_store_memory": 80 << 20, "include_dashboard": False}
LIST = """
import json, ray, sys
from ray.util.placement_group import placement_group_table
ray.init(sys.argv[1], log_to_driver=False)
groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
print()
print(json.dumps({"groups": groups, "free": ray.available_resources().get("CPU", 0)}))
"""


class RayCluster:
    """Real raylets, each with an address of its own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self._nodes = Nodes(shutdown_at_exit=False)
        # Its address is this machine's: Ray replaces that of the loopback interface by it.
        self._nodes.add_node(num_cpus=0, **USUAL)
        self._of = dict[str, Any]()
        self.add(FIRST)
        self.add(SECOND)
        self.address = str(self._nodes.address)

    def add(self, address: str) -> None:
        self._of[address] = self._nodes.add_node(num_cpus=CPUS, node_ip_address=address, **USUAL)

    def kill(self, address: str) -> None:
        self._nodes.remove_node(self._of.pop(address), allow_graceful=False)

    def left(self) -> dict[str, Any]:
        """Placement groups that are there, and CPUs that are free."""
        done = subprocess.run(
            [sys.executable, "-c", LIST, self.address], capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def shutdown(self) -> None:
        self._nodes.shutdown()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    made = RayCluster()
    try:
        yield made
    finally:
        made.shutdown()


class OnRay(Cluster):
    """`vllm-tetri up --on ADDRESS` with instances of all roles."""

    def __init__(self, model: Path, folder: Path, nodes: RayCluster, *roles: str) -> None:
        self.ready_file = folder / "ready.json"
        self.logs = folder / "logs"
        Process.__init__(
            self,
            ["vllm_tetri.cli", "up", str(model), "--on", nodes.address, *roles, "--port", "0",
             "--ready-file", str(self.ready_file), "--log-dir", str(self.logs), "--flip", "off",
             "--mode", "split", "--", *SERVE, "--tetri-arena-bytes", str(ARENA_BYTES),
             "--tetri-chunk-size", str(CHUNK), "--tetri-transfer-timeout", "5",
             "--tetri-link", "tcp"],  # nodes share this machine's memory, which hosts do not
            folder / "up.log",
        )  # fmt: skip

    def hosts(self) -> dict[str, str]:
        """The address of the node of each instance that is ready."""
        return {
            name: entry["url"].removeprefix("http://").partition(":")[0]
            for name, entry in self.instances().items()
            if entry["state"] == "ready"
        }
