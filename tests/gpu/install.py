"""Installs what `tests/gpu/pack.py` prepared into a folder, without a network. Standard library
only, and pip."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def install(root: Path, scratch: Path) -> str | None:
    """Install the parts below `root/.gpu` into `scratch`, and return that folder for PYTHONPATH;
    None where this Python has vLLM, or nothing was prepared. A second call adds parts that are new.

    Raises:
        ValueError: A file is not the one that was packed.
        OSError: This package's core could not be built.
    """
    parts = sorted((root / ".gpu").glob("?/manifest.json"))
    if importlib.util.find_spec("vllm") is not None or not parts:
        return None
    scratch.mkdir(parents=True, exist_ok=True)
    for manifest in parts:
        done = scratch / f".part-{manifest.parent.name}"
        if done.exists() and done.read_text() == manifest.read_text():
            continue
        print(f"installing {manifest.parent} into {scratch}", flush=True)
        for name, digest in json.loads(manifest.read_text()).items():
            _unpack(manifest.parent / name, digest, scratch)
        done.write_text(manifest.read_text())
    if not (scratch / "vllm_tetri").exists():
        _build(root, scratch)
    return str(scratch)


def _unpack(file: Path, digest: str, scratch: Path) -> None:
    """Unpack a wheel (commands that one brings stay in its data folder), or a part of one."""
    if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise ValueError(f"{file} is not the file that was packed; run tests/gpu/pack again")
    if file.name.endswith(".tar.xz"):
        with tarfile.open(file) as packed:
            packed.extractall(scratch, filter="data")
        return
    with zipfile.ZipFile(file) as archive:
        archive.extractall(scratch)


def _build(root: Path, scratch: Path) -> None:
    """Build this package from a copy of the tree, because a build writes beside the sources."""
    tree = scratch / ".tree"
    ignored = shutil.ignore_patterns(".*", "build", "results", "*.so", "__pycache__")
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(root, tree, ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet",
               "--no-build-isolation", "--target", str(scratch), str(tree)]  # fmt: skip
    path = {"PYTHONPATH": str(scratch), "PATH": f"{scratch / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    shutil.rmtree(tree)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise OSError("this package does not build here (it needs g++, cmake and ninja); see above")
