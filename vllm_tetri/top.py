"""``vllm-tetri top``: what the router's page shows, in a terminal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_tetri.admin import AdminError, Row, add_url, console_of, snapshots, status_of

_RETRY_S = 1.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_LATENCIES = {"TTFT p50": "ttft_p50_s", "TTFT p99": "ttft_p99_s", "TPOT": "tpot_s", "JCT": "jct_s"}
_RATES = {"served": "served", "in time": "in_time", "refused": "refused", "failed": "failed"}
_MOST_REQUESTS, _MOST_EVENTS = 5, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--once", action="store_true", help="print one view and end")
    add_url(parser)


def run(options: argparse.Namespace) -> int:
    """Show a view every second until Ctrl-C; only one where the output is no terminal."""
    console = console_of()
    if options.once or not console.is_terminal:
        for snapshot in snapshots(options.url):
            console.print(view_of(snapshot))
            return 0
        raise AdminError(f"the router at {options.url} is about to end")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = "the router has ended; waiting for it"
            try:
                for snapshot in snapshots(options.url):
                    live.update(view_of(snapshot), refresh=True)
            except AdminError as error:  # it may come back
                shown = str(error)
            live.update(Text(shown), refresh=True)
            time.sleep(_RETRY_S)


def view_of(snapshot: Row) -> RenderableType:
    """Render one event of `GET /tetri/v1/events`."""
    phases, rates = snapshot["phases"], snapshot["rates"]
    kv_mebibytes = _number(rates["kv_bytes_sent"], 1 << 20)
    flow = [
        f"prefill {phases.get('prefilling', 0)} ({_number(rates['prompt_tokens_done'])} tokens/s)",
        f"hand-over {phases.get('handing_over', 0)} ({kv_mebibytes} MiB/s)",
        f"decode {phases.get('decoding', 0)} ({_number(rates['output_tokens_done'])} tokens/s)",
    ]
    alone = f"on one instance {phases.get('serving', 0)}"
    lines = ["", f"{snapshot['in_flight']} in flight: {' → '.join(flow)}, {alone}"]
    lines += [*map(_request, snapshot["requests"][:_MOST_REQUESTS]), ""]
    happened = [_happened(each) for each in snapshot["events"][:_MOST_EVENTS]]
    return Group(
        Text(f"{snapshot['router']}   mode {snapshot['mode']}"),
        _numbers(snapshot),
        Text("\n".join(lines)),
        status_of(snapshot),
        Text("\n".join(["", *happened])),
    )


def _numbers(snapshot: Row) -> Table:
    """Return a row for each number of the last minutes: now, and how it was."""
    table = Table.grid(padding=(0, 2))
    bins, per_s = snapshot["bins"], 1 / snapshot["bin_s"]
    for title, name in _LATENCIES.items():
        newest = bins[name][-1] if bins[name] else None
        table.add_row(
            title, "-" if newest is None else f"{newest * 1000:.0f} ms", _line(bins[name])
        )
    has_promise = any(value is not None for value in snapshot["objective"].values())
    for title, name in _RATES.items():
        if name != "in_time" or has_promise:
            values = [count * per_s for count in bins[name]]
            table.add_row(title, f"{values[-1] if values else 0:.3g}/s", _line(values))
    outputs = snapshot["outputs"]
    near = sum(
        max(predicted, 1) <= 2 * actual <= 4 * max(predicted, 1) for predicted, actual in outputs
    )
    table.add_row("lengths", f"{near} of {len(outputs)}", "predicted within a factor of 2")
    return table


def _line(values: Sequence[float | None]) -> str:
    most = max((value for value in values if value), default=0.0) or 1.0
    steps = len(_BLOCKS) - 1
    return "".join(" " if each is None else _BLOCKS[round(steps * each / most)] for each in values)


def _request(row: Row) -> str:
    where = " → ".join(dict.fromkeys(each for each in (row["prefill"], row["decode"]) if each))
    output = f"{row['generated']} of {row['predicted'] or '?'} tokens"
    return f"  {row['id'][:12]:<12} {row['age_s']:6.1f} s  {row['phase']:<12} {where}  {output}"


def _happened(row: Row) -> str:
    times = f" × {row['count']}" if row["count"] > 1 else ""
    return f"{row['age_s']:5.0f} s ago  {row['kind']}{times}: {row['words']}"


def _number(value: float | None, unit: int = 1) -> str:
    return "-" if value is None else f"{value / unit:.0f}"
