"""Processes of the suites: pytest in other projects' sources, and one server for several suites."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit
from xml.etree import ElementTree

from tests.e2e.cluster import Process, answers
from tests.suites import catalogue
from tests.suites.gate import PASSED
from vllm_tetri.launch.machine import free_port

TEST_S = 120  # longest time of one test, without the start of its server
SUITE_S = 1800


@dataclass(frozen=True, slots=True)
class Place:
    """Where sources, tools and models of the suites are, and what `vllm serve` starts."""

    cache: Path
    hub: Path
    target: str  # stock or split

    @property
    def logs(self) -> Path:
        folder = self.cache / "logs" / self.target
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def python(self) -> Path:
        """The interpreter that has the tests' requirements beside this environment's packages."""
        return self.cache / "venv" / "bin" / "python"

    def variables(self, **more: str) -> dict[str, str]:
        """Variables with which a child finds the shim and the models."""
        return {
            "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
            "SUITES_TARGET": self.target,
            "HF_HUB_CACHE": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "TETRI_CACHE": str(self.cache / "learnt"),
            # Two instances and their tests share few cores: threads that wait must not spin.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            **more,
        }

    @property
    def commands(self) -> Path:
        """The folder with the shim, first in PATH."""
        folder = self.cache / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        shim = folder / "vllm"
        if not shim.exists():
            script = Path(__file__).parent / "shim.py"
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{script}" "$@"\n')
            shim.chmod(0o755)
        return folder


def run_pytest(
    place: Place,
    suite: str,
    project: str,
    tests: list[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    keyword: str = "",
) -> dict[str, str]:
    """Outcomes of tests, or of all tests of files, below a project's tests/.

    Raises:
        RuntimeError: Nothing was run.
    """
    report, log = place.logs / f"{suite}.xml", place.logs / f"{suite}.log"
    report.unlink(missing_ok=True)
    chosen = place.logs / f"{suite}.txt"
    chosen.write_text("".join(f"tests/{each}\n" for each in tests))
    words = [
        str(place.python), "-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
        "--timeout", str(TEST_S), "-o", "timeout_func_only=true",
        "-o", "junit_family=xunit1", "--junitxml", str(report),
        *(f"--deselect=tests/{each}" for each in catalogue.TOO_LONG), "-k", keyword, f"@{chosen}",
    ]  # fmt: skip
    run(words, log, SUITE_S, place.variables(**variables), place.cache / "src" / project)
    found = dict(
        map(_outcome, ElementTree.parse(report).iter("testcase")) if report.exists() else ()
    )
    if not found:
        raise RuntimeError(f"no test of {suite} ran; see {log}")
    return found


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    file = case.attrib.get("file") or case.attrib["classname"]
    module = file.removesuffix(".py").replace("/", ".")
    inner = case.attrib["classname"].removeprefix(module).strip(".")
    test = "::".join(filter(None, (file.removeprefix("tests/"), inner, case.attrib["name"])))
    wrong = next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "")
    return test, wrong or PASSED


def run(
    words: list[str], log: Path, limit_s: float, variables: dict[str, str], cwd: Path | None = None
) -> int:
    """The exit status of a command, 124 when it was ended at its limit, with all its children."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            cwd=cwd,
            start_new_session=True,
        )
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)


class Server(Process):
    """`vllm serve` through the shim, for suites that bring no server of their own."""

    def __init__(self, place: Place) -> None:
        self.port = self.prefill = self.decode = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_file = place.logs / "ready.json"
        self._ready_file.unlink(missing_ok=True)
        words = ["tests.suites.shim", "serve", catalogue.MODEL, "--port", str(self.port)]
        variables = place.variables(SUITES_READY_FILE=str(self._ready_file), **catalogue.VARIABLES)
        super().__init__([*words, *catalogue.SERVER], place.logs / "server.log", **variables)
        try:
            self._until_ready(place.target == "stock")
        except BaseException:
            self.stop()
            raise

    def _until_ready(self, is_stock: bool) -> None:
        if is_stock:
            self.wait_for(lambda: answers(f"{self.url}/health"), "stock vLLM")
            return
        self.wait_for(self._ready_file.exists, "the cluster")
        facts = json.loads(self._ready_file.read_text())
        ports = {each["id"]: urlsplit(each["url"]).port for each in facts["instances"]}
        self.prefill, self.decode = ports["prefill-0"], ports["decode-0"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
