"""https for clients."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import FakeInstance, cluster, eventually
from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.door_options import (
    add_door_options,
    add_tls_options,
    fingerprint_of,
    tls_of,
)
from vllm_tetri.router.limits import Limits
from vllm_tetri.types import Role

CERTIFICATE = Path(__file__).parent.parent / "certificate.pem"  # for 127.0.0.1, by itself
CERTIFICATE_KEY = CERTIFICATE.with_name("certificate-key.pem")
FILES = ("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(CERTIFICATE_KEY))
# The same key, encrypted.
LOCKED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgMD6iRdpuE+gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEKRn5SUYODx1KakVQk6QXScEgZB3
pHTL7LFUIAVx+TaBkAGDgJnw20qfOuipzQ3R8p2qG8j9jaBp7+NrMwl4LPhz/FXw
fkD/t9w+d+NtQX2AjCTjNvAfNg+Jk/eaNMBQWXBLJ6v+sP1Z7n0rac3pNvOIg4dt
qqtFJ5iwV7CrXQUjEQ+XZyNHr5ncfxJpIIRwgDooNlmPv6XjK5ZuRzWXUUhy6rk=
-----END ENCRYPTED PRIVATE KEY-----
"""
BODY = {"model": "tiny", "prompt": "x"}


def both() -> FakeInstance:
    return FakeInstance("b", Role.BOTH)


def tls(*words: str) -> ssl.SSLContext | None:
    parser = argparse.ArgumentParser()
    add_door_options(parser)
    add_tls_options(parser)
    return tls_of(parser.parse_args(words))


def trusting(*, has_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    if has_certificate:
        context.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)
    return context


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
    words = (*FILES, "--ssl-ca-certs", str(CERTIFICATE), "--ssl-cert-reqs", "2")
    async with cluster(both(), tls=tls(*words)) as made:
        assert await ask(made.url, trusting(has_certificate=True)) == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(made.url, trusting())


async def test_limits_hold_behind_tls_too() -> None:
    limits = Limits(connections=1, head_s=0.2)
    async with cluster(both(), tls=tls(*FILES), limits=limits) as made:
        for expected in (b"408", b"503"):
            first = await asyncio.open_connection(*made.listener.address, ssl=trusting())
            first[1].write(b"GET /v1/models HTTP/1.1\r\n")
            reader, writer = first
            if expected == b"503":
                reader, writer = await asyncio.open_connection(
                    *made.listener.address, ssl=trusting()
                )
            async with asyncio.timeout(5):
                assert expected in await reader.readline()
            for each in {first[1], writer}:
                each.close()
                with suppress(OSError):
                    await each.wait_closed()
            await eventually(lambda: made.listener.num_connections == 0)


async def test_commands_speak_https(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(both(), tls=tls(*FILES)) as made:
        assert await asyncio.to_thread(cli.main, ["status", "--url", made.url]) == 1
        assert "certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert await asyncio.to_thread(cli.main, ["status", "--url", made.url]) == 0


def test_tls_is_off_without_a_certificate() -> None:
    assert tls() is None


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
def test_what_cannot_work_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tls(*words)


def test_a_locked_key_asks_nobody_for_its_password(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.write_text(LOCKED)
    with pytest.raises(ConfigError, match=r"TLS with .*locked"):
        tls("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(locked))
