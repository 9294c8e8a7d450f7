"""What requests would have cost otherwise, from what a router remembers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.regret import compare, verdict
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.workload import draw

COST = {
    "base_s": 0.013, "request_s": 0.00061, "token_s": 2.9e-6, "prompt_s": 0.00055,
    "context_s": 3.5e-7, "confidence": 1.0,
}  # fmt: skip


def history(mode: str, kind: str = "hpld", rate: float = 1.5) -> dict[str, Any]:
    """What a router of two instances would tell that served like the simulator."""
    cluster = ClusterConfig(make_instances(1, 1), mode, handover_base_s=0.004)
    served = simulate(cluster, draw(kind, 60, rate, 3))
    load = {"cost": COST, "blocks_total": 4096, "chunk_tokens": 512, "handover_s": 0.004,
            "handover_token_s": 5e-6}  # fmt: skip
    roles = ("prefill", "decode")
    return {
        "mode": mode,
        "instances": [
            {"id": f"{role}-0", "role": role, "block_size": 16, "sizes_chunks": False, "load": load}
            for role in roles
        ],
        "requests": [
            {
                "route": "split" if each.is_split else "whole",
                "prompt_tokens": each.spec.prompt_tokens, "cached_tokens": 0,
                "output_tokens": each.spec.output_tokens, "predicted": None, "front_s": 0.0,
                "arrival_s": 1000 + each.spec.arrival_s, "ttft_s": each.ttft_s,
                "jct_s": each.jct_s,
            }
            for each in served
        ],
    }  # fmt: skip


def test_the_worse_mode_is_regretted() -> None:
    found = compare(history("split"))
    assert [row["system"] for row in found["systems"][:2]] == ["measured, split", "split"]
    assert found["regret"] > 0.2
    assert found["regret"] == found["systems"][1]["regret"]
    best = min(found["systems"][1:], key=lambda row: row["regret"])
    assert best["regret"] == 0
    assert not best["system"].startswith("split")
    assert f"{best['system']} would have cost least" in verdict(found)


def test_a_simulation_of_itself_is_exact_and_one_of_others_is_not_believed() -> None:
    told = history("whole")
    assert compare(told)["errors"] == pytest.approx({"ttft_mean_s": 0, "jct_mean_s": 0}, abs=0.1)
    assert "believed" not in verdict(compare(told))
    for each in told["requests"]:
        each["ttft_s"] *= 2
    assert "too far for the regret to be believed" in verdict(compare(told))


def test_what_is_outside_engines_counts() -> None:
    told = history("whole")
    for each in told["requests"]:
        each["front_s"] = 0.5
    assert compare(told)["systems"][1]["ttft_mean_s"] > 0.5


def test_too_little_is_known() -> None:
    told = history("whole")
    with pytest.raises(ConfigError, match="19 requests ended well"):
        compare({**told, "requests": told["requests"][:19]})
    told["instances"][1]["load"] = {
        **told["instances"][1]["load"],
        "cost": {**COST, "confidence": 0},
    }
    with pytest.raises(ConfigError, match="decode-0 does not know its step costs"):
        compare(told)


@pytest.fixture
def router() -> Iterator[str]:
    told = json.dumps(history("split")).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_command_prints_a_row_for_each_way(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["regret", "--url", router, "--requests", "30"]) == 0
    shown = capsys.readouterr().out
    assert "30 requests that ended at" in shown
    assert "adaptive, chunks by cost" in shown
    assert "regret: " in shown
    assert cli.main(["regret", "--url", router, "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["systems"]) == 13
    assert cli.main(["regret", "--url", router, "--requests", "0"]) == 2
    assert "requests: 0 must be above 0" in capsys.readouterr().err
