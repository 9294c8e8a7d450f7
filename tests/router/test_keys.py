"""API keys of clients, and what instances see of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.fakes import both, cluster
from tests.router.raw import exchange
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.app import PROXIED
from vllm_tetri.router.auth import instance_key_of, keys_of
from vllm_tetri.router.command import add_arguments

KEYS = ("secret-one", "zweiter Schlüssel")
OPEN = ("/health", "/livez", "/readyz", "/ping", "/metrics", "/version", "/load", "/openapi.json",
        "/docs", "/redoc")  # fmt: skip
BOTH = {"Authorization": f"Bearer {KEYS[0]}"}


async def status(
    client: aiohttp.ClientSession, url: str, method: str = "POST", headers: Any = None
) -> int:
    async with client.request(method, url, headers=headers, data=b"{}") as response:
        if response.status == 401:
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("AuthenticationError", 401)
            assert response.headers["WWW-Authenticate"] == "Bearer"
        return response.status


async def test_every_route_but_a_few_needs_a_key() -> None:
    posts = ("/v1/chat/completions", "/v1/completions", "/tetri/v1/mode", "/nothing")
    posts += tuple(path for method, path, _ in PROXIED if method == "POST")
    posts += ("/tetri/v1/instances/b/drain", "/tetri/v1/instances/b/flip")
    gets = ("/v1/models", "/tetri/v1/instances", "/tetri/v1/requests", "/tetri/v1/mode")
    gets += ("/tetri/v1/targets",)
    gets += tuple(each for method, each, _ in PROXIED if method == "GET" and each not in OPEN)
    async with cluster(both(), keys=KEYS) as made:
        for method, paths in (("POST", posts), ("GET", gets)):
            for path in paths:
                assert await status(made.client, made.url + path, method) == 401, path
                assert await status(made.client, made.url + path, method, BOTH) != 401, path
        for path in OPEN:
            assert await status(made.client, made.url + path, "GET") != 401, path
        assert made["b"].calls  # some were let in


@pytest.mark.parametrize(
    ("sent", "is_let_in"),
    [
        ("Bearer secret-one", True),
        ("bearer secret-one", True),
        ("Bearer zweiter Schlüssel", True),
        ("", False),
        ("secret-one", False),
        ("Basic secret-one", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Bearer secret-on", False),
        ("Bearer secret-onee", False),
        ("Bearer SECRET-ONE", False),
        ("Bearer \udcff", False),
    ],
)
async def test_only_a_known_key_opens(sent: str, is_let_in: bool) -> None:
    head = b"GET /tetri/v1/requests HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\n\r\n"
    async with cluster(both(), keys=KEYS) as made:
        answer = await exchange(made, head % sent.encode("utf-8", "surrogateescape"))
    assert answer.status == (200 if is_let_in else 401)


async def test_a_request_without_a_key_is_rejected_before_its_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    async with cluster(both(), keys=KEYS) as made:
        assert (await exchange(made, head)).status == 401


async def test_instances_get_the_routers_key_and_never_a_clients() -> None:
    for given, expected in (("Bearer own", "Bearer own"), ("", None), (None, BOTH)):
        one = both()
        async with cluster(one, keys=KEYS, authorization=given) as made:
            for path in ("/v1/completions", "/v1/embeddings"):
                assert (await made.ask(path, headers=BOTH))[0] == 200
        wanted = expected["Authorization"] if isinstance(expected, dict) else expected
        assert [call[2].get("Authorization") for call in one.calls] == [wanted, wanted]


async def test_an_instance_that_refuses_the_routers_key_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its 401 would tell clients with a good key that theirs is wrong."""
    async with cluster(both(), keys=KEYS, authorization="") as made:
        made["b"].handler = refuse_key
        for path in ("/v1/completions", "/v1/embeddings"):
            assert (await made.ask(path, headers=BOTH))[0] == 502
    assert caplog.text.count("give the router TETRI_INSTANCE_API_KEY") >= 2


async def refuse_key(*_: object) -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


async def test_commands_take_the_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(both(), keys=KEYS) as made:
        assert await made.command("status") == 1
        assert "needs a known key" in capsys.readouterr().err
        monkeypatch.setenv("VLLM_API_KEY", KEYS[0] + "\nanother")
        assert await made.command("status") == 0
        assert "both" in capsys.readouterr().out
        assert await made.command("mode", "whole") == 0


def keys(*words: str) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return keys_of(parser.parse_args(words))


def test_keys_come_from_options_or_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n one \n\ntwo\n")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys() == ()
    assert keys("--api-key", "a", "b", "--api-key", "c") == ("a", "b", "c")
    assert keys("--api-key-file", str(file)) == ("one", "two")
    assert keys("--api-key", "two", "--api-key-file", str(file)) == ("two", "one")
    monkeypatch.setenv("VLLM_API_KEY", "# of the team\nx\ny\n")
    assert keys() == ("x", "y")
    assert keys("--api-key", "a") == ("a",)  # as with vllm serve


@pytest.mark.parametrize("text", ["", "# nothing\n", None])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        keys("--api-key-file", str(file))


@pytest.mark.parametrize("key", ["q7 ", " q7", "q\t7", "q\r7"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        keys("--api-key", "fine", key)
    assert "API key 2" in str(raised.value)
    assert key not in str(raised.value)


def test_instances_need_a_key_only_if_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETRI_INSTANCE_API_KEY", "own")
    assert instance_key_of(("a",)) == "Bearer own"
    with pytest.raises(ConfigError, match="let every client"):
        instance_key_of(())
    monkeypatch.setenv("TETRI_INSTANCE_API_KEY", "own\n")  # as of a Secret made with `echo`
    with pytest.raises(ConfigError, match="TETRI_INSTANCE_API_KEY holds"):
        instance_key_of(("a",))
    monkeypatch.delenv("TETRI_INSTANCE_API_KEY")
    assert instance_key_of(("a",)) == ""
    assert instance_key_of(()) is None
