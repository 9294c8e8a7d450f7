"""https for clients."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.certificates import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY, trusting
from tests.router.fakes import both, cluster, eventually
from tests.router.raw import connected, read_answer
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.auth import Limits, fingerprint_of, tls_of
from vllm_tetri.router.command import add_arguments

FILES = ("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(CERTIFICATE_KEY))
BODY = {"model": "tiny", "prompt": "x"}


def tls(*words: str) -> ssl.SSLContext | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return tls_of(parser.parse_args(words))


async def ask(url: str, how: ssl.SSLContext | aiohttp.Fingerprint, **more: Any) -> int:
    async with (
        aiohttp.ClientSession() as client,
        client.post(url + "/v1/completions", json={**BODY, **more}, ssl=how) as response,
    ):
        await response.read()
        return response.status


async def test_clients_speak_https_and_nothing_else() -> None:
    async with cluster(both(), tls=tls(*FILES)) as made:
        assert made.url.startswith("https://")
        assert await ask(made.url, trusting()) == 200
        assert await ask(made.url, trusting(), stream=True) == 200
        pinned = aiohttp.Fingerprint(fingerprint_of(str(CERTIFICATE)))
        assert await ask(made.url, pinned) == 200
        with pytest.raises(aiohttp.ClientSSLError):
            await ask(made.url, ssl.create_default_context())
        with pytest.raises(aiohttp.ClientError):
            await ask(made.url.replace("https", "http"), trusting())
        old = trusting()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await ask(made.url, old) == 200


async def test_a_client_may_have_to_show_a_certificate() -> None:
    words = (*FILES, "--ssl-ca-certs", str(AUTHORITY), "--ssl-cert-reqs", "2")
    async with cluster(both(), tls=tls(*words)) as made:
        assert await ask(made.url, trusting(has_certificate=True)) == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(made.url, trusting())


async def test_limits_hold_with_tls_too() -> None:
    limits = Limits(connections=1, head_s=0.2)
    async with cluster(both(), tls=tls(*FILES), limits=limits) as made:
        async with connected(made, trusting()) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\n")
            async with connected(made, trusting()) as (second, _):
                assert (await read_answer(second)).status == 503
            assert (await read_answer(reader)).status == 408
        await eventually(lambda: len(made.listener.connections) == 0)


async def test_commands_speak_https(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(both(), tls=tls(*FILES)) as made:
        assert await made.command("status") == 1
        assert "certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
        assert await made.command("status") == 0
        made.url = made.url.replace("https:", "http:")
        assert await made.command("status") == 1
        assert "give --url https://NAME:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ssl-keyfile", "x"), "needs --ssl-certfile"),
        (("--ssl-ca-certs", "x"), "need --ssl-certfile"),
        (("--ssl-ciphers", "x"), "need --ssl-certfile"),
        ((*FILES, "--ssl-cert-reqs", "2"), "needs --ssl-ca-certs"),
        ((*FILES[:2],), "TLS with .*certificate.pem"),
        (("--ssl-certfile", "/nothing"), "TLS with /nothing"),
        ((*FILES, "--ssl-ciphers", "none at all"), "cipher"),
    ],
)
def test_contradicting_tls_options_are_refused(words: tuple[str, ...], message: str) -> None:
    assert tls() is None
    with pytest.raises(ConfigError, match=message):
        tls(*words)


def test_an_encrypted_key_is_an_error_and_no_question(tmp_path: Path) -> None:
    key = load_pem_private_key(CERTIFICATE_KEY.read_bytes(), None)
    encrypted = tmp_path / "encrypted"
    encrypted.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a password"))
    )
    with pytest.raises(ConfigError, match=r"TLS with .*encrypted"):
        tls("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(encrypted))
