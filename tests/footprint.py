"""What this process holds of the kernel's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """Open files and threads."""

    files: int
    threads: int

    def fits(self, before: Footprint) -> bool:
        """Whether nothing is held that was not held before; what others held may have ended."""
        return self.files <= before.files and self.threads <= before.threads


def footprint() -> Footprint:
    return Footprint(*(len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")))
