"""Which of several routers decides on roles: the one that holds a lease.

A lease is asked with `hold`, which takes or keeps it and says by which epoch. Epochs only
grow from one holder to the next, and orders carry them, so that what a former holder sent
late is told from what the present one wants.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Protocol

from vllm_tetri.errors import ConfigError

_MOST_DIGITS = 20
_PRIVATE = 0o022  # what others must not do with its folder: write


class Lease(Protocol):
    """The right to decide on roles. Used on the event loop."""

    @property
    def why_not(self) -> str:
        """Why `hold` says None, in words for operators."""

    def hold(self) -> int | None:
        """Take or keep it: the epoch under which this router decides; None while another
        one does. To be asked before every decision. Never waits."""

    def close(self) -> None:
        """Decide no more, and let another router have it. Idempotent."""

    async def wait_closed(self) -> None:
        """Until that other one can have it, or for some seconds."""


class FileLease:
    """A lease among the routers of one host: who has locked a file has it.

    The kernel gives the lock back when its holder ends, however it ends. A holder that is
    stopped but lives keeps it; nobody watches then. Owner: the event loop; nothing waits.

    Args:
        path: The file; made when it is not there, and left there.

    Raises:
        ConfigError: It cannot be made, is somebody else's, or others may write to its folder.
    """

    why_not = "another router watches: it holds the lease"

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._epoch = 0
        _require_private(Path(path).absolute().parent)
        self._reopen()

    def hold(self) -> int | None:
        try:
            if self._is_replaced():
                self._reopen()
            if self._epoch == 0:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._epoch = self._next_epoch()
        except (OSError, ConfigError):  # another one has locked it, or the file is unusable now
            return None
        return self._epoch

    def close(self) -> None:
        self._epoch = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    async def wait_closed(self) -> None:
        """At once."""

    def _reopen(self) -> None:
        self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"--flip-lease {self._path}: {error.strerror}") from error
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            self.close()
            raise ConfigError(f"--flip-lease {self._path}: it is not a file of this user")

    def _is_replaced(self) -> bool:
        """Whether the file that others find by this name is another one."""
        if self._file < 0:
            return True
        with contextlib.suppress(FileNotFoundError):
            return not os.path.samestat(Path(self._path).stat(), os.fstat(self._file))
        return True

    def _next_epoch(self) -> int:
        """One that no holder before had. The time counts too, for when the file was lost."""
        text = os.pread(self._file, _MOST_DIGITS, 0)
        last = int(text) if text.isdigit() else 0
        epoch = max(last + 1, int(time.time()))
        os.pwrite(self._file, b"%020d" % epoch, 0)
        return epoch


def _require_private(folder: Path) -> None:
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"--flip-lease: folder {folder}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & _PRIVATE:
        raise ConfigError(
            f"--flip-lease: folder {folder} is not this user's alone; make one: "
            "`mkdir -m 700 FOLDER`"
        )
