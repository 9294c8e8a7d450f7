"""What operators' commands say to a running router, over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from vllm_tetri.errors import TetriError
from vllm_tetri.router.door_options import KEY_VARIABLE

_TIMEOUT_S = 5.0


class AdminError(TetriError):
    """No router answered, or it refused."""


def add_url(parser: argparse.ArgumentParser) -> None:
    """The option that says which router."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="base URL of the router (%(default)s); its API key is taken from the environment "
        f"variable {KEY_VARIABLE}, and SSL_CERT_FILE may name the certificate to trust",
    )


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def instances(url: str) -> dict[str, Any]:
    """What ``GET /tetri/v1/instances`` answers.

    Raises:
        AdminError: There is no router.
    """
    return _call(url, "/tetri/v1/instances", None)


def order(url: str, instance: str, what: str, body: dict[str, Any]) -> dict[str, Any]:
    """Order an instance to do `what`: "leave" or "flip".

    Raises:
        AdminError: There is no router, or it refuses; with its words.
    """
    path = f"/tetri/v1/instances/{quote(instance, safe='')}/{what}"
    return _call(url, path, json.dumps(body).encode())


def mode(url: str, new: str | None) -> str:
    """The mode that a router serves requests in, after changing it if there is a new one.

    Raises:
        AdminError: There is no router, or it refuses; with its words.
    """
    body = None if new is None else json.dumps({"mode": new}).encode()
    return str(_call(url, "/tetri/v1/mode", body)["mode"])


def work_of(row: dict[str, Any]) -> str:
    """What an instance has to do, as the commands that wait for it show."""
    return (
        f"{row['running']} running, {row['waiting']} waiting, {row['held']} held, "
        f"{row['in_flight']} in flight"
    )


def _call(url: str, path: str, body: bytes | None) -> dict[str, Any]:
    base = url.rstrip("/")
    try:
        request = urllib.request.Request(base + path, data=body, headers=_headers())
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise AdminError(_words(error)) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise AdminError(f"no router answers at {base}: {error}") from error
    if not isinstance(answer, dict):
        raise AdminError(f"no router answers at {base}: it says {answer!r}")
    return answer


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(KEY_VARIABLE, "").strip().partition("\n")[0]
    return {**headers, "Authorization": f"Bearer {key}"} if key else headers


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError):
        return f"HTTP {error.code} {error.reason}"
