"""Names that a model is served by; weights, and types of weights and KV, that differ under one."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.e2e.client import Answer, ask, split_once, until
from tests.e2e.cluster import CHUNK, SERVE, ByHand, Cluster, Process, Stock, get, post, running
from tests.e2e.prompts import completion
from tests.tiny_model import SEED, quantized_model, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

HUB_NAME, REVISION = "org/tiny-llama", 40 * "a"
LIMITS = SERVE[2:]  # without a served name
NAMES = ("--served-model-name", "tiny", "alias")


class Named(Cluster):
    """One instance of a model of the hub, without a name of its own."""

    def __init__(self, folder: Path) -> None:
        self.ready_file = folder / "ready.json"
        Process.__init__(
            self,
            ["vllm_tetri.cli", "up", HUB_NAME, "--both", "1", "--port", "0", "--ready-file",
             str(self.ready_file), "--log-dir", str(folder / "logs"), "--", *LIMITS,
             "--no-enable-chunked-prefill", "--tetri-chunk-size", str(CHUNK)],
            folder / "up.log",
        )  # fmt: skip


def names_at(url: str) -> list[str]:
    return [each["id"] for each in get(f"{url}/v1/models")["data"]]


async def test_a_model_of_the_hub_is_served_by_its_name_offline_and_its_prompts_unchunked(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub" / "models--org--tiny-llama"
    copytree(tiny_llama, home / "snapshots" / REVISION)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with running(Named(tmp_path)) as cluster:
        (instance,) = cluster.instances().values()
        assert names_at(cluster.url) == names_at(instance["url"]) == [HUB_NAME]
        body = completion(4 * CHUNK, model=HUB_NAME)
        answer = await ask(cluster.url, body)
        assert answer.status == 200
        assert answer.same_as(await ask(instance["url"], body))


async def test_kv_of_other_weights_is_not_exchanged_and_an_operator_reads_why(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """As a base and an instruct checkpoint of one architecture under one name."""
    instruct = tiny_model(tmp_path / "instruct", seed=SEED + 1)
    base = copytree(tiny_llama, tmp_path / "base")
    files = {path.name: path.stat().st_size for path in base.glob("*.safetensors")}
    assert files == {path.name: path.stat().st_size for path in instruct.glob("*.safetensors")}
    with running(ByHand(tmp_path)) as cluster:
        cluster.start("base", "prefill", tiny_llama, *NAMES)
        cluster.start("instruct", "decode", instruct, *NAMES)
        cluster.wait("base", "instruct")
        assert names_at(cluster.url) == ["tiny", "alias"]
        urls = {name: row["url"] for name, row in cluster.instances().items()}
        for body in (completion(300), completion(200, model="alias")):
            answer = await ask(cluster.url, body)
            assert answer.headers["x-tetri-decode"] == "instruct"
            assert answer.same_as(await ask(urls["instruct"], body))
            assert not answer.same_as(await ask(urls["base"], body))
        assert cluster.instances()["base"]["kv_bytes_sent"] == 0
        told = "base and instruct exchange no KV, since they differ in weights "
        await until(lambda: told in cluster.log.read_text(), "it is logged")
        lines = [line for line in cluster.log.read_text().splitlines() if told in line]
        assert len(lines) == 1
        assert f"({tiny_llama})" in lines[0]
        assert f"({instruct})" in lines[0]

        cluster.parts.pop("instruct").stop()
        cluster.start("copy", "decode", base, *NAMES)
        cluster.wait("copy")
        body = completion(300)
        await until(lambda: not get(f"{cluster.url}/tetri/v1/instances")["apart"], "it is gone")
        answer = await ask(cluster.url, body)
        assert answer.headers["x-tetri-prefill"] == "base"
        assert answer.headers["x-tetri-decode"] == "copy"
        assert answer.same_as(await ask(urls["base"], body))
        sent_bytes = cluster.instances()["base"]["kv_bytes_sent"]
        assert sent_bytes > 0

        url = cluster.instances()["copy"]["url"]
        post(f"{url}/pause")
        post(
            f"{url}/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(instruct)}},
        )
        post(f"{url}/resume")
        await until(lambda: get(f"{cluster.url}/tetri/v1/instances")["apart"], "it is told")
        renewed = await ask(cluster.url, body)
        assert renewed.headers["x-tetri-decode"] == "copy"
        assert renewed.same_as(await ask(url, body))
        assert not renewed.same_as(answer)
        assert cluster.instances()["base"]["kv_bytes_sent"] == sent_bytes


BODIES = [completion(n, max_tokens=12) for n in (3, 64, 129, 300, 700)]


async def answers_of_stock(model: Path, folder: Path, *options: str) -> list[Answer]:
    """Cut like the prompts of instances: sums of few bits depend on that."""
    serve = ("--max-num-batched-tokens", str(CHUNK), *options)
    with running(Stock(model, folder, serve=serve)) as stock:
        found = [await ask(stock.url, body) for body in BODIES]
    assert [each for each in found if not each.token_ids] == []
    return found


async def assert_split(cluster: Cluster, expected: list[Answer], decode: str) -> None:
    await split_once(cluster)
    for body, theirs in zip(BODIES, expected, strict=True):
        mine = await ask(cluster.url, body)
        assert mine.same_as(theirs), f"{mine} != {theirs}"
        assert mine.headers["x-tetri-decode"] == decode != mine.headers["x-tetri-prefill"]
    assert cluster.instances()[decode]["kv_loads_failed"] == 0


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="vLLM: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
)
async def test_kv_of_8_bits_is_exchanged_with_its_kind_only(
    tiny_llama: Path, tmp_path: Path
) -> None:
    quantized = ("--kv-cache-dtype", "fp8")
    expected = await answers_of_stock(tiny_llama, tmp_path, *quantized)
    with running(ByHand(tmp_path)) as cluster:
        cluster.start("fp8", "prefill", tiny_llama, *quantized)
        cluster.start("plain", "decode", tiny_llama)
        cluster.wait("fp8", "plain")
        told = "fp8 and plain exchange no KV, since they differ in kv_cache_dtype fp8 and auto"
        await until(lambda: told in cluster.log.read_text(), "it is logged")
        answer = await ask(cluster.url, BODIES[-1])
        assert answer.headers["x-tetri-decode"] == "plain"
        assert answer.same_as(await ask(cluster.instances()["plain"]["url"], BODIES[-1]))
        assert not answer.same_as(expected[-1])

        cluster.parts.pop("plain").stop()
        cluster.start("equal", "decode", tiny_llama, *quantized)
        cluster.wait("equal")
        await until(lambda: not get(f"{cluster.url}/tetri/v1/instances")["apart"], "it is gone")
        await assert_split(cluster, expected, "equal")


async def test_weights_of_8_bits_compute_kv_that_is_handed_over(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "w8a8")
    expected = await answers_of_stock(model, tmp_path)
    with running(Cluster(model, tmp_path)) as cluster:
        await assert_split(cluster, expected, "decode-0")


async def test_a_phase_has_weights_of_8_bits_if_an_operator_vouches_for_both_checkpoints(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRI_WEIGHTS", "tiny-llama in any precision")
    with running(ByHand(tmp_path)) as cluster:
        cluster.start("exact", "prefill", tiny_llama)
        cluster.start("w8a8", "decode", quantized_model(tmp_path / "w8a8"))
        cluster.wait("exact", "w8a8")
        urls = {name: row["url"] for name, row in cluster.instances().items()}
        await split_once(cluster)
        unlike = []
        for body in BODIES:
            answer = await ask(cluster.url, body)
            assert (answer.headers["x-tetri-prefill"], answer.decode) == ("exact", "w8a8")
            one, other = [await ask(urls[name], body) for name in ("exact", "w8a8")]
            assert answer.token_ids[0] == one.token_ids[0]
            assert len(answer.token_ids) == len(other.token_ids)
            unlike.append(not other.same_as(one))
        assert any(unlike)
        assert cluster.instances()["exact"]["kv_bytes_sent"] > 0
