"""Where an instance keeps what it learnt from one start to the next."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`${TETRI_CACHE}/KIND`, by default `~/.cache/vllm-tetri/KIND`; need not exist."""
    own = os.environ.get("TETRI_CACHE")
    if own:
        return Path(own) / kind
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "vllm-tetri" / kind


def replace_file(path: Path, content: bytes) -> None:
    """Write the file whole or not at all: another instance may read or write it.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
