"""One Lease of the Kubernetes API, from inside a pod."""

from __future__ import annotations

import copy
import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec

from vllm_tetri.errors import ConfigError, TetriError
from vllm_tetri.policy.leadership import Candidate, Record

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_GROUP = "coordination.k8s.io"
_KIND = {"apiVersion": f"{_GROUP}/v1", "kind": "Lease"}
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_BYTES = 256 << 10  # a Lease has about one
_MOST_SHOWN = 200
_MISSING = 404
_CONFLICT = 409
_WORDS = {
    401: "the token of the service account is not accepted",
    403: "the service account is not allowed to; it needs a Role with the verbs get, create and "
    f"update on leases of {_GROUP} (docs/failures.md has one)",
}
_VERBS = {"GET": "get", "POST": "create", "PUT": "update"}


class ApiError(TetriError):
    """The API server did not do it, as far as this side knows.

    Args:
        status: What it answered; 0 for nothing, or nothing that has a meaning.
    """

    def __init__(self, words: str, status: int = 0) -> None:
        super().__init__(words)
        self.status = status


class Outrun(ApiError):
    """Somebody else changed it first."""


class _Meta(msgspec.Struct, frozen=True):
    version: Annotated[str, msgspec.Meta(min_length=1)] = msgspec.field(name="resourceVersion")
    made: Annotated[datetime, msgspec.Meta(tz=True)] = msgspec.field(name="creationTimestamp")


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    lease_transitions: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None


class _Lease(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Lease is, and what opens it.

    Attributes:
        server: The API server, `https://HOST:PORT`.
        account: Folder with `token` and `ca.crt`; both are read again each time, as a kubelet
            renews them.
    """

    server: str
    account: Path
    namespace: str
    name: str


def place_of(
    name: str, *, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT
) -> Place:
    """The Lease of this name in the namespace of the pod that this runs in.

    Raises:
        ConfigError: It runs in none, or it is no name.
    """
    option = f"--flip-lease kubernetes:{name}"
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"{option}: {name!r} is no name of a Lease: take 1 to 63 of a-z, 0-9 and -, "
            "a letter or digit first and last"
        )
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            f"{option}: this is no pod of a Kubernetes cluster (KUBERNETES_SERVICE_HOST is not "
            "set); routers of one host share --flip-lease FILE"
        )
    try:
        namespace = (account / "namespace").read_text().strip()
        (account / "token").read_bytes()
        ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option}: {account} holds no usable service account ({error}); give the pod one "
            "(automountServiceAccountToken)"
        ) from error
    if not _LABEL.fullmatch(namespace) or not port.isdecimal():
        raise ConfigError(f"{option}: odd namespace {namespace!r} or port {port!r}")
    host = f"[{host}]" if ":" in host else host
    return Place(f"https://{host}:{port}", account, namespace, name)


class LeaseApi:
    """Reads and writes one Lease. Owner: the event loop.

    Every request has a connection of its own: there is one in some seconds. What else stands
    in the object, labels for instance, stays as it is.

    Args:
        timeout_s: Longest wait for an answer.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self._place = place
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._newest: dict[str, Any] = {}  # the object as it was answered last
        folder = f"/apis/{_GROUP}/v1/namespaces/{place.namespace}/leases"
        self._folder = place.server + folder
        self._item = f"{self._folder}/{place.name}"

    async def read(self) -> Record | None:
        """The lease; None if there is none.

        Raises:
            ApiError: There is no answer, or none that says so.
        """
        status, body = await self._ask("GET", self._item)
        return None if status == _MISSING else self._understood(body)

    async def make(self, candidate: Candidate) -> Record:
        """Create it, held by this one. Raises as `read`, and Outrun when it is there by now."""
        metadata = {"name": self._place.name, "namespace": self._place.namespace}
        spec = _spec(candidate, 0) | {"acquireTime": _now()}
        return await self._write("POST", self._folder, {"metadata": metadata, "spec": spec})

    async def take(self, candidate: Candidate) -> Record:
        """Write this one as the next holder. Raises as `read`, and Outrun when it changed."""
        spec = _spec(candidate, _record(candidate).num_changes + 1) | {"acquireTime": _now()}
        return await self._replace(spec)

    async def renew(self, candidate: Candidate) -> Record:
        """Write that this one still holds it. Raises as `take`."""
        return await self._replace(_spec(candidate, _record(candidate).num_changes))

    async def give_back(self, candidate: Candidate) -> Record:
        """Write that nobody holds it. Raises as `take`."""
        spec = _spec(candidate, _record(candidate).num_changes + 1)
        return await self._replace(spec | {"holderIdentity": ""})

    async def _replace(self, spec: dict[str, Any]) -> Record:
        whole = copy.deepcopy(self._newest)  # with the version that the server compares
        whole["spec"] = {**(whole.get("spec") or {}), **spec}
        return await self._write("PUT", self._item, whole)

    async def _write(self, method: str, url: str, whole: dict[str, Any]) -> Record:
        status, body = await self._ask(method, url, json.dumps(_KIND | whole).encode())
        if status == _MISSING:
            kind = Outrun if method == "PUT" else ApiError
            raise kind(f"cannot {_VERBS[method]} it: {_said(body)} (HTTP {status})", status)
        return self._understood(body)

    async def _ask(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status, of 2xx or 404, and body."""
        verb = _VERBS[method]
        try:
            tls = ssl.create_default_context(cafile=str(self._place.account / "ca.crt"))
            token = (self._place.account / "token").read_text().strip()
            headers = {
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
                "User-Agent": "vllm-tetri",
            }
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.request(
                    method, url, data=body, headers=headers, ssl=tls, allow_redirects=False
                ) as response,
            ):
                answer = await _read(response.content)
                status = response.status
        except TimeoutError as error:
            raise ApiError(f"cannot {verb} it: no answer in {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(f"cannot {verb} it: {error}") from error
        if status == _CONFLICT:
            raise Outrun(f"cannot {verb} it: {_said(answer)}", status)
        if status != _MISSING and not 200 <= status < 300:
            words = _WORDS.get(status, "the API server failed")
            words += f" (HTTP {status}: {_said(answer)})"
            raise ApiError(f"cannot {verb} it: {words}", status)
        return status, answer

    def _understood(self, body: bytes) -> Record:
        try:
            newest = msgspec.json.decode(body)
            lease = msgspec.convert(newest, _Lease)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(f"the API server answered no Lease: {error}") from error
        made_s = int(lease.metadata.made.timestamp())
        if made_s < 1:
            raise ApiError("the API server answered a Lease from before 1970")
        self._newest = newest
        return Record(
            version=lease.metadata.version,
            holder=lease.spec.holder_identity or "",
            made_s=made_s,
            num_changes=lease.spec.lease_transitions or 0,
            duration_s=float(lease.spec.lease_duration_seconds or 0),
        )


def _record(candidate: Candidate) -> Record:
    assert candidate.record is not None, "a record that was never read cannot be replaced"
    return candidate.record


def _spec(candidate: Candidate, num_changes: int) -> dict[str, Any]:
    return {
        "holderIdentity": candidate.name,
        "leaseDurationSeconds": ceil(candidate.duration_s),
        "leaseTransitions": num_changes,
        "renewTime": _now(),  # for people and their tools; nothing here compares it
    }


def _now() -> str:
    """As Kubernetes reads it: six digits behind the point, always."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _read(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise ValueError(f"the answer has more than {_MOST_BYTES} bytes")
    return bytes(body)


def _said(body: bytes) -> str:
    """What the API server says of a failure, on one line."""
    try:
        words = str(msgspec.json.decode(body)["message"])
    except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
        words = body.decode("utf-8", "replace")
    return " ".join(words.split())[:_MOST_SHOWN]
