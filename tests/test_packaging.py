"""What `pip install` puts on a machine."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from vllm_tetri import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy of what git would carry, so that nothing built here sneaks in.
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    done = subprocess.run(
        [*build, "-w", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_holds_the_extension_its_stub_and_the_marker(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()

    assert any(name.startswith("vllm_tetri/transport/_core.cpython") for name in names)
    assert "vllm_tetri/transport/_core.pyi" in names
    assert "vllm_tetri/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "csrc/"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_brings_command_and_plugin_but_not_vllm(wheel: zipfile.ZipFile) -> None:
    info = f"vllm_tetri-{__version__}.dist-info"
    entries = wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()

    assert "vllm-tetri = vllm_tetri.cli:main" in entries
    assert "tetri = vllm_tetri.engine.plugin:register" in entries
    assert "Requires-Dist: vllm" not in metadata


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
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
