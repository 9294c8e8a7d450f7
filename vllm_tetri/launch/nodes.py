"""Instances on the nodes of a Ray cluster.

An instance is an actor in a placement group of its own, with one bundle: everything of it is on
one node. The actor's process is the parent of the instance's guard, so that an instance ends with
its actor, however that ends: by order, with the driver's job, or with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.guard import GRACE_S
from vllm_tetri.launch.machine import Machine, is_cpu_build
from vllm_tetri.launch.plan import ChildSpec
from vllm_tetri.launch.process import GUARD_MARGIN_S, ChildProcess, StartError
from vllm_tetri.router.auth import KEY_VARIABLE
from vllm_tetri.security import VARIABLE, in_memory

ROOM_S = 30.0  # until an instance must have a node
_ACTOR_S = 60.0  # until its actor must have started it
_REACH_S = 5.0
_LOOK_S = 0.1
_LOST = 1  # exit status of an instance whose actor or node is gone
_LINES = 10_000  # that wait to be fetched
_FORWARDED = ("VLLM_", "HF_")  # variables of this process that instances get
_OF_MACHINE = {KEY_VARIABLE, "VLLM_HOST_IP"}
_RUNNING_ONE = "ray"
# Else Ray kills the guard, which would end the rest of the instance.
_OF_ACTOR = {"RAY_kill_child_processes_on_worker_exit": "false"}


class Supervisor:
    """Runs one instance in an actor, and keeps what it prints until that is fetched."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)

    async def start(
        self, spec: ChildSpec, environment: dict[str, str], secret: str
    ) -> tuple[str, int, int]:
        """Start the instance; its address, its port, and the process id of its guard."""
        os.environ.update(environment)
        os.environ[VARIABLE] = in_memory("tetri-secret", secret)
        here = replace(
            spec, host=ray.util.get_node_ip_address(), words=(sys.executable, *spec.words[1:])
        )
        self._child = await ChildProcess.start(here, self._lines.append)
        self._end = asyncio.create_task(self._child.wait())
        return self._child.host, self._child.port, self._child.pid

    async def read(self) -> tuple[list[str], int | None]:
        """Wait for new lines, or the end; the lines, and the exit status after the last one."""
        while not self._lines and not self._end.done():
            await asyncio.sleep(_LOOK_S)
        status = self._end.result() if self._end.done() else None
        lines = list(self._lines)
        self._lines.clear()
        return lines, status

    async def stop(self, drain_s: float) -> None:
        """End the instance as `ChildProcess.stop` does."""
        await self._child.stop(drain_s)

    async def kill(self) -> None:
        """End the instance at once."""
        self._child.kill()


class RayChild:
    """A running instance, with the interface of `ChildProcess`. Used by the event loop that
    started it."""

    def __init__(
        self, actor: Any, group: Any, at: tuple[str, int, int], on_line: Callable[[str], None]
    ) -> None:
        self.host, self.port, self.pid = at
        self._actor, self._group, self._on_line = actor, group, on_line
        self._pump = asyncio.create_task(self._read_lines())

    async def wait(self) -> int:
        """Exit status, after the last line was delivered; 1 if the actor or its node is lost."""
        return await asyncio.shield(self._pump)

    async def stop(self, drain_s: float = 0.0) -> None:
        """As `ChildProcess.stop`; an actor that does not respond is ended."""
        if not self._pump.done():
            with contextlib.suppress(RayError, TimeoutError):
                most_s = drain_s + GRACE_S + 2 * GUARD_MARGIN_S
                await asyncio.wait_for(self._actor.stop.remote(drain_s), most_s)
            await asyncio.wait({self._pump}, timeout=GUARD_MARGIN_S)
            free(self._group, self._actor)
        await self.wait()

    def kill(self) -> None:
        """End the instance at once."""
        if not self._pump.done():
            self._actor.kill.remote()

    async def _read_lines(self) -> int:
        status: int | None = None
        try:
            while status is None:
                lines, status = await self._actor.read.remote()
                for line in lines:
                    self._on_line(line)
        except RayError as error:
            status = _LOST
            self._on_line(f"ERROR Ray has lost it: {str(error).partition(chr(10))[0]}")
        finally:
            free(self._group, self._actor)
        return status


def free(group: Any, actor: Any = None) -> None:
    """Give back what Ray holds for an instance; harmless for what is gone."""
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        if actor is not None:
            ray.kill(actor)
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        remove_placement_group(group)


class RayNodes:
    """A connection to a Ray cluster, on whose nodes instances start; ConfigError if there is no
    cluster at the address."""

    def __init__(
        self, address: str, workers: int, cpus_each: int, room_s: float, secret_file: str
    ) -> None:
        self._bundle = {"CPU": float(cpus_each)}
        if not is_cpu_build():
            self._bundle["GPU"] = float(workers)
        self._room_s = min(room_s, ROOM_S)
        self._secret = Path(secret_file).read_text()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            if address != _RUNNING_ONE:  # Ray itself tries for a minute
                at = urlsplit(address if "://" in address else f"//{address}")
                socket.create_connection((at.hostname, at.port), _REACH_S).close()
            ray.init(
                address=None if address == _RUNNING_ONE else address,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (RayError, OSError, RuntimeError, ValueError, AssertionError, ImportError) as error:
            raise ConfigError(
                f"--on {address}: {str(error).partition(chr(10))[0]}; `ray status` shows whether "
                "a cluster runs there, and `ray start --head` starts one"
            ) from error

    def machine(self) -> Machine:
        """What all nodes have together, with the memory of the smallest: when others fail, it has
        all instances."""
        total, alive = ray.cluster_resources(), [each for each in ray.nodes() if each["Alive"]]
        memory = [each["Resources"].get("memory", 0.0) for each in alive]
        gpus = int(total.get("GPU", 0)) if "GPU" in self._bundle else 0
        return Machine(
            cores=tuple((each,) for each in range(int(total.get("CPU", 0)))),
            gpus=tuple(map(str, range(gpus))),
            memory_bytes=int(min(filter(None, memory), default=0.0)),
            address=ray.util.get_node_ip_address(),
        )

    def close(self) -> None:
        """Leave the cluster, which ends what this process has started in it."""
        ray.shutdown()

    async def start(self, spec: ChildSpec, on_line: Callable[[str], None]) -> RayChild:
        """Start an instance on a node with room for it; StartError if there is none in time."""
        group = placement_group([self._bundle], strategy="STRICT_PACK", name=spec.name)
        actor = None
        try:
            await self._until_placed(group)
            actor = ray.remote(Supervisor).options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0.0),
                max_concurrency=8,
                runtime_env={"env_vars": _OF_ACTOR},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ).remote()  # fmt: skip
            environment = {
                name: value
                for name, value in os.environ.items()
                if name.startswith(_FORWARDED) and name not in _OF_MACHINE
            }
            started = actor.start.remote(spec, environment, self._secret)
            at = await asyncio.wait_for(started, _ACTOR_S)
            return RayChild(actor, group, at, on_line)
        except (RayError, TimeoutError) as error:
            free(group, actor)
            raise StartError(f"its actor did not start: {error!r}") from error
        except BaseException:
            free(group, actor)
            raise

    async def _until_placed(self, group: Any) -> None:
        deadline = asyncio.get_running_loop().time() + self._room_s
        while placement_group_table(group).get("state") != "CREATED":
            if asyncio.get_running_loop().time() > deadline:
                raise StartError(self._no_room())
            await asyncio.sleep(_LOOK_S)

    def _no_room(self) -> str:
        free_now = ray.available_resources()
        nodes = [
            f"{each['NodeManagerAddress']} has {_words(self._bundle, each['Resources'])}"
            for each in ray.nodes()
            if each["Alive"]
        ]
        return (
            f"no node of Ray had room for it within {self._room_s:g} s: it needs "
            f"{_words(self._bundle, self._bundle)} on one node; of all nodes "
            f"{_words(self._bundle, free_now)} are free now ({', '.join(nodes)}). Start fewer "
            "instances, lower --cpus-each, or add a node"
        )


def _words(asked: dict[str, float], found: dict[str, Any]) -> str:
    return " and ".join(f"{found.get(name, 0.0):g} {name}" for name in asked)
