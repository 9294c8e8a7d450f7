"""Compare a cluster with stock vLLM, one tiny model per family, and write down what works.

    python -m tests.models.run [FAMILY...]               # every column: hours
    python -m tests.models.run --only split [FAMILY...]  # one start of both per family: two minutes
    python -m tests.models.run --write                   # nothing but the table in README.md

Verdicts go to `tests/models/results.json` one by one, so that a run can be broken off:

equal       answers are those of stock, and KV went from one instance to the other
aggregated  they are those of stock, and one instance served each request whole
refused     an instance does not start, or does not answer, and says why
unstable    stock answers most requests otherwise when it is asked again
differs     anything else: a defect
not on CPU  stock vLLM itself does not start
no cache    stock vLLM found nothing in its prefix cache
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.cluster import Cluster, Stock, answers, side_by_side
from tests.e2e.compare import Reply, difference, merged, replies_to, reply_to
from tests.e2e.prompts import chat, completion, token_prompt
from tests.models.families import ADAPTER, FAMILIES, Family
from tests.tiny_vision import picture

RESULTS = Path(__file__).parent / "results.json"
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
VISION = ROOT / ".cache" / "torchvision"  # `make models` puts it there
BEGIN, END = "<!--models-->\n", "<!--end-->\n"
COLUMNS = {
    "split": "split", "prefix": "prefix cache", "tp2": "TP 2", "lora": "LoRA", "spec": "n-gram",
}  # fmt: skip
SERVE: dict[str, tuple[str, ...]] = {
    "split": (),  # fills the column `prefix` too
    "tp2": ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
    "lora": ("--enable-lora", "--max-lora-rank", "8", "--lora-modules"),
    "spec": (
        "--speculative-config",
        '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}',
    ),
}
SHARED = token_prompt(900)  # how some prompts begin
TOLERANCE = 1e-3  # of log probabilities: sums in float32 depend on how prompts are cut
GENERIC = (
    "Engine core initialization", "root cause above", "WorkerProc", "ended", "exited",
    "to be inspected", "CalledProcessError", "raised in subprocess", "EngineDeadError",
)  # fmt: skip
Asked = tuple[dict[str, Any], Reply, Reply]  # a request; what the cluster and stock said
Verdict = dict[str, Any]


def look(num_words: int, *images: int) -> dict[str, Any]:
    """A request with images, after text."""
    body = chat(num_words, logprobs=True, top_logprobs=3)
    text = {"type": "text", "text": body["messages"][0]["content"]}
    body["messages"][0]["content"] = [text, *(picture(each, 8, 6) for each in images)]
    return body


def bodies(run: str, sees: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Thirty requests, in three groups; 36 to a model that sees."""
    said = {"logprobs": 3, "return_tokens_as_token_ids": True}
    seeded = {"temperature": 0.8, "top_p": 0.9, **said}
    lengths = (3, 31, 64, 65, 127, 128, 129, 257, 513, 1025, 1500)
    groups = {
        "alone": [
            *(completion(n, **said) for n in lengths),
            *(completion(n, seed=n, **seeded) for n in (40, 70, 100, 127)),
        ],
        "prefix": [
            completion(n, **said) | {"prompt": [*SHARED, *token_prompt(n)]}
            for n in (3, 40, 129, 300, 500)
        ],
        # None is seeded: where the prompt of such a one is cut, stock vLLM dies on CPU.
        "together": [completion(100 + 29 * n, max_tokens=160, **said) for n in range(10)],
    }
    if sees:
        groups["alone"] += [look(30, 1), look(100, 2, 3), look(60, 1)]
        groups["together"] += [look(20, 4), look(40, 5), look(80, 5, 6)]
    for number, body in enumerate(each for group in groups.values() for each in group):
        if run == "lora" and number % 2:
            body["model"] = ADAPTER
        if run == "spec" and "prompt" in body:  # its last tokens have come before: drafts
            body["prompt"] = (body["prompt"][:50] * 40)[: len(body["prompt"])]
            for sampled in ("seed", "temperature", "top_p"):  # then stock does not repeat itself
                body.pop(sampled, None)
            body["temperature"] = 0
    return groups


async def judge(
    family: Family, run: str, folder: Path, more: tuple[str, ...] = ()
) -> dict[str, Verdict]:
    """The verdicts that one start of stock and of a cluster gives, by column; `more` are options of
    both."""
    model = family.make()
    adapter = [f"{ADAPTER}={family.make_adapter()}"] if run == "lora" else []
    serve = (
        "--kv-cache-memory-bytes", str(family.pool_mib << 20), "--enable-prompt-tokens-details",
        *family.serve, *SERVE[run], *adapter, *more,
    )  # fmt: skip
    stock = Stock(model, folder, serve=serve)
    serve = (*serve, "--tetri-decode-policy", "greedy", "--tetri-transfer-timeout", "30")
    cluster = Cluster(model, folder, serve=serve)
    try:
        with side_by_side(stock, cluster):
            try:
                return await compare(stock, cluster, bodies(run, family.sight is not None), run)
            except (AssertionError, aiohttp.ClientError) as problem:
                word = "differs" if answers(f"{stock.url}/health") else "not on CPU"
                why = str(problem)[:400] if word == "differs" else reason(stock.log)
    except AssertionError as problem:
        is_stock = "stock vLLM is not ready" in str(problem)
        word = "not on CPU" if is_stock else "refused"
        why = reason(*([stock.log] if is_stock else [cluster.log, *cluster.logs.glob("*")]))
    return {run: {"verdict": word, "why": why}}


def reason(*logs: Path) -> str:
    """The last error that says something."""
    text = "\n".join(each.read_text(errors="replace") for each in logs)
    said = re.findall(r"\b(?:\w*(?:Error|Exception|Refused)|error): .+", text)
    said = [each for each in said if not any(part in each for part in GENERIC)]
    return said[-1][:300] if said else text[-300:]


async def compare(
    stock: Stock, cluster: Cluster, groups: dict[str, list[Any]], run: str
) -> dict[str, Verdict]:
    """Ask both for everything; the cluster must be at rest afterwards."""
    found: dict[str, list[Asked]] = {}
    for group, asked in groups.items():
        if group == "together":
            both = [await replies_to(each.url, asked) for each in (cluster, stock)]
        else:
            both = [[await reply_to(each.url, body) for body in asked] for each in (cluster, stock)]
        found[group] = list(zip(asked, *both, strict=True))
    verdict = await judged([*found["alone"], *found["together"]], stock)
    cluster.audit()
    entries = cluster.instances().values()
    for field in ("kv_bytes_sent", "preemptions", "kv_loads_failed"):
        verdict[field] = sum(entry[field] for entry in entries)
    if run != "split":
        return {run: verdict}
    prefix = await judged(found["prefix"], stock)
    _, *both = zip(*found["prefix"], strict=True)
    ours, theirs = prefix["cached_tokens"] = [sum(map(cached, each)) for each in both]
    if not (ours and theirs):
        prefix["verdict"] = "differs" if theirs else "no cache"
    return {run: verdict, "prefix": prefix}


async def judged(asked: list[Asked], stock: Stock) -> Verdict:
    """One verdict on these answers. Where stock answers otherwise when it is asked again, nothing
    is judged; such answers are counted."""
    wrong, apart, own = [], 0.0, 0
    for body, ours, theirs in asked:
        assert theirs.status == 200, theirs.raw
        if ours.status != 200:
            word = "refused" if ours.status in (400, 501) else "differs"
            return {"verdict": word, "why": f"{ours.status}: {ours.json['error']['message']}"}
        mine, other = said(ours), said(theirs)
        if found := difference(mine, other, tolerance=TOLERANCE):
            if difference(said(await reply_to(stock.url, body)), other, tolerance=TOLERANCE):
                own += 1
            else:
                wrong.append(f"{other['usage']['prompt_tokens']} tokens: {found[:200]}")
        else:
            pairs = zip(logprobs(mine), logprobs(other), strict=True)
            apart = max(apart, *(abs(one - another) for one, another in pairs))
    split = sum(r.headers["x-tetri-prefill"] != r.headers["x-tetri-decode"] for _, r, _ in asked)
    word = "differs" if wrong else "equal" if split else "aggregated"
    word = "unstable" if 2 * own > len(asked) else word
    counts = {"verdict": word, "asked": len(asked), "split": split, "apart": apart}
    return counts | ({"stock_differs": own} if own else {}) | ({"wrong": wrong} if wrong else {})


def said(reply: Reply) -> Any:
    """What is compared: all but how many tokens were found in a cache, and the order of the most
    likely tokens, where some are equally likely."""
    whole = merged(reply)
    whole["usage"].pop("prompt_tokens_details", None)
    for choice in whole["choices"]:
        tops = choice["logprobs"].get("top_logprobs") or []
        choice["logprobs"]["top_logprobs"] = [dict(sorted(each.items())) for each in tops]
    return whole


def logprobs(answer: Any) -> list[float]:
    found = answer["choices"][0]["logprobs"]
    return found.get("token_logprobs") or [each["logprob"] for each in found["content"]]


def cached(reply: Reply) -> int:
    details = reply.json["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def table(results: dict[str, dict[str, Verdict]]) -> str:
    """The verdicts as Markdown; without spaces, which would count as words."""
    rows = [["model", *COLUMNS.values()], ["-"] * (1 + len(COLUMNS))]
    for name, found in ((name, results[name]) for name in FAMILIES if name in results):
        rows.append([name, *(found.get(column, {}).get("verdict", "") for column in COLUMNS)])
    return "".join(f"|{'|'.join(row)}|\n" for row in rows)


def write() -> None:
    """Replace the table in the README."""
    head, _, rest = README.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    README.write_text(f"{head}{BEGIN}{table(json.loads(RESULTS.read_text())['models'])}{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--only", choices=SERVE, action="append", help="columns")
    parser.add_argument("--write", action="store_true", help="write the table, run nothing")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no family has the name {', '.join(sorted(unknown))}: {', '.join(FAMILIES)}")
    paths = filter(None, (str(VISION), os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in [] if options.write else options.families or FAMILIES:
        for run in options.only or SERVE:
            began = time.monotonic()
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-{run}-"))  # keeps the logs
            found = asyncio.run(judge(FAMILIES[name], run, folder))
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
            results["vllm"] = metadata.version("vllm")
            results["models"].setdefault(name, {}).update(found)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(
                f"{name}: {json.dumps(found)} {time.monotonic() - began:.0f} s, {folder}",
                flush=True,
            )
    write()


if __name__ == "__main__":
    main()
