"""Clients that people use, through the router: openai-python and curl; more in tests/suites."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import openai
import pytest

from tests.e2e.cluster import MODEL, Cluster, Stock
from tests.e2e.prompts import text_prompt
from tests.e2e.shapes import TOOLS, plain_body, user

pytestmark = pytest.mark.e2e

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}


def client_of(server: Stock | Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_chat(stock: Stock, cluster: Cluster) -> None:
    messages: Any = user(text_prompt(80))
    texts = []
    for server in (stock, cluster):
        with client_of(server) as client:
            whole = client.chat.completions.create(
                **ASKED, messages=messages, logprobs=True, top_logprobs=2
            )
            choice = whole.choices[0]
            assert choice.logprobs is not None
            assert len(choice.logprobs.content or []) == 8
            assert whole.usage is not None
            stream = client.chat.completions.create(
                **ASKED, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(
                choice.delta.content or "" for chunk in chunks for choice in chunk.choices
            )
            assert text == choice.message.content
            assert chunks[-1].usage == whole.usage
            assert len({chunk.id for chunk in chunks}) == 1
            texts.append(text)
    assert texts[0] == texts[1]


def test_openai_choices_and_tools(stock: Stock, cluster: Cluster) -> None:
    found: list[Any] = []
    for server in (stock, cluster):
        with client_of(server) as client:
            many = client.completions.create(
                model=MODEL, prompt=text_prompt(80), n=3, seed=4, temperature=1, max_tokens=8
            )
            tools: Any = TOOLS
            messages: Any = user("How warm is it?")
            called = client.chat.completions.create(
                model=MODEL, messages=messages, tools=tools, tool_choice="required",
                max_tokens=80, temperature=0,
            )  # fmt: skip
            calls: Any = called.choices[0].message.tool_calls
            found.append(
                ([choice.text for choice in many.choices], [call.function for call in calls])
            )
    assert len(found[0][0]) == 3
    assert found[0][1]
    assert found[0] == found[1]


def test_openai_responses(stock: Stock, cluster: Cluster) -> None:
    texts = []
    for server in (stock, cluster):
        with client_of(server) as client:
            whole = client.responses.create(
                model=MODEL, input=text_prompt(80), max_output_tokens=8, temperature=0
            )
            events = list(
                client.responses.create(
                    model=MODEL, input=text_prompt(80), max_output_tokens=8, temperature=0,
                    stream=True,
                )
            )  # fmt: skip
            assert events[0].type == "response.created"
            said = [each.delta for each in events if each.type == "response.output_text.delta"]
            assert "".join(said) == whole.output_text
            texts.append(whole.output_text)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve("resp_unknown")
    assert texts[0]
    assert texts[0] == texts[1]


def curl(url: str, *options: str) -> tuple[str, str]:
    """Status and body."""
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-m", "60", "-w", "\n%{http_code}", *options, url],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    body, _, status = done.stdout.rpartition("\n")
    return status, body


def test_curl(stock: Stock, cluster: Cluster) -> None:
    json_body = ("-H", "Content-Type: application/json", "-d")
    texts = []
    for server in (stock, cluster):
        url = f"{server.url}/v1/completions"
        status, body = curl(url, *json_body, json.dumps(plain_body("completion")))
        texts.append(json.loads(body)["choices"][0]["text"])
        assert status == "200"
        streamed = json.dumps({**plain_body("completion"), "stream": True})
        status, body = curl(url, "-N", *json_body, streamed)
        lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
        assert (status, lines[-1]) == ("200", "[DONE]")
        pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(pieces) == texts[-1]
        status, body = curl(url, *json_body, '{"model": "tiny", "prompt": "x", "n": 0}')
        assert (status, json.loads(body)["error"]["type"]) == ("400", "BadRequestError")
    assert texts[0]
    assert texts[0] == texts[1]


def test_curl_with_a_large_body_that_expects_to_be_told_to_go_on(cluster: Cluster) -> None:
    """curl asks first (`Expect: 100-continue`) when a body is larger than a megabyte."""
    body = json.dumps({**plain_body("completion"), "user": "x" * (3 << 20)})
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-m", "60", "-H", "Content-Type: application/json",
         "-H", "Expect: 100-continue", "--data-binary", "@-", f"{cluster.url}/v1/completions"],
        input=body, capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["choices"][0]["text"]
