"""Run other people's tests through `vllm-tetri up`, and compare with what stock vLLM passes.

    python -m tests.suites.run [SUITE...]            # gate: what stock passes must pass
    python -m tests.suites.run --record [SUITE...]   # what stock passes: stock-VERSION.json
    python -m tests.suites.run --more                # more of vLLM's files
    python -m tests.suites.run --only PART           # only vLLM's files whose path has PART

`.ci/install suites` fetches the sources and tools first. Sources of other projects stay as they
are; the command `vllm` that their tests start is `tests/suites/shim.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.suites import catalogue
from tests.suites.gate import compare, is_in, passed, read_allowed, table
from tests.suites.hub import make_hub
from tests.suites.loads import run_aiperf, run_loads, run_multi_turn, run_schemathesis
from tests.suites.process import Place, Server, run_pytest

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / ".cache" / "suites"
DIFFERENCES = HERE / "differences.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(catalogue.SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {names} (default: all)")
    parser.add_argument("--record", action="store_true", help="run stock, and record what passes")
    parser.add_argument("--more", action="store_true", help="all of vLLM's files that are listed")
    parser.add_argument("--only", default="", metavar="PART", help="files whose path has PART")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(catalogue.SUITES):
        parser.error(f"no suite has the name {', '.join(sorted(unknown))}")
    version = metadata.version("vllm").partition("+")[0]
    record = HERE / f"stock-{version}.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    if not known and not options.record:
        parser.error(f"what stock vLLM {version} passes is not recorded yet: add --record")
    files = {
        suite: [each for each in of_suite if options.only in each]
        for suite, of_suite in catalogue.files(options.more).items()
        if suite in (options.suites or catalogue.SUITES)
    }
    files = {suite: of_suite for suite, of_suite in files.items() if of_suite}
    place = Place(CACHE, make_hub(CACHE / "hub"), "stock" if options.record else "split")
    began = time.monotonic()
    if options.record:
        for suite, outcomes in _run(place, files):
            known = json.loads(record.read_text()) if record.exists() else {}
            kept = [test for test in known.get(suite, ()) if not is_in(test, files[suite])]
            known[suite] = sorted({*kept, *passed(outcomes)})
            record.write_text(json.dumps(known, indent=0) + "\n")
            print(f"{suite}: {len(known[suite])} recorded")
        return 0
    expected = {
        suite: [test for test in known.get(suite, ()) if is_in(test, of_suite)]
        for suite, of_suite in files.items()
    }
    wanted = {suite: tests for suite, tests in expected.items() if tests}
    allowed = read_allowed(DIFFERENCES.read_text())
    outcomes = dict(_run(place, wanted))
    rows = compare(expected, outcomes, allowed)
    if again := {row.suite: list(row.unexplained) for row in rows if row.unexplained}:
        print(f"{sum(map(len, again.values()))} tests differ, and run once more", flush=True)
        for suite, more in _run(place, again):
            outcomes[suite] = {**outcomes[suite], **more}
        rows = compare(expected, outcomes, allowed)
    print(f"{table(rows)}\n{time.monotonic() - began:.0f} s; logs: {place.logs}")
    return int(any(row.unexplained or not row.stock for row in rows))


def _run(place: Place, tests: dict[str, list[str]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Suites and outcomes of their tests, or files. All but the first suite share one server."""
    if "vllm-server" in tests:
        yield "vllm-server", run_pytest(place, "vllm-server", "vllm", tests["vllm-server"])
    shared = [suite for suite in tests if suite != "vllm-server"]
    if shared:
        with Server(place) as server:
            for suite in shared:
                yield suite, _run_on(server, place, suite, tests[suite])


def _run_on(server: Server, place: Place, suite: str, tests: list[str]) -> dict[str, str]:
    if suite == "vllm-nixl":
        ports = {
            "PREFILL_PORT": server.prefill,
            "DECODE_PORT": server.decode,
            "PROXY_PORT": server.port,
        }
        return run_pytest(place, suite, "vllm", tests, {k: str(v) for k, v in ports.items()})
    if suite == "openai-python":
        url = {"TEST_API_BASE_URL": f"{server.url}/v1"}
        return run_pytest(place, suite, "openai", tests, url, catalogue.OPENAI_CLIENTS)
    by_suite = {
        "aiperf": run_aiperf, "schemathesis": run_schemathesis,
        "bench-serve": run_loads, "multi-turn": run_multi_turn,
    }  # fmt: skip
    return by_suite[suite](place, server)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end with their contexts
    sys.exit(main())
