"""What tests of installation share: a copy of the sources, and environments beside vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str, timeout: float | None = None, **options: object) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    output: str = done.stdout
    return output


def copy_sources(folder: Path) -> None:
    """Copy what git would carry, so that nothing built here sneaks in."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def make_environment(folder: Path, *, has_vllm: bool) -> None:
    """Make a virtual environment, with the packages of this one in reach if `has_vllm`.

    This project is none of them: a folder that a `.pth` file names has its own `.pth` files
    ignored, among them that of the editable installation.
    """
    run(sys.executable, "-m", "venv", str(folder))
    if has_vllm:
        packages = run(
            str(folder / "bin/python"), "-c", "import site; print(*site.getsitepackages())"
        )
        Path(packages.strip(), "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")


def clean_environment(**more: str) -> Mapping[str, str]:
    """Return environment variables without those that show Python other packages."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VENV")}
    return {**kept, **more}
