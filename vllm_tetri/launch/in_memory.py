"""Files for children that nobody else can open, and that nobody has to remove."""

from __future__ import annotations

import os


def in_memory(name: str, content: str = "") -> str:
    """Make a file in memory, readable and writable for this user only.

    It has a path below /proc and is gone with this process, however that ends.

    Args:
        name: What `ls -l /proc/PID/fd` shows.

    Returns:
        Its path.
    """
    descriptor = os.memfd_create(name)  # open as long as this process lives
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
