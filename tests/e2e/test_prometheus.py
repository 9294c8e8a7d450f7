"""examples/operate beside a real cluster: Prometheus finds it, reads it and judges it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import yaml

from tests.e2e.client import ask_all
from tests.e2e.cluster import Cluster, answers, get, running
from tests.e2e.prompts import STREAM, completion
from tests.needed import require_command
from vllm_tetri.launch.machine import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

OPERATE = Path(__file__).parents[2] / "examples" / "operate"
SELECTOR = re.compile(r"(?:(?:[a-z]+:)?tetri_\w+(?::\w+)?|\bup\b)(?:\{[^}]*\})?")
SHOWN_S = 60.0  # in which a busy machine shows what was scraped

for command in ("prometheus", "promtool"):
    require_command(command, "prometheus")


class Prometheus:
    """The configuration of the example, for a router at another port and every two seconds."""

    def __init__(self, router: str, folder: Path) -> None:
        for name in ("prometheus.yml", "rules.yml"):
            text = (OPERATE / name).read_text()
            text = text.replace("127.0.0.1:8000", urlsplit(router).netloc)
            text = re.sub(r"(_interval): 5s", r"\1: 2s", text)
            (folder / name).write_text(text)
        address = f"127.0.0.1:{free_port()}"
        self.url, self.log = f"http://{address}", folder / "prometheus.log"
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"],
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "GOMAXPROCS": "1"},
            )  # fmt: skip

    def is_ready(self) -> bool:
        assert self._child.poll() is None, self.log.read_text()[-3000:]
        return answers(f"{self.url}/-/ready")

    def api(self, path: str) -> Any:
        answer = get(f"{self.url}/api/v1/{path}")
        assert answer["status"] == "success"
        return answer["data"]

    def problems(self) -> list[str]:
        """Why targets were not found or scraped, and what rules could not be evaluated."""
        rules = self.api("rules")["groups"][0]["rules"]
        found = [*self.api("targets")["activeTargets"], *rules]
        lines = self.log.read_text().splitlines()
        errors = [line for line in lines if "level=error" in line][-2:]
        return [*errors, *(each["lastError"] for each in found if each.get("lastError"))]

    def shows(self, check: Callable[[], Any], what: str) -> None:
        """Wait until that is true."""
        deadline = time.monotonic() + SHOWN_S
        while not check():
            assert time.monotonic() < deadline, f"not in {SHOWN_S:g} s: {what}; {self.problems()}"
            time.sleep(0.25)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values, as of now."""
        found = self.api(f"query?query={quote(expression)}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def close(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@pytest.fixture(scope="module")
def started(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Prometheus]]:
    """A cluster whose instances Prometheus has found, and that has served a little."""
    folder = tmp_path_factory.mktemp("prometheus")
    roles = ("--prefill", "1", "--decode", "1")
    with (
        running(Cluster(tiny_llama, folder, roles=roles)) as cluster,
        closing(Prometheus(cluster.url, folder)) as prometheus,
    ):
        prometheus.shows(prometheus.is_ready, "it starts")
        prometheus.shows(lambda: len(prometheus.query("up == 1")) == 3, "all are scraped")
        bodies = [completion(30 * n, max_tokens=24, **STREAM) for n in range(1, 9)]
        assert {each.status for each in asyncio.run(ask_all(cluster.url, bodies))} == {200}
        yield cluster, prometheus
        cluster.rest()


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    check("check", "config", str(OPERATE / "prometheus.yml"))


def test_alerts_come_and_go() -> None:
    check("test", "rules", str(Path(__file__).with_name("rules_test.yml")))


def check(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_instances_are_found_and_named_as_in_the_metrics_of_routers(
    started: tuple[Cluster, Prometheus],
) -> None:
    cluster, prometheus = started
    router = urlsplit(cluster.url).netloc
    found = {tuple(sorted(labels.items())) for labels, _ in prometheus.query("up")}
    expected = [
        {"__name__": "up", "job": "tetri-router", "instance": router, "router": router},
        *(
            {"__name__": "up", "job": "tetri-instances", "instance": f"{role}-0", "role": role,
             "model": "tiny"}
            for role in ("prefill", "decode")
        ),
    ]  # fmt: skip
    assert found == {tuple(sorted(labels.items())) for labels in expected}
    joined = "vllm:num_requests_running + on (instance) group_left tetri_instance_running"
    assert {labels["instance"] for labels, _ in prometheus.query(joined)} == {
        "prefill-0",
        "decode-0",
    }
    # vLLM's come from instances only; the sums of the router would count twice.
    of_router = prometheus.query('{job="tetri-router"}')
    assert not [labels for labels, _ in of_router if labels["__name__"].startswith("vllm:")]


def test_every_panel_and_every_rule_has_data(started: tuple[Cluster, Prometheus]) -> None:
    _, prometheus = started
    asked: dict[str, str] = {}
    for panel in json.loads((OPERATE / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m")
            asked[f"{panel['title']}/{target['refId']}"] = expression
    assert len(asked) > 40
    (group,) = yaml.safe_load((OPERATE / "rules.yml").read_text())["groups"]
    for rule in group["rules"]:
        if "record" in rule:
            asked[rule["record"]] = rule["record"]
            asked[rule["record"] + "!"] = rule["expr"]
        else:
            found = SELECTOR.findall(rule["expr"])
            assert found, rule
            asked |= {f"{rule['alert']} {each}": each for each in found}
    missing = dict(asked)

    deadline = time.monotonic() + SHOWN_S
    while missing:
        assert time.monotonic() < deadline, f"no data: {missing}; {prometheus.problems()}"
        missing = {name: asks for name, asks in missing.items() if not prometheus.query(asks)}
        time.sleep(0.25)
    assert prometheus.problems() == []
    assert len(prometheus.api("rules")["groups"][0]["rules"]) == len(group["rules"])
    alerts = prometheus.api("alerts")["alerts"]
    assert [each for each in alerts if each["state"] == "firing"] == []


def test_what_was_served_is_counted(started: tuple[Cluster, Prometheus]) -> None:
    _, prometheus = started
    for expression in (
        'sum(increase(tetri_requests_total{outcome="ok",route="split"}[5m])) > 7',
        "histogram_quantile(0.5, sum by (le) (rate(tetri_request_seconds_bucket[5m]))) > 0",
        "router:tetri_ttft_late:ratio_rate5m >= 0",  # not NaN
        'increase(vllm:generation_tokens_total{role="decode"}[5m]) > 100',
        'max(increase(tetri_instance_kv_bytes_sent_total{instance="prefill-0"}[5m])) > 0',
        "instance:tetri_handover_1000_tokens:seconds > 0",
    ):
        prometheus.shows(lambda asks=expression: prometheus.query(asks), expression)


def test_a_silent_instance_stays_a_target_and_is_told(started: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = started
    engine = cluster.engine("decode-0")
    engine.suspend()
    try:
        silent = ("TetriInstanceSilent", "decode-0")
        prometheus.shows(lambda: silent in alerts(prometheus), "the alert")
        targets = prometheus.api("targets?state=active")["activeTargets"]
        assert "decode-0" in [each["labels"]["instance"] for each in targets]
    finally:
        engine.resume()
    back = 'tetri_instance_state{instance="decode-0",state="ready"} == 1'
    prometheus.shows(lambda: prometheus.query(back), "decode-0 is back")


def alerts(prometheus: Prometheus) -> list[tuple[str, str | None]]:
    """Names of alerts that are pending or firing, and of their instances."""
    found = [each["labels"] for each in prometheus.api("alerts")["alerts"]]
    return [(labels["alertname"], labels.get("instance")) for labels in found]
