"""Make dashboard.json for Grafana 10 or newer: `python examples/operate/dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _WIDTH, _HEIGHT = 4, 6, 7  # of charts, on Grafana's grid of 24 columns

Query = tuple[str, str]  # and its legend
Chart = tuple[str, str, tuple[Query, ...]]  # title, Grafana's name of the unit, queries


def _chart(title: str, unit: str, *queries: Query) -> Chart:
    return title, unit, queries


def _rate(name: str, *by: str, legend: str = "", over: str = "sum") -> Query:
    """Query what a counter grows by in a second, by labels, `over` routers."""
    labels = " ".join(f"{{{{{label}}}}}" for label in by)
    return f"{over} by ({', '.join(by)}) (rate({name}[$__rate_interval]))", legend or labels


def _each(name: str, divisor: str = "") -> Query:
    """Query a number of every instance; several routers say the same."""
    over = f" / max by (instance) ({divisor})" if divisor else ""
    return f"max by (instance) ({name}){over}", "{{instance}}"


def _each_rate(name: str) -> Query:
    return _each(f"rate({name}[$__rate_interval])")


def _sum_of_each(name: str, legend: str) -> Query:
    """Query what a counter of every instance grows by in a second, together."""
    return f"sum({_each_rate(name)[0]})", legend


def _quantile(quantile: float, name: str, *by: str) -> Query:
    rates, labels = _rate(f"{name}_bucket", "le", *by)
    legend = labels.replace("{{le}}", f"p{quantile * 100:g}")
    return f"histogram_quantile({quantile}, {rates})", legend


_TTFT, _TOTAL = "tetri_time_to_first_token_seconds", "tetri_request_seconds"
_ITL, _QUEUE = "vllm:inter_token_latency_seconds", "vllm:request_queue_time_seconds"
_FETCHED, _IN_POOL = (
    "tetri_instance_fetched_tokens_total",
    "tetri_instance_kv_pool_hit_tokens_total",
)
_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_LATE, _STATE = "router:tetri_ttft_late:ratio_rate", 'tetri_instance_state{state="ready"}'
_RANK = "{{instance}} {{engine}}"  # ranks of data parallelism
ROWS: dict[str, tuple[Chart, ...]] = {
    "Requests": (
        _chart("Requests by how they ended", "reqps", _rate("tetri_requests_total", "outcome")),
        _chart("Requests by how they were served", "reqps", _rate("tetri_requests_total", "route")),
        _chart("Requests in flight", "short", ("tetri_requests_in_flight", "{{router}}")),
        _chart(
            "Failed and refused",
            "percentunit",
            ("router:tetri_failed:ratio_rate5m", "failed {{router}}"),
            ("router:tetri_refused:ratio_rate5m", "refused {{router}}"),
        ),
        _chart("Not as planned", "reqps", _rate("tetri_fallbacks_total", "reason")),
        _chart(
            "After faults",
            "reqps",
            _rate("tetri_retries_total", legend="retries"),
            _rate("tetri_crashes_with_request_total", legend="in a crash"),
            _rate("tetri_poison_requests_refused_total", legend="poison, refused"),
        ),
        _chart("Broken streams", "reqps", _rate("tetri_streams_broken_total", "outcome")),
        _chart("At their limit", "reqps", _each_rate("tetri_instance_busy_responses_total")),
    ),
    "Latency": (
        _chart("Time to first token", "s", _quantile(0.5, _TTFT), _quantile(0.99, _TTFT)),
        _chart("Time to last token", "s", _quantile(0.5, _TOTAL), _quantile(0.99, _TOTAL)),
        _chart("Between tokens", "s", _quantile(0.5, _ITL, "role"), _quantile(0.99, _ITL, "role")),
        _chart(
            "First tokens over 2.5 s",
            "percentunit",
            (f"{_LATE}5m", "5 minutes {{router}}"),
            (f"{_LATE}1h", "1 hour {{router}}"),
        ),
        _chart("First tokens", "reqps", _rate("tetri_first_tokens_total", "how")),
    ),
    "Instances": (
        _chart(
            "Instances", "short", ("max by (role, state) (tetri_instances)", "{{role}} {{state}}")
        ),
        _chart("Running requests", "short", _each("tetri_instance_running")),
        _chart("Waiting requests", "short", _each("tetri_instance_waiting")),
        _chart("Tokens to compute", "short", _each("tetri_instance_queued_prefill_tokens")),
        _chart("Prompt tokens", "cps", _each_rate("tetri_instance_prompt_tokens_done_total")),
        _chart("Output tokens", "cps", _each_rate("tetri_instance_output_tokens_done_total")),
        _chart("Last step", "s", _each("tetri_instance_step_seconds")),
        _chart("Cores in use", "short", _each_rate("tetri_instance_cpu_seconds_total")),
    ),
    "KV and transfer": (
        _chart(
            "KV blocks in use",
            "percentunit",
            _each("tetri_instance_blocks_used", "tetri_instance_blocks_total"),
        ),
        _chart(
            "Receive arena in use",
            "percentunit",
            _each("tetri_instance_arena_used_bytes", "tetri_instance_arena_total_bytes"),
        ),
        _chart("KV sent", "Bps", _each_rate("tetri_instance_kv_bytes_sent_total")),
        _chart(
            "Hand-over of 1,000 tokens", "s", _each("instance:tetri_handover_1000_tokens:seconds")
        ),
        _chart(
            "Prompt tokens that are known",
            "cps",
            _rate("tetri_cached_prompt_tokens_total", legend="cached"),
            _sum_of_each(_FETCHED, "fetched"),
            _sum_of_each(_IN_POOL, "in a pool"),
        ),
        _chart("Fetches", "cps", _rate("tetri_fetches_total", "outcome")),
        _chart(
            "KV lost",
            "cps",
            _sum_of_each("tetri_instance_kv_loads_failed_total", "loads failed"),
            _sum_of_each("tetri_instance_kv_gone_total", "kept prefix lost"),
            _sum_of_each("tetri_instance_fetches_failed_total", "fetches failed"),
        ),
        _chart("Leftovers", "short", _each("tetri_instance_leftovers")),
    ),
    "Roles and moves": (
        _chart("Roles", "short", (f"max by (instance, role) ({_STATE})", "{{instance}} {{role}}")),
        _chart(  # every router sees every flip
            "Flips", "cps", _rate("tetri_flips_total", "source", "target", "outcome", over="max")
        ),
        _chart("Drain before a flip", "s", _quantile(0.99, "tetri_flip_drain_seconds")),
        _chart("Moves", "cps", _rate("tetri_moves_total", "reason", "outcome")),
        _chart("Seconds of moves", "s", _quantile(0.99, "tetri_move_seconds", "part")),
        _chart("Gap of resumed streams", "s", _quantile(0.99, "tetri_resume_gap_seconds")),
        _chart("Copies of outputs", "cps", _rate("tetri_mirrors_total", "outcome")),
    ),
    "vLLM": (
        _chart("Running", "short", ("vllm:num_requests_running", _RANK)),
        _chart("Waiting", "short", ("vllm:num_requests_waiting", _RANK)),
        _chart("KV cache", "percentunit", ("vllm:kv_cache_usage_perc", _RANK)),
        _chart(
            "Prefix cache",
            "percentunit",
            _each(f"rate({_HITS}[$__rate_interval])", f"rate({_QUERIES}[$__rate_interval])"),
        ),
        _chart("Queue", "s", _quantile(0.5, _QUEUE, "role"), _quantile(0.99, _QUEUE, "role")),
        _chart("Tokens per step", "short", _quantile(0.5, "vllm:iteration_tokens_total", "role")),
        _chart("Ended", "reqps", _rate("vllm:request_success_total", "role", "finished_reason")),
        _chart("Preemptions", "cps", _each_rate("vllm:num_preemptions_total")),
    ),
}


def text() -> str:
    """Return the dashboard's JSON, with a line for each panel."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, charts in ROWS.items():
        at = {"x": 0, "y": y, "w": _COLUMNS * _WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": at})
        y += 1
        for number, chart in enumerate(charts):
            line, column = divmod(number, _COLUMNS)
            at = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": at, **_panel(*chart)})
        y += -(-len(charts) // _COLUMNS) * _HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    head = {
        "uid": "vllm-tetri",
        "title": "vllm-tetri",
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
    }
    lines = ",\n  ".join(map(json.dumps, panels))
    return f'{json.dumps(head)[:-1]}, "panels": [\n  {lines}\n]}}\n'


def _panel(title: str, unit: str, queries: tuple[Query, ...]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(text())
