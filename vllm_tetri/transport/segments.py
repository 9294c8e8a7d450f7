"""Receive arenas in shared memory whose owner is gone.

An owner holds a lock on its arena's file while it lives, and removes the file when it ends in
good order. A file that can be locked has no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "tetri-"


def abandoned_segments(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Find arenas of this user that no process owns any more."""
    return [path for path in _ours(folder) if _try(path, remove=False)]


def sweep_segments(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the abandoned arenas of this user and return their paths."""
    return [path for path in _ours(folder) if _try(path, remove=True)]


def _ours(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob(PREFIX + "*")):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                found.append(path)
    return found


def _try(path: Path, *, remove: bool) -> bool:
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True
