"""What `make dist` makes, and that it works where it is installed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.eventually import eventually
from tests.installing import ROOT, clean_environment, copy_sources, make_environment, run
from tests.needed import needed
from vllm_tetri import __version__

VERSION = "{}.{}".format(*sys.version_info)
SMALL = ["--enforce-eager", "--dtype=float32", "--max-model-len=512",
         "--kv-cache-memory-bytes=16M", "--tetri-arena-bytes=16M"]  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without anything that was built."""
    folder = tmp_path_factory.mktemp("clone")
    copy_sources(folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and of a wheel for this Python, built in a copy."""
    needed("auditwheel")
    folder = tmp_path_factory.mktemp("built")
    copy_sources(folder)
    run(".ci/dist", VERSION, cwd=folder, env=clean_environment(VENV=sys.prefix))
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment of its own, beside vLLM, into which pip put the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    make_environment(folder, has_vllm=True)
    run(str(folder / "bin/python"), "-m", "pip", "install", "--no-index", str(wheel),
        env=clean_environment())  # fmt: skip
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_has_the_package_its_command_and_its_plugin(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    info = f"vllm_tetri-{__version__}.dist-info"
    entries = archive.read(f"{info}/entry_points.txt").decode()
    for core in ("vllm_tetri/transport/_core", "vllm_tetri/router/_core"):
        assert any(name.startswith(f"{core}.cpython") for name in names)
        assert f"{core}.pyi" in names
    assert "vllm_tetri/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"vllm_tetri", info}
    assert "vllm-tetri = vllm_tetri.cli:main" in entries
    assert "tetri = vllm_tetri.engine.plugin:register" in entries
    required = [
        line
        for line in archive.read(f"{info}/METADATA").decode().splitlines()
        if line.startswith("Requires-Dist: vllm") and "extra ==" not in line
    ]
    assert required == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_needs_the_c_library_of_its_tag_and_no_other_libraries(wheel: Path) -> None:
    """auditwheel copies what no system has, CUDA for one, into `vllm_tetri.libs`: see above."""
    assert "-manylinux_" in wheel.name
    shown = run(str(Path(sys.prefix, "bin/auditwheel")), "show", str(wheel))
    needed = {word.partition(".so")[0] for word in shown.split() if ".so" in word}
    assert needed <= {"libc", "libgcc_s", "libm", "libpthread", "libstdc++"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_sdist_has_what_builds_and_tests_it(built: Path, clone: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {str(path.relative_to(clone)) for path in clone.rglob("*") if path.is_file()}
    assert {name for name in tracked - names if not name.startswith("bench/")} <= {".gitignore"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "place", ["an empty folder", pytest.param("a clone", marks=pytest.mark.long)]
)
def test_the_installed_package_serves_from(
    place: str, installed: Path, clone: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """A clone holds a package without its extension, which no process may import."""
    folder = clone if place == "a clone" else tmp_path
    environment = clean_environment()
    command = str(installed / "vllm-tetri")
    where = [str(installed / "python"), "-Pc", "import vllm_tetri; print(vllm_tetri.__file__)"]
    found = Path(run(*where, cwd=folder, env=environment).strip())
    assert found.is_relative_to(installed.parent)
    version = run(command, "--version", cwd=folder, env=environment)
    assert version == f"vllm-tetri {__version__}\n"
    assert "FAIL" not in run(command, "doctor", cwd=folder, env=environment)
    with up([command, "up", str(tiny_llama)], tmp_path, cwd=folder, env=environment) as url:
        asked = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 3
        run(*health_check(url), env=environment)
    with pytest.raises(AssertionError, match="refused"):
        run(*health_check(url), env=environment)


@contextmanager
def up(words: list[str], folder: Path, **options: Any) -> Iterator[str]:
    """URL of a cluster that Ctrl-C ends, which must leave nothing."""
    ready = folder / "ready.json"
    words = [*words, "--mode=split", "--placement=shared-cores", "--port=0"]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            [*words, f"--ready-file={ready}", "--", *SMALL, "--served-model-name=tiny"],
            stdout=log, stderr=subprocess.STDOUT, **options,
        )  # fmt: skip
    started, arenas = [], set()
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, timeout_s=240)
        assert process.poll() is None, (folder / "up.log").read_text()[-4000:]
        started = psutil.Process(process.pid).children(recursive=True)
        arenas = {
            Path(each.path)
            for child in started
            for each in child.memory_maps()
            if each.path.startswith("/dev/shm/tetri-")
        }
        assert started
        assert arenas
        yield json.loads(ready.read_text())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=60)
    assert status == 0, (folder / "up.log").read_text()[-4000:]
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert not [path for path in arenas if path.exists()]
    assert not ready.exists()


def health_check(url: str) -> list[str]:
    """The command of the container's health check, for a router at this URL."""
    text = (ROOT / "examples/docker/Dockerfile").read_text()
    command: list[str] = json.loads(
        text.partition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0]
    )
    return [word.replace("http://127.0.0.1:8000", url) for word in command]


def test_set_up_script_and_build_system_agree() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    script = (ROOT / ".ci" / "install").read_text()
    line = next(line for line in script.splitlines() if "pip install" in line and "mypy" in line)
    words = shlex.split(line)
    assert [name for name in build if not any(word.startswith(name) for word in words)] == []


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, vllm_tetri.cli\n"
        "heavy = {'vllm', 'torch', 'zmq', 'numpy', 'aiohttp', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    run(sys.executable, "-c", program, cwd=ROOT, timeout=60)
