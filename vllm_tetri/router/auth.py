"""What clients may do: API keys compared in constant time, TLS, and the bounds of the port.

The options are named like those of `vllm serve`, and declared in command.py. `vllm-tetri up` has
them as well and hands them on, so nothing here needs a server.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from vllm_tetri.errors import ConfigError

# vLLM's own variable; here it may hold several keys, one per line.
KEY_VARIABLE = "VLLM_API_KEY"
INSTANCE_KEY_VARIABLE = "TETRI_INSTANCE_API_KEY"
# Everything else needs a key. vLLM leaves more open: all paths that do not begin with /v1, /v2,
# /inference or /cohere, such as /tokenize, /score and /pooling.
_OPEN_PATHS = frozenset(
    {"/", "/health", "/livez", "/readyz", "/ping", "/metrics", "/version", "/load", "/openapi.json"}
) | {"/docs", "/redoc"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may send, how much of it, and how slowly; what exceeds a bound is refused."""

    connections: float = inf  # at a time; the next one gets 503 and is closed
    body_bytes: int = 64 << 20  # of one request, uncompressed; 413
    bodies_bytes: float = inf  # of all requests in the router together; 503
    url_bytes: int = 4096  # path and query; 414
    headers: int = 100  # of one request; 431
    header_bytes: int = 8192  # of the name of a header, or of its value; 431
    head_s: float = 10.0  # from a request's first byte to the end of its head; 408
    body_s: float = 30.0  # from there to the end of the body, more for large ones; 408
    least_bytes_per_s: int = 16 << 10  # at which large bodies come and responses are read
    idle_s: float = 75.0  # that a connection may be idle between requests
    stalled_s: float = 60.0  # that what was sent may be left unread, or be read more slowly


class Keys:
    """The keys that clients may present, as `Authorization: Bearer KEY`.

    Only digests are kept. Without keys, every request is let in. `num_clients` can be told apart.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]
        self.num_clients = max(1, len(self._digests))

    def client_of(self, path: str, headers: Mapping[str, str]) -> str | None:
        """Name the client of a request; the name says nothing about the key. None if the path
        needs a key, and there is none, or an unknown one."""
        if not self._digests or path in _OPEN_PATHS:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        presented, client = _digest(key), ""
        for number, digest in enumerate(self._digests):
            if secrets.compare_digest(presented, digest):
                client = f"key-{number}"  # and go on: the time must not tell which
        return client if client and scheme.lower() == "bearer" else None


def keys_of(options: Namespace) -> tuple[str, ...]:
    """Read the keys that clients may present. Raises `ConfigError`: a key that no header could
    carry, or a file without any."""
    keys: list[str] = [key for key in options.api_key or [] if key]
    if (path := options.api_key_file) is not None:
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path}: {error}") from error
        if not (in_file := _without_comments(lines)):
            raise ConfigError(f"--api-key-file {path} has no key in it")
        keys += in_file
    keys = keys or own_keys()
    keys = list(dict.fromkeys(keys))
    for number, key in enumerate(keys, 1):
        if key != key.strip() or not key.isprintable():
            raise ConfigError(
                f"API key {number} begins or ends with a blank, or has a character that cannot be "
                "printed; no client could send it"
            )
    return tuple(keys)


def own_keys() -> list[str]:
    """Return the keys of the environment, which may be those of a file with comments."""
    return _without_comments(os.environ.get(KEY_VARIABLE, "").split("\n"))


def _without_comments(lines: list[str]) -> list[str]:
    return [line for line in lines if line and not line.startswith("#")]


def instance_key_of(keys: tuple[str, ...]) -> str | None:
    """Return the `Authorization` header for instances; None forwards that of the client.

    A client's key opens this router and is never shown to instances. Raises `ConfigError`: there is
    a key for instances, but clients need none.
    """
    key = os.environ.get(INSTANCE_KEY_VARIABLE, "")
    if key != key.strip() or not key.isprintable():
        raise ConfigError(
            f"{INSTANCE_KEY_VARIABLE} holds a blank or a line break at an end, or what cannot be "
            "printed: no request could carry it"
        )
    if keys:
        return f"Bearer {key}" if key else ""
    if key:
        raise ConfigError(
            f"{INSTANCE_KEY_VARIABLE} would let every client of this router use the instances; "
            f"set {KEY_VARIABLE}, or give --api-key-file, so that clients need a key as well"
        )
    return None


def has_tls(options: Namespace) -> bool:
    """Return whether clients are to use https; ConfigError for a private key alone."""
    if options.ssl_keyfile and not options.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
    return bool(options.ssl_certfile)


def tls_of(options: Namespace) -> ssl.SSLContext | None:
    """Make the TLS context for clients; None for plain HTTP. Raises `ConfigError`: the files or
    ciphers cannot be used, or contradict each other."""
    if not has_tls(options):
        if options.ssl_ca_certs or options.ssl_cert_reqs or options.ssl_ciphers:
            raise ConfigError("--ssl-... options need --ssl-certfile: without it there is no TLS")
        return None
    if options.ssl_cert_reqs and not options.ssl_ca_certs:
        raise ConfigError(
            "--ssl-cert-reqs needs --ssl-ca-certs, the authorities whose certificates to accept"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=lambda: "")
        context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
        if options.ssl_ca_certs:
            context.load_verify_locations(options.ssl_ca_certs)
        if options.ssl_ciphers:
            context.set_ciphers(options.ssl_ciphers)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        raise ConfigError(f"TLS with {', '.join(filter(None, files))}: {error}") from error
    return context


def fingerprint_of(certfile: str) -> bytes:
    """Return the SHA-256 of the first certificate of a PEM file: a client that knows it needs
    no authority. ConfigError if the file has none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = Path(certfile).read_text()
        start = text.index(begin)
        pem = text[start : text.index(end, start) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-certfile {certfile}: no certificate: {error}") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
