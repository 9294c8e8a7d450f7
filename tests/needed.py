"""What some tests need and a user's machine may lack: skipped by name there, an error in CI."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from typing import Any, NoReturn

import pytest


def needed(module: str) -> Any:
    """Import a module, or give up the tests of the calling file."""
    try:
        return importlib.import_module(module)
    except ImportError:
        lacking(f"the Python package of {module}", "run .ci/install")


def require_command(command: str, package: str) -> None:
    """Give up the calling test, or the tests of the calling file, without a command."""
    if shutil.which(command) is None:
        lacking(f"the command {command}", f"apt-get install {package}")


def shared_memory_of(size: str) -> tuple[str, ...]:
    """What a command begins with that is to see a ``/dev/shm`` of this size, as containers do; it
    keeps its process id. The calling test is given up where that cannot be."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", mount, "sh")
    require_command("unshare", "util-linux")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode != 0:
        lacking("mount namespaces", "run as root on Linux, in a privileged container")
    return within


def lacking(thing: str, advice: str) -> NoReturn:
    """Skip with this reason, or fail if `CI` is set: there everything is installed."""
    reason = f"needs {thing}: {advice}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
