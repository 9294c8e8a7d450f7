"""What requests would have cost otherwise, from what a router remembers."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually
from vllm_tetri import cli
from vllm_tetri.errors import INTERRUPTED, ConfigError
from vllm_tetri.regret import Tuner, compare, verdict
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
            "handover_token_s": 5e-6, "kv_bytes_sent": 1}  # fmt: skip
    roles = ("prefill", "decode")
    return {
        "mode": mode, "mode_s": 1000.0,
        "instances": [
            {"id": f"{role}-0", "role": role, "block_size": 16, "sizes_chunks": False,
             "step_limits": (2048, 256, 16), "load": load, "model": "m", "arena_tokens": 16384}
            for role in roles
        ],
        "requests": [
            {
                "route": "split" if each.is_split else "whole", "model": "m",
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
    told = history("whole", rate=1.0)
    assert compare(told)["errors"] == pytest.approx({"ttft_mean_s": 0, "jct_mean_s": 0}, abs=0.02)
    assert "believed" not in verdict(compare(told))
    for each in told["requests"]:
        each["ttft_s"] *= 2
    assert "too far for the regret to be believed" in verdict(compare(told))


def test_what_is_outside_engines_counts() -> None:
    told = history("whole", rate=1.0)
    for each in told["requests"]:
        each["front_s"] = 0.5
    assert compare(told)["systems"][1]["ttft_mean_s"] > 0.5


def test_limits_of_a_step_are_those_of_each_instance() -> None:
    told = history("whole", "lphd")
    told["requests"] = told["requests"][:25]
    jct_s = []
    for limits in ((2048, 256, 16), (32, 256, 16), (2048, 1, 16), (2048, 256, 512)):
        for each in told["instances"]:
            each |= {"sizes_chunks": True, "step_limits": limits}
        jct_s.append(compare(told)["systems"][1]["jct_mean_s"])
    assert len(set(jct_s)) == 4
    assert jct_s[2] > 2 * jct_s[0], "one after the other"


@pytest.mark.parametrize("limits", [(0, 256, 16), (2048, -1, 16), (2048, 256, 0)])
def test_impossible_limits_of_a_step_are_an_error(limits: tuple[int, int, int]) -> None:
    told = history("whole")
    told["instances"][1]["step_limits"] = limits
    with pytest.raises(ConfigError, match="decode-0 tells impossible step limits"):
        compare(told)


def test_too_little_is_known() -> None:
    told = history("whole", rate=1.0)
    with pytest.raises(ConfigError, match="19 requests ended well"):
        compare({**told, "requests": told["requests"][:19]})
    expected = compare(told)
    unused = {**told["instances"][1]["load"], "cost": {**COST, "base_s": 9.0, "confidence": 0}}
    told["instances"][1]["load"] = unused
    assert compare(told) == expected  # as the other one
    told["instances"][0]["load"] = unused
    with pytest.raises(ConfigError, match="no instance knows its step costs"):
        compare(told)


def test_instances_and_requests_of_other_models_have_nothing_to_do_with_it() -> None:
    told = history("whole", rate=1.0)
    expected = compare(told)
    slow = {**told["instances"][0], "model": "large", "id": "l", "step_limits": (1, 1, 1)}
    told["instances"].append(slow)
    told["requests"] += [{**each, "model": "large"} for each in told["requests"][:30]]
    assert compare(told) == expected


def test_what_was_never_sent_tells_no_cost_of_hand_overs() -> None:
    told = history("split", rate=1.0)
    expected = compare(told)
    guess = {**told["instances"][0]["load"], "handover_s": 3.0, "kv_bytes_sent": 0}
    told["instances"][1]["load"] = guess
    assert compare(told)["systems"][1] == expected["systems"][1]


def test_arenas_are_as_large_as_those_of_the_instances() -> None:
    told = history("adaptive", "mixed", rate=1.0)
    split = []
    for tokens in (64, 1 << 18):
        for row in told["instances"]:
            row["arena_tokens"] = tokens
        split.append(compare(told)["systems"][1]["split"])
    assert split[0] < split[1]


def look(
    mode: str,
    measured: float,
    error: float = 0.0,
    num: int = 100,
    age_s: float = 9.0,
    **costs: float,
) -> Any:
    """What `compare` says of a router: a measured cost, and the simulated ones of modes."""

    def row(cost: float, **names: Any) -> dict[str, Any]:
        return {"ttft_mean_s": cost, "jct_mean_s": cost, "jct_p99_s": cost, **names}

    rows = [row(cost, mode=name, is_usual=True) for name, cost in costs.items()]
    cheap = row(0.1, mode="split", is_usual=False)  # other chunks, which no order sets
    return {"mode": mode, "num_requests": num, "mode_s": age_s,
            "systems": [row(measured), *rows, cheap],
            "errors": {"ttft_mean_s": -error, "jct_mean_s": 0.0}}  # fmt: skip


def modes(*looks: Any) -> list[str]:
    """The modes that are ordered, look by look."""
    tuner = Tuner()
    return [change.mode if (change := tuner.decide(each)) else "" for each in looks]


def test_a_mode_is_set_when_two_looks_find_it_cheaper() -> None:
    better, equal = look("split", 1, split=1, whole=0.9), look("split", 1, split=1, whole=0.96)
    assert modes(better, better) == ["", "whole"]
    assert modes(equal, equal, equal) == [""] * 3
    assert modes(equal, better, equal, better) == [""] * 4
    other = look("split", 1, split=1, whole=1, adaptive=0.5)
    assert modes(better, other, better, better) == ["", "", "", "whole"]


def test_a_simulation_that_is_far_off_sets_nothing() -> None:
    better, off = (look("split", 1, error=each, split=1, whole=0.5) for each in (0.2, 0.3))
    assert modes(better, off, better, better) == ["", "", "", "whole"]
    alone = look("adaptive", 1, whole=0.5)  # one instance serves in one way only
    assert modes(alone, alone) == ["", ""]


def test_a_mode_that_proves_worse_is_left_again_for_some_time() -> None:
    better = look("split", 1, split=1, whole=0.5)
    worse = look("whole", 1.2, split=1, whole=0.5)
    barred = ["", "whole", "split", *[""] * 12, "whole"]
    assert modes(better, better, worse, *[better] * 13) == barred
    longer = look("whole", 1.2, split=2.4, whole=1.2)  # other requests, which all cost more
    assert modes(better, better, longer, worse) == ["", "whole", "", ""]
    few = look("whole", 4, num=99, split=1, whole=0.5)
    short = look("whole", 9, age_s=17, split=1, whole=0.5)  # the long ones have not ended
    assert modes(better, better, short, worse) == ["", "whole", "", "split"]
    assert modes(better, better, few, few, worse) == ["", "whole", "", "", "split"]
    slow = look("split", 2, split=1, whole=0.5)  # everything takes twice as long as simulated
    assert modes(slow, slow, look("whole", 1.9, split=1, whole=0.5)) == ["", "whole", ""]


def test_every_some_seconds_the_router_is_told_and_set_and_may_be_away(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with serving("split") as (url, orders):
        words = [sys.executable, "-m", "vllm_tetri.cli", "regret", "--url", url]
        child = subprocess.Popen(
            [*words, "--every", "0.2", "--set-mode", "--json", str(file)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(4)]
        eventually(lambda: len(orders) >= 3, 30)
    while "0 requests" in (last := child.stdout.readline()):
        pass
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == INTERRUPTED
    assert url in last, "the router is away, and looked for again"
    assert json.loads(file.read_text())["regret"] == orders[0][1]["regret"]
    assert [path for path, _ in orders[:3]] == [f"/tetri/v1/{each}" for each in
                                                ("regret", "regret", "mode")]  # fmt: skip
    assert orders[0][1]["regret"] > 0.2
    assert orders[0][1]["error"] < 0.1
    assert orders[2][1]["mode"] in ("whole", "adaptive")
    assert lines[0].startswith("regret: ")
    assert lines[2].startswith("mode split -> ")
    assert "0 requests ended well" in lines[3]  # since then


def test_setting_the_mode_needs_a_period(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["regret", "--set-mode"]) == 2
    assert "--set-mode needs --every" in capsys.readouterr().err
    assert cli.main(["regret", "--set-mode", "--every", "9", "--requests", "99"]) == 2
    assert "--set-mode needs --requests 100" in capsys.readouterr().err


@pytest.fixture
def router() -> Iterator[str]:
    with serving("split") as (url, _):
        yield url


@contextmanager
def serving(mode: str) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A router that tells of its requests, and the orders that it gets."""
    told, orders = history(mode), list[tuple[str, Any]]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            orders.append((self.path, json.loads(self.rfile.read(size))))
            if self.path.endswith("/mode"):  # nothing was served in it yet
                told.update(orders[-1][1], requests=[])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", orders
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
