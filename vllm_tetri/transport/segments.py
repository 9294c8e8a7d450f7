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


def abandoned_segments(folder: Path = SHARED_MEMORY, *, remove: bool = False) -> list[Path]:
    """Find arenas of this user that no process owns any more, and remove them if wanted."""
    found = []
    for path in sorted(folder.glob(PREFIX + "*")):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                path.unlink(missing_ok=True)
            found.append(path)
    return found


def sweep_segments(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the abandoned arenas of this user and return their paths."""
    return abandoned_segments(folder, remove=True)
