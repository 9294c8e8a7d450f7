"""Options of the port for clients: keys and TLS, named as those of `vllm serve`, and a bound.

`vllm-tetri up` takes them, too, and hands them on; so nothing here needs a server.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import ssl
from math import inf
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.standing import MOST_S, PATIENCE_S

# vLLM's own; here it may hold several keys, a line each.
KEY_VARIABLE = "VLLM_API_KEY"
INSTANCE_KEY_VARIABLE = "TETRI_INSTANCE_API_KEY"


def add_door_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a router and `up` share."""
    parser.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="clients must present one of these keys as `Authorization: Bearer KEY`; whoever "
        "may list processes here can read them, so better use --api-key-file or the environment "
        f"variable {KEY_VARIABLE}, which counts if neither option is given (everybody may ask)",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="the same, a key in each line; lines that begin with # are left out",
    )
    parser.add_argument("--ssl-certfile", metavar="FILE", help="certificate for https, PEM")
    parser.add_argument(
        "--ssl-keyfile", metavar="FILE", help="its private key, PEM (in --ssl-certfile)"
    )
    parser.add_argument(
        "--max-standing-wait",
        type=_seconds,
        default=MOST_S,
        metavar="SECONDS",
        help="prompts may queue for longer than this after a burst, but not for more than "
        f"{PATIENCE_S:g} s on end: then new requests go elsewhere or are answered with 503 and "
        "Retry-After until the queue is short again; 0: never (%(default)s)",
    )


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a router has besides."""
    parser.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates, PEM"
    )
    parser.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[each.value for each in ssl.VerifyMode],
        default=ssl.CERT_NONE.value,
        help="whether clients need a certificate: no (0), they may have one (1), yes (2); "
        "needs --ssl-ca-certs (%(default)s)",
    )
    parser.add_argument(
        "--ssl-ciphers", metavar="LIST", help="cipher suites of TLS 1.2, as OpenSSL lists them"
    )


def keys_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The keys that clients may present.

    Raises:
        ConfigError: A key that no header could carry, or a file without any.
    """
    keys: list[str] = [key for key in options.api_key or [] if key]
    if options.api_key_file is not None:
        keys += _keys_in(options.api_key_file)
    if not keys:
        keys = os.environ.get(KEY_VARIABLE, "").split("\n")
    keys = list(dict.fromkeys(key for key in keys if key))
    for number, key in enumerate(keys, 1):
        if key != key.strip() or not key.isprintable():
            raise ConfigError(
                f"API key {number} has a blank at its end or a character that cannot be printed; "
                "no client could send it"
            )
    return tuple(keys)


def instance_key_of(keys: tuple[str, ...]) -> str | None:
    """The `Authorization` header for instances; None where clients' own goes through.

    A client's key opens this router; what is behind it has no business with it.

    Raises:
        ConfigError: There is a key for instances, but clients need none.
    """
    key = os.environ.get(INSTANCE_KEY_VARIABLE, "")
    if key and not keys:
        raise ConfigError(
            f"{INSTANCE_KEY_VARIABLE} opens instances to everybody who can reach this router; "
            f"set {KEY_VARIABLE}, or give --api-key-file, so that clients need a key, too"
        )
    if not keys:
        return None
    return f"Bearer {key}" if key else ""


def has_tls(options: argparse.Namespace) -> bool:
    """Whether clients are to use https.

    Raises:
        ConfigError: There is a private key, but no certificate.
    """
    if options.ssl_keyfile and not options.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
    return bool(options.ssl_certfile)


def tls_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """How to speak TLS to clients; None for plain HTTP.

    Raises:
        ConfigError: The files or ciphers cannot be used, or contradict each other.
    """
    if not has_tls(options):
        if options.ssl_ca_certs or options.ssl_cert_reqs or options.ssl_ciphers:
            raise ConfigError("--ssl-... options need --ssl-certfile: without it there is no TLS")
        return None
    if options.ssl_cert_reqs and not options.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: whose certificates are good?")
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
        files = ", ".join(
            str(file)
            for file in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
            if file
        )
        raise ConfigError(f"TLS with {files}: {error}") from error
    return context


def fingerprint_of(certfile: str) -> bytes:
    """SHA-256 of the first certificate of a PEM file: who knows it needs no authority.

    Raises:
        ConfigError: There is none.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = Path(certfile).read_text()
        start = text.index(begin)
        pem = text[start : text.index(end, start) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-certfile {certfile}: no certificate: {error}") from error


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _keys_in(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key in it")
    return keys
