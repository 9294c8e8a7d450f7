"""The pods of the Helm chart as processes: the rendered commands, on hosts of their own.

A pod has its own address, ``/dev/shm`` and ``/etc/hosts``; the last is shared, and stands for the
DNS of a cluster. Who starts and ends pods, and with which hooks, is the test.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ARENA_BYTES, CHUNK, PASSIVE, SERVE, UNIPROC, Cluster, Process, answers
from tests.faults.hosts import Hosts
from tests.kubernetes.chart import NAME, NAMESPACE, Manifest, container_of, one, pod_of, rendered

_MOUNTS = 'mount --bind "$0" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def values(model: Path, revision: str) -> dict[str, Any]:
    """Values of the chart for a tiny model on CPUs."""
    words = ["--distributed-executor-backend", UNIPROC, "--tetri-arena-bytes", str(ARENA_BYTES)]
    words += ["--tetri-chunk-size", str(CHUNK), "--tetri-transfer-timeout", "5"]
    env = {**PASSIVE, "OMP_NUM_THREADS": "1"}
    return {
        "model": str(model),
        "revision": revision,
        "router": {"flip": "off"},  # there is no API server, whose lease would be asked for
        "instances": {
            "gpus": 0,
            "args": [*SERVE, *words],
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "drainSeconds": 60,
        },
    }


class Pod(Process):
    """One pod of a component. `terminate` ends it as a kubelet does."""

    def __init__(
        self, manifests: list[Manifest], component: str, host: str, hosts: Hosts, folder: Path
    ) -> None:
        container = container_of(manifests, component)
        self.address = hosts.addresses[host]
        self.grace_s: float = pod_of(manifests, component)["terminationGracePeriodSeconds"]
        self._stop = container["lifecycle"]["preStop"]["exec"]["command"]
        self._ready = container["readinessProbe"]["httpGet"]["path"]
        self._within = (
            *hosts.within(host), "unshare", "--mount", "sh", "-c", _MOUNTS, str(folder / "hosts")
        )  # fmt: skip
        fields = {"metadata.name": f"{NAME}-{host}", "status.podIP": self.address}
        bin_folder = Path(sys.executable).parent
        own = _environment(container["env"], fields, one(manifests, "Secret", "")["data"])
        self._environment = {**os.environ, **own, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
        words = [_expand(each, own) for each in (*container["command"], *container["args"])]
        self.log = folder / f"{host}.log"
        with self.log.open("wb") as out:
            self.child = subprocess.Popen(
                [*self._within, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )

    def is_ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        return answers(f"http://{self.address}:8000{self._ready}")

    def terminate(self) -> tuple[int, int, float]:
        """Run the preStop hook, then send SIGTERM if it still runs: status of the hook and of the
        pod, and seconds that it took; TimeoutExpired if that is longer than the grace period."""
        begin_s = time.monotonic()
        hook = subprocess.run(
            [*self._within, *self._stop], env=self._environment, timeout=self.grace_s
        ).returncode
        if self.child.poll() is None:
            self.child.terminate()
        status = self.child.wait(max(0.0, begin_s + self.grace_s - time.monotonic()))
        return hook, status, time.monotonic() - begin_s


def _environment(
    entries: Iterable[dict[str, Any]], fields: dict[str, str], secret: dict[str, str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in entries:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = base64.b64decode(secret[source["secretKeyRef"]["key"]]).decode()
        else:
            value = _expand(each["value"], found)
        found[each["name"]] = value
    return found


def _expand(word: str, environment: dict[str, str]) -> str:
    """Replace ``$(NAME)`` as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda name: environment.get(name[1], name[0]), word)


class Release(Cluster):
    """An installed chart; `pods` are by the name of their host. Its secret is kept by upgrades."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder, self.pods = hosts, folder, dict[str, Pod]()
        self._secret: Manifest | None = None
        (folder / "hosts").touch()

    def upgrade(self, **values: Any) -> None:
        """Render the chart anew, for the pods that are started from now on."""
        self._manifests = rendered(**values)
        secret = one(self._manifests, "Secret", "")
        self._secret = self._secret or dict(secret)
        secret.update(self._secret)

    def start(self, component: str, host: str) -> Pod:
        """Start a pod of a component on a host."""
        made = Pod(self._manifests, component, host, self._hosts, self._folder)
        self.pods[host] = made
        self.publish()
        return made

    def publish(self) -> None:
        """Let both services of the chart stand for the routers that run, the newest first."""
        routers = [
            each.address
            for name, each in self.pods.items()
            if name.startswith("router") and each.child.poll() is None
        ]
        self.url = f"http://{routers[-1]}:8000"
        names = f"{NAME}.{NAMESPACE}.svc {NAME}-control.{NAMESPACE}.svc"
        lines = ["127.0.0.1 localhost", *(f"{each} {names}" for each in reversed(routers))]
        # In place: what is mounted is the file, not its name.
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def stop(self) -> int:
        for each in self.pods.values():
            each.stop()
        return 0
