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
from functools import partial
from math import ceil
from pathlib import Path

import aiohttp
import msgspec
from kubernetes_asyncio import client, config

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.leadership import Candidate, Record

DURATION_S = 15.0
END_S = 3.0  # a lease that is not given back by then expires
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_RETRY_S = DURATION_S / 10
_TIMEOUT_S = 2.5
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MISSING, _CONFLICT = 404, 409
_BOOT_CLOCK = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
_HINTS = {
    401: "; the API server does not accept the token of the service account",
    403: "; the service account needs the Role of docs/operations.md: the verbs get, create and "
    "update on leases of coordination.k8s.io",
}

_log = logging.getLogger(__name__)


class KubeLease:
    """A `Lease` in the sense of router/flips.py, by the rules of policy/leadership.

    A task talks to the API server from the first `hold` on. Other contents of the object, such as
    labels, stay as they are. Owner: the event loop.

    Token and certificate in `account` are read again for every request, as the kubelet renews
    them. `clock` counts seconds, by default also those in which the machine is suspended. Raises
    `ConfigError`: this is no pod with a service account, or the name is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        account: Path = ACCOUNT,
        clock: Callable[[], float] = _BOOT_CLOCK,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        option = f"--flip-lease kubernetes:{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{option}: {name!r} is not a valid name of a Lease: use 1 to 63 of a-z, 0-9 and "
                "-, with a letter or digit first and last"
            )
        self._account, self._clock, self._sleep = account, clock, sleep
        try:
            ssl.create_default_context(cafile=self._configuration().ssl_ca_cert)
            namespace = (account / "namespace").read_text().strip()
            if not _NAME.fullmatch(namespace):
                raise ValueError(f"{account / 'namespace'} holds no name of a namespace")
        except (config.ConfigException, OSError, ValueError) as error:
            raise ConfigError(
                f"{option}: this is not a pod with a service account ({error}). In a pod, set "
                "automountServiceAccountToken; routers of one host share --flip-lease FILE instead"
            ) from error
        self._metadata = client.V1ObjectMeta(name=name, namespace=namespace)
        self._newest = client.V1Lease()
        self._candidate = Candidate(f"{socket.gethostname()}_{secrets.token_hex(8)}", DURATION_S)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._problem = ""
        self._logged_epoch: int | None = None

    def __str__(self) -> str:
        return f"lease {self._metadata.namespace}/{self._metadata.name}"

    @property
    def why_not(self) -> str:
        """Why `hold` returns None."""
        record = self._candidate.record
        if self._problem:
            return f"this router does not flip roles: {self}: {self._problem}"
        if record is None or record.holder in ("", self._candidate.name):
            return f"this router does not flip roles yet: it is about to take {self}"
        return f"another router flips roles: {record.holder} holds {self}"

    def hold(self) -> int | None:
        if self._is_closed:
            return None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._candidate.epoch(self._clock())

    async def close(self) -> None:
        self._is_closed = True
        task, self._task, candidate = self._task, None, self._candidate
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        candidate.resign()
        self._log_change()
        try:
            async with asyncio.timeout(END_S):
                candidate.on_read(await self._read(), self._clock())
                if candidate.record is not None and candidate.may_give_back(self._clock()):
                    await self._write(candidate.record.num_changes + 1, "")
        except Exception as error:
            _log.info("%s: not given back, it expires instead: %s", self, _words_of(error))

    async def _run(self) -> None:
        while True:
            pause_s, problem = _RETRY_S, ""
            try:
                pause_s = await self._turn()
            except Exception as error:
                problem = _words_of(error)
            if problem != self._problem:
                words = problem or "the API server can be used again"
                _log.warning("--flip-lease: %s: %s", self, words)
            self._problem = problem
            self._log_change()
            await self._sleep(pause_s)

    async def _turn(self) -> float:
        """Read the lease, and write it if that is due; returns seconds until the next turn."""
        candidate = self._candidate
        record = await self._read()
        candidate.on_read(record, self._clock())
        if candidate.may_write(sent_s := self._clock()):
            changes = record.num_changes + (record.holder != candidate.name) if record else 0
            try:
                written = await self._write(changes, candidate.name)
            except client.ApiException as error:
                is_gone = error.status == _MISSING and record is not None
                if error.status != _CONFLICT and not is_gone:
                    raise
                return _RETRY_S  # another router was first
            candidate.on_written(written, sent_s, self._clock())
        return candidate.pause_s(self._clock())

    async def _read(self) -> Record | None:
        try:
            return await self._call("read", self._metadata.name, self._metadata.namespace)
        except client.ApiException as error:
            if error.status == _MISSING:
                return None
            raise

    async def _write(self, num_changes: int, holder: str) -> Record:
        is_new = self._candidate.record is None
        lease, name, namespace = self._newest, self._metadata.name, self._metadata.namespace
        if is_new:
            lease = client.V1Lease("coordination.k8s.io/v1", "Lease", self._metadata)
        spec = lease.spec = lease.spec or client.V1LeaseSpec()
        # The API wants six decimals of a second, and isoformat() omits those of 0.
        now = datetime.now(UTC)
        now = now.replace(microsecond=max(1, now.microsecond))
        if holder and holder != spec.holder_identity:
            spec.acquire_time = now
        spec.holder_identity = holder
        spec.lease_duration_seconds = ceil(self._candidate.duration_s)
        spec.lease_transitions = num_changes
        spec.renew_time = now  # for people and their tools; this program does not compare it
        if is_new:
            return await self._call("create", namespace, lease)
        return await self._call("replace", name, namespace, lease)

    async def _call(self, verb: str, *args: object) -> Record:
        try:
            async with client.ApiClient(self._configuration()) as connection:
                call = getattr(client.CoordinationV1Api(connection), f"{verb}_namespaced_lease")
                return self._record(await call(*args, _request_timeout=_TIMEOUT_S))
        except (client.ApiException, aiohttp.ClientError, OSError, config.ConfigException):
            raise
        except Exception as error:  # the library raises many kinds for bodies that are no Lease
            raise ValueError(f"the API server did not return a Lease: {error}") from error

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

    def _log_change(self) -> None:
        epoch = self._candidate.epoch(self._clock())
        if epoch != self._logged_epoch:
            words = "flips roles" if epoch is not None else "flips roles no more"
            _log.info("%s: this router %s (epoch %s)", self, words, epoch or self._logged_epoch)
        self._logged_epoch = epoch


def _words_of(error: Exception) -> str:
    """Describe why the API server did not do what was asked, on one line."""
    if isinstance(error, TimeoutError):
        return f"no response in {_TIMEOUT_S:g} s"
    if not isinstance(error, client.ApiException):
        return str(error)
    try:
        words = str(msgspec.json.decode(str(error.body))["message"])
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
        words = str(error.body)
    return f"HTTP {error.status}: {' '.join(words.split())[:200]}{_HINTS.get(error.status, '')}"
