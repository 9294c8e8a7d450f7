"""`vllm bench serve` and aiperf as suites, whose loads pass when no request failed, and
schemathesis."""

from __future__ import annotations

import json
import random
import shlex
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.suites import catalogue
from tests.suites.gate import PASSED
from tests.suites.process import Place, Server, run

LIMIT_S = 240
_WORDS = ("request", "prompt", "token", "block", "cache", "answer", "how", "why", "write", "list")


def run_loads(place: Place, server: Server) -> dict[str, str]:
    """Outcomes of the loads of `vllm bench serve`, by name."""
    found = {}
    conversations = _conversations(place.logs / "conversations.json")
    for name, options in catalogue.LOADS.items():
        result = place.logs / f"bench-{name}.json"
        result.unlink(missing_ok=True)
        words = [
            str(place.commands / "vllm"), "bench", "serve", "--base-url", server.url,
            "--model", catalogue.NAMES[0], "--tokenizer", catalogue.MODEL, "--seed", "0",
            "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
            *shlex.split(options.format(conversations=conversations)),
        ]  # fmt: skip
        run(words, place.logs / f"bench-{name}.log", LIMIT_S, place.variables())
        facts = json.loads(result.read_text()) if result.exists() else {}
        answered, wanted = facts.get("completed", 0), _number_after("--num-prompts", options)
        found[name] = PASSED if answered == wanted else f"{answered} of {wanted}"
    return found


def run_aiperf(place: Place, server: Server) -> dict[str, str]:
    """Outcomes of aiperf's loads, by name."""
    found = {}
    for name, options in catalogue.AIPERF.items():
        folder = place.logs / f"aiperf-{name}"
        words = [
            str(place.cache / "aiperf" / "bin" / "aiperf"), "profile", "--url", server.url,
            "--model", catalogue.NAMES[0], "--tokenizer", catalogue.MODEL, "--ui", "none",
            "--endpoint-type", "chat", "--streaming",
            "--artifact-dir", str(folder), *shlex.split(options),
        ]  # fmt: skip
        status = run(words, place.logs / f"aiperf-{name}.log", LIMIT_S, place.variables())
        reports = sorted(folder.rglob("profile_export_aiperf.json"))
        found[name] = f"status {status}"
        if not status and reports:
            found[name] = _verdict(json.loads(reports[-1].read_text()), options)
    return found


def run_multi_turn(place: Place, server: Server) -> dict[str, str]:
    """The outcome of vLLM's multi-turn benchmark."""
    scripts, folder = place.cache / "src" / "vllm" / "multi_turn", place.logs / "multi-turn"
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text(" ".join(random.Random(0).choices(_WORDS, k=20_000)))
    asked = {**catalogue.MULTI_TURN, "text_files": [str(folder / "words.txt")]}
    (folder / "conversations.json").write_text(json.dumps(asked))
    result = folder / "stats.json"
    result.unlink(missing_ok=True)
    words = [
        sys.executable, str(scripts / "benchmark_serving_multi_turn.py"), "--url", server.url,
        "--model", catalogue.MODEL, "--served-model-name", catalogue.NAMES[0],
        "--input-file", str(folder / "conversations.json"), "--stats-json-output", str(result),
        *shlex.split(catalogue.MULTI_TURN_OPTIONS),
    ]  # fmt: skip
    status = run(words, folder / "log", LIMIT_S, place.variables(), folder)
    answered = len(json.loads(result.read_text())) if result.exists() else 0
    is_whole = not status and answered == catalogue.MULTI_TURN_ANSWERS
    return {"conversations": PASSED if is_whole else f"status {status}, {answered} answers"}


def run_schemathesis(place: Place, server: Server) -> dict[str, str]:
    """Outcomes of schemathesis by operation, as ``openapi::POST /v1/completions``."""
    report, log = place.logs / "schemathesis.xml", place.logs / "schemathesis.log"
    report.unlink(missing_ok=True)
    words = [
        str(place.cache / "venv" / "bin" / "schemathesis"), "run", f"{server.url}/openapi.json",
        "--report-junit-path", str(report), *shlex.split(catalogue.SCHEMATHESIS),
    ]  # fmt: skip
    run(words, log, LIMIT_S, place.variables(), report.parent)
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    return {
        f"openapi::{each.attrib['name']}": next((found.tag for found in each), PASSED)
        for each in cases
    }


def _verdict(report: dict[str, Any], options: str) -> str:
    answered = report.get("request_count", {}).get("avg", 0)
    failed = report.get("error_request_count", {}).get("avg", 0)
    wanted = _number_after("--request-count", options)
    return PASSED if answered == wanted and not failed else f"{answered} of {wanted}"


def _number_after(option: str, options: str) -> int:
    words = options.split()
    return int(words[words.index(option) + 1])


def _conversations(path: Path) -> Path:
    """A file as ShareGPT's: conversations with prompts and answers of many lengths."""
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(_WORDS, k=min(60, 5 + int(rng.expovariate(1 / 20)))))

    rows = [
        {"conversations": [{"from": "human", "value": text()}, {"from": "gpt", "value": text()}]}
        for _ in range(200)
    ]
    path.write_text(json.dumps(rows))
    return path
