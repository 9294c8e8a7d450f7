"""Receive arenas in shared memory: how large one may be, and those whose owner is gone.

An owner holds a lock on its arena's file while it lives, and removes the file when it ends in
good order. A file that can be locked has no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"tetri-[0-9a-f]{32}")  # as the core makes them
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
# An arena holds two prompts of the longest kind, so that one arrives while another waits for its
# decode instance; with short windows as much as lets many prompts wait.
_PROMPTS = 2
LEAST_BYTES, LEAST_CUDA_BYTES = 256 << 20, 1 << 30
# Parts of what is free that one arena takes at most: instances that start later need room, too.
SHARED_PART, MEMORY_PART = 4, 8


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """The size of a receive arena, in whole KV blocks; 0 if not one fits. ``limit`` names what
    keeps it from being larger, if anything does."""

    num_bytes: int
    limit: str = ""


def arena_size(
    block_bytes: int, prompt_blocks: int, least_bytes: int, bounds: Mapping[str, int]
) -> ArenaSize:
    """Size an arena for prompts of up to `prompt_blocks` blocks; `bounds` are bytes by name."""
    wanted = max(least_bytes, _PROMPTS * prompt_blocks * block_bytes)
    limit, most = min(bounds.items(), key=itemgetter(1))
    num_bytes = min(wanted, most) // block_bytes * block_bytes
    return ArenaSize(num_bytes, limit if most < wanted else "")


def arena_bounds(
    available_bytes: int, shared: Path = SHARED_MEMORY, limit: Path = MEMORY_LIMIT
) -> dict[str, int]:
    """Return the most bytes of one arena by what bounds it: this host's /dev/shm, and its available
    memory or the limit of this container."""
    free_bytes = shutil.disk_usage(shared).free if os.access(shared, os.W_OK) else 0
    with contextlib.suppress(OSError, ValueError):  # no file; or without a limit, "max"
        available_bytes = min(available_bytes, int(limit.read_text()))
    return {
        f"1/{SHARED_PART} of the free /dev/shm": free_bytes // SHARED_PART,
        f"1/{MEMORY_PART} of the memory": available_bytes // MEMORY_PART,
    }


def map_memory(num_bytes: int, folder: str) -> mmap.mmap:
    """Map host memory, or a file without a name in a folder, which goes with this process. OSError
    if there is not as much, or the folder cannot be written."""
    if not folder:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return mmap.mmap(-1, num_bytes, flags=flags)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def require_memory(
    num_bytes: int, folder: str, available_bytes: int, limit: Path = MEMORY_LIMIT
) -> None:
    """Raise an OSError if `map_memory` would, or memory is short; nothing stays allocated."""
    if folder:
        tempfile.TemporaryFile(dir=folder).close()
        free_bytes, where = shutil.disk_usage(folder).free, folder
    else:
        free_bytes, where = available_bytes, "memory"
        with contextlib.suppress(OSError, ValueError):  # no file; or without a limit, "max"
            free_bytes = min(free_bytes, int(limit.read_text()))
    if free_bytes < num_bytes:
        raise OSError(f"{where} has {free_bytes / (1 << 30):.1f} GiB left")


def abandoned_segments(folder: Path = SHARED_MEMORY, *, remove: bool = False) -> list[Path]:
    """Find arenas of this user that no process owns any more, and remove them if wanted."""
    found = []
    for path in sorted(each for each in folder.glob("tetri-*") if _NAME.fullmatch(each.name)):
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
