"""What `pip install` puts on a machine, and that it starts from any folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.eventually import eventually
from vllm_tetri import __version__

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SMALL = ["--enforce-eager", "--dtype=float32", "--max-model-len=512",
         "--kv-cache-memory-bytes=16M", "--tetri-arena-bytes=16M"]  # fmt: skip


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    output: str = done.stdout
    return output


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would carry, so that nothing built here sneaks in."""
    folder = tmp_path_factory.mktemp("clone")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a copy, since a build leaves files in its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    run("cp", "-r", str(clone), str(folder / "source"))
    run(*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder),
        str(folder / "source"))  # fmt: skip
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own; dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    run(*PIP, "install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_has_the_package_its_command_and_its_plugin(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    info = f"vllm_tetri-{__version__}.dist-info"
    entries = archive.read(f"{info}/entry_points.txt").decode()
    assert any(name.startswith("vllm_tetri/transport/_core.cpython") for name in names)
    assert {"vllm_tetri/transport/_core.pyi", "vllm_tetri/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "csrc/"))]
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
@pytest.mark.parametrize(
    "place", ["an empty folder", pytest.param("a clone", marks=pytest.mark.long)]
)
def test_the_installed_package_starts_from(
    place: str, installed: Path, clone: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    """A clone holds a package without its extension, which no process may import."""
    folder = clone if place == "a clone" else tmp_path
    ready = tmp_path / "ready.json"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = str(installed / "bin" / "vllm-tetri")
    version = run(command, "--version", cwd=folder, env=environment)
    assert version == f"vllm-tetri {__version__}\n"
    assert "FAIL" not in run(command, "doctor", cwd=folder, env=environment)
    words = ["--mode=split", "--placement=shared-cores", "--port=0", f"--ready-file={ready}"]
    up = subprocess.Popen(
        [command, "up", str(tiny_llama), *words, "--", *SMALL, "--served-model-name=tiny"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        eventually(lambda: ready.exists() or up.poll() is not None, timeout_s=240)
        if up.poll() is None:
            url = json.loads(ready.read_text())["url"]
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
            asked = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=60) as response:
                assert response.status == 200
    finally:
        up.send_signal(signal.SIGINT)
        output, _ = up.communicate(timeout=60)
    assert up.returncode == 0, output


def test_set_up_script_and_build_system_agree() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    script = (ROOT / ".ci" / "install").read_text()
    assert [name for name in build if name.split(">")[0] not in script] == []


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, vllm_tetri.cli\n"
        "heavy = {'vllm', 'torch', 'zmq', 'numpy', 'aiohttp', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    run(sys.executable, "-c", program, cwd=ROOT, timeout=60)
