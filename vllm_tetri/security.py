"""The secret that the processes of one cluster share.

It lies in a file that no other user may read, or in the environment, as hexadecimal digits or
base64, and never travels: peers prove that they hold it, by keys that follow from it (`Curve`, and
those of KV).
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import stat
import string
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_tetri.errors import ConfigError

VARIABLE = "TETRI_SECRET_FILE"
VALUE_VARIABLE = "TETRI_SECRET"  # holds the secret itself
_LEAST_BYTES = 32
_LEAST_KINDS = 8  # different bytes: 32 random ones have fewer once in 10^30 times
_MOST_TEXT = 4096
_PURPOSE = b"vllm-tetri 1 "
_DOMAIN = "tetri"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Secret:
    """At least 32 random bytes. Shows nothing of itself in logs and errors."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) < _LEAST_BYTES:
            raise ValueError(f"it has {len(raw)} bytes; a secret has at least {_LEAST_BYTES}")
        if len(set(raw)) < _LEAST_KINDS:
            raise ValueError("its bytes are nearly all the same; a secret is random")
        self._raw = raw

    def key(self, purpose: str) -> bytes:
        """Derive 32 bytes for one purpose; they reveal neither the secret nor other keys."""
        return hmac.digest(self._raw, _PURPOSE + purpose.encode(), "sha256")

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")


def secret_file_of(given: str | None) -> str:
    """Return the file to use: as given, else `TETRI_SECRET_FILE`, else one in memory with the value
    of `TETRI_SECRET`, which moves there from the environment; empty without any of them.
    ConfigError if both variables are set."""
    path, value = os.environ.get(VARIABLE, ""), os.environ.get(VALUE_VARIABLE, "")
    if given or not value:
        return given or path
    if path:
        raise ConfigError(f"{VALUE_VARIABLE} and {VARIABLE} are both set; leave one of them out")
    del os.environ[VALUE_VARIABLE]  # child processes find the file, and show nothing
    os.environ[VARIABLE] = in_memory("tetri-secret", value)
    return os.environ[VARIABLE]


def read_secret(path: str) -> Secret | None:
    """Read the secret in a file, None for an empty path; ConfigError for a file that cannot be
    read, is not private or holds no secret."""
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = f"`vllm-tetri secret {path}` makes one"
        raise ConfigError(f"secret file {path}: {error.strerror}; {hint}") from error
    try:
        _require_private(path, os.fstat(descriptor))
        text = os.read(descriptor, _MOST_TEXT + 1)
    finally:
        os.close(descriptor)
    try:
        if len(text) > _MOST_TEXT:
            raise ValueError(f"it has more than {_MOST_TEXT} characters")
        return Secret(_decode("".join(text.decode("ascii").split())))
    except ValueError as error:  # a UnicodeDecodeError would quote the text
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        hint = "`vllm-tetri secret FILE` makes a new one"
        raise ConfigError(f"secret file {path}: {why}; {hint}") from None


def kv_key_of(path: str) -> bytes:
    """Return the key of KV connections, empty without a file; raises like `read_secret`."""
    secret = read_secret(path)
    return b"" if secret is None else secret.key("kv")


def write_secret(path: Path) -> None:
    """Write a new secret to a new file of mode 0600; ConfigError if that cannot be created."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; a new secret needs a new file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_LEAST_BYTES) + "\n")


def share_secret(given: str | None) -> str:
    """Let all children of this process find a secret, the given one, else that of the environment,
    else a new one that is kept in memory only. Returns its path; raises like `read_secret`."""
    path = secret_file_of(given) or in_memory("tetri-secret", secrets.token_hex(_LEAST_BYTES))
    read_secret(path)
    os.environ[VARIABLE] = path
    os.environ.pop(VALUE_VARIABLE, None)
    return path


def in_memory(name: str, content: str = "") -> str:
    """Make a file in memory that only this user can open, shown as `name` by `ls -l /proc/PID/fd`.
    Returns its path below /proc; it is gone with this process, however that ends."""
    descriptor = os.memfd_create(name)  # open as long as this process lives
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _require_private(path: str, status: os.stat_result) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"secret file {path}: it is no file")
    groups = {os.getegid(), *os.getgroups()}
    if status.st_uid == 0 and status.st_gid in groups and not mode & 0o037:
        return  # as Kubernetes mounts a Secret for `fsGroup`
    if status.st_uid != user:
        raise ConfigError(
            f"secret file {path} belongs to user {status.st_uid}, and this process is user {user}: "
            f"`chown {user} {path}`, or use your own copy"
        )
    if mode & 0o077:
        raise ConfigError(
            f"secret file {path}: others may open it (mode {mode:o}); `chmod 600 {path}`, and make "
            "a new one if another user may have read it"
        )


def _decode(text: str) -> bytes:
    """Read hexadecimal digits or base64; a ValueError does not quote the text."""
    if len(text) % 2 == 0 and set(text) <= set(string.hexdigits):
        return bytes.fromhex(text)
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise ValueError("it is neither hexadecimal nor base64") from None


_READABLE = int(zmq.POLLIN)  # an enum's `&` is Python


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


class Curve:
    """CURVE keys of the control channel's two ends, which follow from the secret; ConfigError if
    this build of ZeroMQ has no CURVE.

    The caller knows the listener's key in advance and the listener admits only that one caller, so
    both have proved the secret before a message passes, encrypted and authenticated.
    """

    def __init__(self, secret: Secret) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this pyzmq was built without CURVE; install another build of it")
        self._listener = z85.encode(secret.key("control listener"))
        self._caller = z85.encode(secret.key("control caller"))

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Admit callers only, before `bind`. A context without `gatekeeper` refuses all."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._listener)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to the listener only; call it before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._listener))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._caller))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller)

    def gatekeeper(self, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
        """Tell libzmq, on a thread, which connections to admit; returns a function that ends it."""
        keeper = ThreadAuthenticator(context)
        keeper.certs[_DOMAIN] = {zmq.curve_public(self._caller): True}
        keeper.start()
        return lambda: keeper.stop() if keeper.is_alive() else None  # it waits for the thread
