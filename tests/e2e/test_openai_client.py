"""The stock OpenAI client works as it does against one instance."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import MODEL, Cluster, get

pytestmark = pytest.mark.e2e

openai = pytest.importorskip("openai")


def test_chat_and_completion(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "copy"}], max_tokens=8, temperature=0
        )
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "copy"}], max_tokens=8,
            temperature=0, stream=True,
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content
        assert client.completions.create(model=MODEL, prompt="the", max_tokens=3).choices
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="the")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="the", max_tokens=0)


def test_health_metrics_and_requests(cluster: Cluster) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{cluster.url}/health", timeout=5) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=5) as answer:
        assert b"tetri_" in answer.read()
    assert get(f"{cluster.url}/tetri/v1/requests") == {"in_flight": 0, "requests": []}
    fields = {
        "id", "url", "role", "state", "age_s", "running", "waiting", "held",
        "queued_prefill_tokens", "blocks_used", "blocks_total", "arena_used_bytes",
        "arena_total_bytes", "heavy", "light", "prefills_done", "decodes_done", "preemptions",
        "flips", "cpu_s",
    }  # fmt: skip
    for entry in cluster.instances().values():
        assert fields <= set(entry)
