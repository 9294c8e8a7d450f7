"""A cluster with keys and TLS: clients need both, and instances have a key of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.certificates import CERTIFICATE, CERTIFICATE_KEY, trusting
from tests.e2e.cluster import Cluster, running
from tests.e2e.prompts import completion

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


async def ask(url: str, key: str, body: dict[str, Any]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers, ssl=trusting()) as response,
    ):
        return response.status, await response.text()


async def test_up_with_keys_and_tls(tiny_llama: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two clients\nkey-of-a-7q\nkey-of-b-7q\n")
    roles = ("--prefill", "1", "--decode", "1", "--api-key-file", str(keys))
    roles += ("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(CERTIFICATE_KEY))
    with running(Cluster(tiny_llama, tmp_path, roles=roles)) as cluster:
        assert cluster.url.startswith("https://")
        url = cluster.url + "/v1/completions"
        body = completion(40)
        first, second = [await ask(url, key, body) for key in ("key-of-a-7q", "key-of-b-7q")]
        assert first[0] == second[0] == 200, (first, second)
        assert (await ask(url, "key-of-c-7q", body))[0] == 401
        for instance in cluster.facts["instances"]:
            for key in ("", "key-of-a-7q"):
                assert (await ask(instance["url"] + "/v1/completions", key, body))[0] == 401
        commands = [" ".join(process.cmdline()) for process in cluster.tree()]
        assert len(commands) > 3
        assert not any("-7q" in command for command in commands)
    for log in (cluster.log, *cluster.logs.iterdir()):
        assert "-7q" not in log.read_text(errors="replace"), log
