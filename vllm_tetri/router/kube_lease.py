"""The lease of routers on several hosts: a Lease object of Kubernetes.

Needs kubernetes-asyncio, which the extra `[kubernetes]` brings. The rules of leader election
are in policy/leadership.py, which is stricter than the library's own.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

import aiohttp
import msgspec
from kubernetes_asyncio import client, config

from vllm_tetri.errors import ConfigError, TetriError
from vllm_tetri.policy.leadership import Candidate, LeaseStep, Record

DURATION_S = 15.0
END_S = 3.0  # a lease that is not given back by then expires
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_RETRY_SHARE = 1 / 10  # of the duration
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MISSING, _CONFLICT = 404, 409
_HINTS = {
    401: "; the API server does not accept the token of the service account",
    403: "; the service account needs the Role of docs/operations.md: the verbs get, create and "
    "update on leases of coordination.k8s.io",
}
# What the library raises on bodies that are no Lease.
_MALFORMED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)

_log = logging.getLogger(__name__)


class LeaseError(TetriError):
    """The API server did not do what was asked, as far as is known. `status`: 0 without a usable
    response, 409 if another router changed the Lease first."""

    def __init__(self, words: str, status: int = 0) -> None:
        super().__init__(words)
        self.status = status


class LeaseObject:
    """Reads and writes one Lease, with a connection for each request. Owner: the event loop.

    Other contents of the object, such as labels, stay as they are. Token and certificate in
    `account` are read again for every request, as the kubelet renews them.

    Raises:
        ConfigError: This is no pod with a service account, or the name is invalid.
    """

    def __init__(self, name: str, *, account: Path = ACCOUNT, timeout_s: float = 2.5) -> None:
        option = f"--flip-lease kubernetes:{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{option}: {name!r} is not a valid name of a Lease: use 1 to 63 of a-z, 0-9 and "
                "-, with a letter or digit first and last"
            )
        self._account = account
        self._timeout_s = timeout_s
        self._newest = client.V1Lease("coordination.k8s.io/v1", "Lease")
        try:
            ssl.create_default_context(cafile=self._configuration().ssl_ca_cert)
            self._namespace = (account / "namespace").read_text().strip()
            if not _NAME.fullmatch(self._namespace):
                raise ValueError(f"{account / 'namespace'} holds no name of a namespace")
        except (config.ConfigException, OSError, ValueError) as error:
            raise ConfigError(
                f"{option}: this is not a pod with a service account ({error}). In a pod, set "
                "automountServiceAccountToken; routers of one host share --flip-lease FILE instead"
            ) from error
        self._metadata = client.V1ObjectMeta(name=name, namespace=self._namespace)

    def __str__(self) -> str:
        return f"lease {self._namespace}/{self._metadata.name}"

    async def read(self) -> Record | None:
        """Return the lease, None if there is none; raises LeaseError."""
        try:
            return await self._call("read", self._metadata.name, self._namespace)
        except LeaseError as error:
            if error.status == _MISSING:
                return None
            raise

    async def write(self, candidate: Candidate, num_changes: int, holder: str) -> Record:
        """Create the lease, or replace the one that was read last; raises LeaseError."""
        lease, is_new = self._newest, candidate.record is None
        if is_new:
            lease = client.V1Lease("coordination.k8s.io/v1", "Lease", self._metadata)
        spec = lease.spec = lease.spec or client.V1LeaseSpec()
        # The API wants six decimals of a second, and isoformat() omits those of 0.
        now = datetime.now(UTC)
        now = now.replace(microsecond=max(1, now.microsecond))
        if holder and holder != spec.holder_identity:
            spec.acquire_time = now
        spec.holder_identity = holder
        spec.lease_duration_seconds = ceil(candidate.duration_s)
        spec.lease_transitions = num_changes
        spec.renew_time = now  # for people and their tools; this program does not compare it
        if is_new:
            return await self._call("create", self._namespace, lease)
        return await self._call("replace", self._metadata.name, self._namespace, lease)

    async def _call(self, verb: str, *args: object) -> Record:
        try:
            async with client.ApiClient(self._configuration()) as connection:
                call = getattr(client.CoordinationV1Api(connection), f"{verb}_namespaced_lease")
                return self._record(await call(*args, _request_timeout=self._timeout_s))
        except client.ApiException as error:
            status = int(error.status)
            words = f"cannot {verb} it: HTTP {status}: {_message(error.body)}"
            is_lost = verb == "replace" and status == _MISSING
            code = _CONFLICT if is_lost else status
            raise LeaseError(words + _HINTS.get(status, ""), code) from error
        except TimeoutError as error:
            raise LeaseError(f"cannot {verb} it: no response in {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, config.ConfigException) as error:
            raise LeaseError(f"cannot {verb} it: {error}") from error
        except _MALFORMED as error:
            raise LeaseError(f"the API server did not return a Lease: {error}") from error

    def _configuration(self) -> client.Configuration:
        configuration = client.Configuration()
        config.load_incluster_config(
            client_configuration=configuration,
            try_refresh_token=False,
            token_filename=str(self._account / "token"),
            cert_filename=str(self._account / "ca.crt"),
        )
        return configuration

    def _record(self, lease: client.V1Lease) -> Record:
        spec, metadata = lease.spec or client.V1LeaseSpec(), lease.metadata
        record = Record(
            version=metadata.resource_version,
            holder=spec.holder_identity or "",
            made_s=int(metadata.creation_timestamp.timestamp()),
            num_changes=spec.lease_transitions or 0,
            duration_s=float(spec.lease_duration_seconds or 0),
        )
        if not record.version or min(record.made_s - 1, record.num_changes, record.duration_s) < 0:
            raise ValueError(f"it has impossible values: {record}")
        self._newest = lease
        return record


def _message(body: object) -> str:
    """Return what the API server says about a failure, on one line."""
    try:
        words = str(msgspec.json.decode(str(body))["message"])
    except (msgspec.MsgspecError, *_MALFORMED):
        words = str(body)
    return " ".join(words.split())[:200]


def _uptime() -> float:
    """Return seconds that also count while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KubeLease:
    """A `Lease` in the sense of router/flips.py, by the rules of policy/leadership.

    A task talks to the API server. It runs while `hold` is called; if it is not called for one
    duration, the lease is given back. Owner: the event loop.

    Args:
        clock: Counts seconds; by default also those in which the machine is suspended.
        sleep: Waits for a number of them.
    """

    def __init__(
        self,
        lease: LeaseObject,
        *,
        clock: Callable[[], float] = _uptime,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lease, self._clock, self._sleep = lease, clock, sleep
        self._candidate = Candidate(f"{socket.gethostname()}_{secrets.token_hex(8)}", DURATION_S)
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Future[None] | None = None
        self._is_ending = self._is_closed = False
        self._asked_s = clock()
        self._problem = ""
        self._logged: set[int] = set()
        self._logged_epoch: int | None = None

    @property
    def why_not(self) -> str:
        """Why `hold` returns None."""
        record = self._candidate.record
        if self._problem:
            return f"this router does not flip roles: {self._lease}: {self._problem}"
        if record is None or record.holder in ("", self._candidate.name):
            return f"this router does not flip roles yet: it is about to take {self._lease}"
        return f"another router flips roles: {record.holder} holds {self._lease}"

    @property
    def is_running(self) -> bool:
        """Whether the task that talks to the API server is running."""
        return self._task is not None

    def hold(self) -> int | None:
        self._asked_s = self._clock()
        if self._is_ending:
            return None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._candidate.epoch(self._asked_s)

    def close(self) -> None:
        self._is_closed = self._is_ending = True
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=END_S)
            for task in late:
                task.cancel()
                await asyncio.wait({task})

    async def _run(self) -> None:
        while not self._is_ending:
            pause_s = _RETRY_SHARE * DURATION_S
            try:
                pause_s = await self._turn()
                if pause_s > 0:  # else it has read the lease and is about to write it
                    self._record_success()
            except Exception as error:
                self._record_problem(error)
            self._log_change()
            if self._clock() - self._asked_s > DURATION_S:
                self._is_ending = True  # the watcher does not ask any more
            if not self._is_ending:
                self._pause = asyncio.ensure_future(self._sleep(pause_s))
                await asyncio.wait({self._pause})
        self._candidate.resign()
        self._log_change()
        try:
            await self._give_back()
        except Exception as error:
            self._candidate.on_error()
            _log.info("%s: not given back, it expires instead: %s", self._lease, error)
        self._task = None
        self._is_ending = self._is_closed

    async def _turn(self) -> float:
        """Take the next step of the election; returns seconds until the one after it."""
        candidate, sent_s = self._candidate, self._clock()
        step, record = candidate.step(sent_s), candidate.record
        if step is LeaseStep.READ:
            candidate.on_read(await self._lease.read(), self._clock())
        elif step is not LeaseStep.WAIT:
            changes = 0 if record is None else record.num_changes + (step is LeaseStep.TAKE)
            written = await self._lease.write(candidate, changes, candidate.name)
            candidate.on_written(written, sent_s, self._clock())
        return candidate.pause_s(self._clock())

    async def _give_back(self) -> None:
        """Give the lease back with at most two requests, each with its deadline."""
        candidate = self._candidate
        if candidate.step(self._clock()) is LeaseStep.READ:
            candidate.on_read(await self._lease.read(), self._clock())
        if candidate.record is not None and candidate.may_give_back(self._clock()):
            changes = candidate.record.num_changes + 1
            candidate.on_read(await self._lease.write(candidate, changes, ""), self._clock())

    def _record_problem(self, error: Exception) -> None:
        """Log each kind of problem once; that another router was first is none."""
        self._candidate.on_error()
        if not isinstance(error, LeaseError):
            _log.error("--flip-lease: %s: failed, will retry", self._lease, exc_info=error)
        elif error.status != _CONFLICT:
            if error.status not in self._logged:
                _log.warning("--flip-lease: %s: %s", self._lease, error)
            self._logged.add(error.status)
            self._problem = str(error)

    def _record_success(self) -> None:
        if self._logged:
            _log.info("--flip-lease: %s: the API server can be used again", self._lease)
        self._logged.clear()
        self._problem = ""

    def _log_change(self) -> None:
        epoch = self._candidate.epoch(self._clock())
        if epoch != self._logged_epoch:
            words = "flips roles" if epoch is not None else "flips roles no more"
            _log.info(
                "%s: this router %s (epoch %s)", self._lease, words, epoch or self._logged_epoch
            )
        self._logged_epoch = epoch
