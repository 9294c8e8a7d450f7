"""The secret that the processes of one cluster share, and the keys that follow from it.

Who has it belongs to the cluster: routers, instances, nobody else. It lies in a file that
only its owner may read, as hexadecimal digits or base64, and never travels: peers show
that they have it (docs/security.md).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import secrets
import stat
import string
from pathlib import Path
from typing import NoReturn

from vllm_tetri.errors import ConfigError

VARIABLE = "TETRI_SECRET_FILE"
KEY_BYTES = 32
_LEAST_BYTES = 32
_LEAST_KINDS = 8  # different bytes: 32 random ones have fewer once in 10^30 times
_MOST_TEXT = 4096
_PURPOSE = b"vllm-tetri 1 "


class Secret:
    """At least 32 random bytes. Shows nothing of itself in logs and errors."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) < _LEAST_BYTES:
            raise ValueError(f"a secret has at least {_LEAST_BYTES} bytes, not {len(raw)}")
        self._raw = raw

    @classmethod
    def make(cls) -> Secret:
        """A new one."""
        return cls(secrets.token_bytes(_LEAST_BYTES))

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """What hexadecimal digits or base64 say; text that could be both is the former.

        Raises:
            ValueError: They are neither, or too few, or not random; says nothing of them.
        """
        raw = _decode("".join(text.split()))
        if len(raw) < _LEAST_BYTES:
            raise ValueError(f"it has {len(raw)} bytes; a secret has at least {_LEAST_BYTES}")
        if len(set(raw)) < _LEAST_KINDS:
            raise ValueError("its bytes are nearly all the same; a secret is random")
        return cls(raw)

    @property
    def text(self) -> str:
        """What `from_text` reads. For whoever passes it on, never for people to see."""
        return self._raw.hex()

    def key(self, purpose: str) -> bytes:
        """32 bytes for one purpose; they tell nothing of the secret or of other keys."""
        return hmac.digest(self._raw, _PURPOSE + purpose.encode(), "sha256")

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret stays where it is")


def secret_file_of(given: str | None) -> str:
    """The file to use: the one that was given, else that of the environment; may be empty."""
    return given or os.environ.get(VARIABLE, "")


def read_secret(path: str) -> Secret | None:
    """The secret in a file; None without a file.

    Raises:
        ConfigError: The file cannot be read, is not private or holds no secret.
    """
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"secret file {path}: {error.strerror}; `vllm-tetri secret {path}` makes one"
        ) from error
    try:
        _require_private(path, os.fstat(descriptor))
        text = os.read(descriptor, _MOST_TEXT + 1)
    finally:
        os.close(descriptor)
    try:
        if len(text) > _MOST_TEXT:
            raise ValueError(f"it has more than {_MOST_TEXT} characters")
        return Secret.from_text(text.decode("ascii"))
    except ValueError as error:  # also of what is not ASCII, which would be quoted
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(
            f"secret file {path}: {why}; `vllm-tetri secret FILE` makes a right one"
        ) from None


def kv_key_of(path: str) -> bytes:
    """What both ends of a KV connection must hold; empty without a file. Raises like
    `read_secret`."""
    secret = read_secret(path)
    return b"" if secret is None else secret.key("kv")


def write_secret(path: Path) -> None:
    """Make a new secret and put it into a new file that only its owner may read.

    Raises:
        ConfigError: The file is there already, or cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; a new secret needs a new file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(Secret.make().text + "\n")


def _require_private(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"secret file {path}: it is no file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"secret file {path}: it belongs to user {status.st_uid}, and this process is user "
            f"{os.geteuid()}; `chown {os.geteuid()} {path}`, or use a copy of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"secret file {path}: others may open it (mode {stat.S_IMODE(status.st_mode):o}); "
            f"`chmod 600 {path}`, and make a new one if somebody may have read it"
        )


def _decode(text: str) -> bytes:
    if len(text) % 2 == 0 and set(text) <= set(string.hexdigits):
        return bytes.fromhex(text)
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is neither hexadecimal nor base64") from None
