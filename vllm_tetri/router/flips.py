"""Orders to flip, those of operators and of the watcher, and the lease of the one router whose
watcher may order.

`hold` takes or keeps the lease without waiting, and returns its epoch, None while another router
has it. Epochs only grow from one holder to the next, and orders carry them, so that instances
ignore what a former holder sent late. `close` gives the lease back, in some seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.errors import ConfigError
from vllm_tetri.messages import FlipRole
from vllm_tetri.policy.role import why_needed
from vllm_tetri.policy.scale import Change
from vllm_tetri.policy.watcher import Watcher
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.liveness import repeat
from vllm_tetri.types import (
    FLIP_DEADLINE_S,
    ClusterView,
    FlipStage,
    InstanceId,
    InstanceState,
    InstanceView,
    Role,
)

if TYPE_CHECKING:
    from vllm_tetri.router.kube_lease import KubeLease

Lease: TypeAlias = "FileLease | KubeLease"
_LOOK_S = 0.25
_WATCHER = "watcher: "
_KUBERNETES = "kubernetes:"
_MOST_DIGITS = 20
_WRITABLE_BY_OTHERS = 0o022

_log = logging.getLogger(__name__)


class FileLease:
    """A lease among the routers of one host: the lock of a file.

    The kernel releases the lock when its holder ends, however it ends. A holder that is
    suspended keeps it, and no router flips roles then. Owner: the event loop; nothing waits.

    The file is created if missing, and never removed. Raises `ConfigError`: it cannot be created,
    belongs to another user, or other users may write to its folder.
    """

    why_not = "another router flips roles: it holds the lease"

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
        except (OSError, ConfigError):  # locked by another router, or unusable now
            return None
        return self._epoch

    async def close(self) -> None:
        self.release()

    def release(self) -> None:
        """Let another router have it until the next call of `hold`."""
        self._epoch = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _reopen(self) -> None:
        self.release()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"--flip-lease {self._path}: {error.strerror}") from error
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            self.release()
            raise ConfigError(f"--flip-lease {self._path}: it is not a file of this user")

    def _is_replaced(self) -> bool:
        """Return whether the path names another file by now, or none."""
        with contextlib.suppress(FileNotFoundError):
            if self._file >= 0:
                return not os.path.samestat(Path(self._path).stat(), os.fstat(self._file))
        return True

    def _next_epoch(self) -> int:
        """Return an epoch higher than all before: by the clock, in case the file was lost."""
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
    if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise ConfigError(
            f"--flip-lease: folder {folder} can be changed by other users; make a private one: "
            "`mkdir -m 700 FOLDER`"
        )


def lease_of(text: str | None) -> Lease | None:
    """Make the lease that `--flip-lease` names; ConfigError if it cannot be used here."""
    if not text:
        return None
    if text.startswith(_KUBERNETES):
        try:  # slow to import, and an extra
            from vllm_tetri.router.kube_lease import KubeLease
        except ImportError as error:
            raise ConfigError(
                f"--flip-lease {text} needs kubernetes-asyncio: "
                f"pip install '.[kubernetes]' in the clone ({error})"
            ) from error
        return KubeLease(text.removeprefix(_KUBERNETES))
    return FileLease(text)


class Flips:
    """Orders flips of this router's instances. Build it on a running event loop.

    Without a watcher only operators flip roles; if it `is_dry`, what it would do is only logged.
    Without a lease, which is closed with this object, the watcher is inactive as soon as instances
    have several routers; operators may order flips at any router.

    `explanation` tells operators why the watcher did what it did last, and `changes` which instance
    it wants more or less. `are_roles_needed` says
    whether requests are split by role: else the watcher is inactive, and any instance can take
    over from any other.
    """

    def __init__(
        self, monitor: Monitor, watcher: Watcher | None, *, is_dry: bool, lease: Lease | None
    ) -> None:
        self._lease, self._monitor, self._is_dry = lease, monitor, is_dry
        self._watcher = watcher
        self._logged: tuple[InstanceId, Role] | None = None
        self.are_roles_needed = True
        self.explanation = "off: roles change by order only"
        self.changes: tuple[Change, ...] = ()
        look = repeat("look of the watcher", self._look, _LOOK_S, is_on=watcher is not None)
        self._task = asyncio.get_running_loop().create_task(look)

    async def close(self) -> None:
        """Stop the watcher and give the lease back. Idempotent."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._lease is not None:
            await self._lease.close()

    def order(
        self, instance: InstanceId, order: FlipRole, *, force: bool = False
    ) -> tuple[bool, int]:
        """Order an instance to take a role; its current role cancels a flip under way. The epoch of
        the order is set here. Returns whether there was anything to do, and the epoch. Raises
        `Refusal`: 404 if there is no such instance; 409 if it cannot flip now, or the cluster needs
        it as it is and `force` is not set."""
        one = self._monitor.view_of(instance)
        if one is None:
            raise Refusal(404, f"there is no instance {instance!r}")
        if one.state is InstanceState.SILENT:
            raise Refusal(409, f"{instance} has stopped reporting and cannot flip")
        role, is_now, flip = order.role, order.is_now, one.flip
        under_way = flip.target if flip is not None and flip.is_under_way else None
        is_hurried = is_now and flip is not None and flip.stage is FlipStage.DRAINING
        if role is (under_way or one.info.role) and not is_hurried:
            return False, flip.epoch if flip else 0
        if role is not one.info.role:  # else it cancels the flip under way
            if under_way not in (None, role):
                hint = f"wait, or order {one.info.role} to cancel it"
                raise Refusal(409, f"{instance} is about to become {under_way}; {hint}")
            if under_way is None and one.state is not InstanceState.READY:
                raise Refusal(409, f"{instance} is {one.state} and cannot flip")
            view = self._monitor.view()
            why = self._why_needed(view, one, becomes=role)
            if why and not force:
                raise Refusal(409, f'{why}; {{"force": true}} flips it nevertheless')
            # If no other instance can take over while it drains, it does not drain.
            is_now = is_now or bool(self._why_needed(view, one))
        order = replace(order, is_now=is_now)
        return True, self._monitor.order_flip(instance, order)

    def _why_needed(self, view: ClusterView, one: InstanceView, becomes: Role | None = None) -> str:
        return why_needed(view, one, becomes=becomes, are_roles_needed=self.are_roles_needed)

    def _look(self) -> None:
        assert self._watcher is not None
        self.changes = ()
        if not self.are_roles_needed:
            self.explanation = "inactive: requests are not split by role in this mode"
            return
        view = self._monitor.view()
        lease = self._hold(view)
        if lease is None:
            return
        look = self._watcher.look(view, time.monotonic())
        self.explanation, self.changes, order = look.explanation, look.changes, look.order
        if order is None:
            return
        words = f"{order.instance} to {order.role}{' now' if order.now else ''}: {order.reason}"
        if self._is_dry:
            if (order.instance, order.role) != self._logged:
                _log.info("%swould flip %s", _WATCHER, words)
            self._logged = order.instance, order.role
            return
        try:
            reason = _WATCHER + order.reason
            self.order(
                order.instance, FlipRole(0, order.role, order.now, FLIP_DEADLINE_S, reason, lease)
            )
        except Refusal as refusal:
            _log.info("%scannot flip %s: %s", _WATCHER, words, refusal)
        else:
            _log.info("%sflips %s", _WATCHER, words)

    def _hold(self, view: ClusterView) -> int | None:
        """Return the epoch to decide under, 0 without a lease; None when this router must not."""
        if self._lease is not None:
            lease = self._lease.hold()
            if lease is None:
                self.explanation = self._lease.why_not
            return lease
        if any(each.info.num_routers > 1 for each in view.instances):
            self.explanation = (
                "inactive: instances have several routers, and this one has no --flip-lease"
            )
            return None
        return 0
