"""A Ray cluster of three nodes on this machine: a head without CPUs, and two for instances."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.cluster import Cluster

FIRST, SECOND = "first", "second"
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
    """Real raylets, which have the address of this machine, and one name each here."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self._nodes = Nodes(shutdown_at_exit=False)
        self._nodes.add_node(num_cpus=0, **USUAL)
        self._of = dict[str, Any]()
        self.add(FIRST)
        self.add(SECOND)
        self.address = str(self._nodes.address)

    def add(self, name: str) -> None:
        self._of[name] = self._nodes.add_node(num_cpus=CPUS, **USUAL)

    def kill(self, name: str) -> None:
        self._nodes.remove_node(self._of.pop(name), allow_graceful=False)

    def of(self, pid: int) -> str:
        """The name of the node that has started a process; empty if it is none of them."""
        raylets = {
            each.process.pid: name
            for name, node in self._of.items()
            for each in node.all_processes["raylet"]
        }
        above = [each.pid for each in psutil.Process(pid).parents()]
        return next((raylets[each] for each in above if each in raylets), "")

    def of_instance(self, name: str, control: str) -> str:
        """The name of the node with an instance of a cluster; empty without any."""
        found = set[str]()
        for each in with_words(name, control):
            with suppress(psutil.NoSuchProcess):
                found.add(self.of(each))
        return max(found, default="")

    def left(self) -> dict[str, Any]:
        """Placement groups that are there, and CPUs that are free."""
        done = subprocess.run(
            [sys.executable, "-c", LIST, self.address], capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def shutdown(self) -> None:
        self._nodes.shutdown()


def with_words(*words: str) -> list[int]:
    """The processes of this machine that have these words in their command lines."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if set(words) <= set(each.info["cmdline"] or ())
    ]


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
        self.nodes = nodes
        serve = ("--tetri-link", "tcp")  # nodes share this machine's memory, which hosts do not
        super().__init__(model, folder, roles=("--on", nodes.address, *roles), serve=serve)

    def hosts(self) -> dict[str, str]:
        """The name of the node of each instance that is ready."""
        return {
            name: self.nodes.of_instance(name, self.facts["control"])
            for name, entry in self.instances().items()
            if entry["state"] == "ready"
        }
