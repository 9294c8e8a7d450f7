"""Commands for a running cluster, over the HTTP API of one router, whose refusals are shown."""

from __future__ import annotations

import argparse
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlsplit

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_tetri.errors import TetriError
from vllm_tetri.router.auth import KEY_VARIABLE, own_keys
from vllm_tetri.types import FLIP_DEADLINE_S, Mode, Role, is_loopback

Row = dict[str, Any]

_INSTANCES = "/tetri/v1/instances"
_DATA = b"data: "
_TIMEOUT_S = 5.0
_POLL_S = 0.1
_SILENT_S = 5.0  # without a report; a busy host is late by less
_UNHEARD_S = 30.0  # without a router's answer while an order is carried out
_COMMIT_S = 2.0  # time for the instance to learn that its new role is known
_WIDE = 1000  # columns


class AdminError(TetriError):
    """No router could be reached, or it refused the order."""

    exit_status = 1


def call(url: str, path: str, body: Row | None = None, what: str = "router") -> Row:
    """Return what a router (or an instance) responds to a GET, or to a POST of `body`; AdminError
    if it cannot be reached, or refuses."""
    with _response(url, path, body, what) as response:
        content = json.load(response)
        if not isinstance(content, dict):
            raise ValueError("the response is not of a router")
    return content


def snapshots(url: str) -> Iterator[Row]:
    """Yield what a router shows, at once and then every second, until it ends; AdminError if it
    cannot be reached any more, or refuses."""
    with _response(url, "/tetri/v1/events") as response:
        for line in response:
            if line.startswith(_DATA):
                yield json.loads(line.removeprefix(_DATA))


@contextmanager
def _response(
    url: str, path: str, body: Row | None = None, what: str = "router"
) -> Iterator[HTTPResponse]:
    url = url.rstrip("/")
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if keys := own_keys():
        headers["Authorization"] = f"Bearer {keys[0].strip()}"
    try:
        request = urllib.request.Request(url + path, data=data, headers=headers)
        with opener_for(url).open(request, timeout=_TIMEOUT_S) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise AdminError(_refusal_of(error)) from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = str(getattr(reason, "strerror", None) or reason).lower()
        hint = "start one with `vllm-tetri up MODEL` or give --url"
        if isinstance(reason, ssl.SSLError):
            hint = "SSL_CERT_FILE names a certificate to trust, --url https://NAME:PORT its name"
        elif isinstance(reason, ConnectionResetError) and url.startswith("http:"):
            hint = "if it has a certificate, give --url https://NAME:PORT"
        raise AdminError(f"no {what} answers at {url}: {words}; {hint}") from error


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return what opens URLs: without the environment's proxy if they are this machine's own."""
    is_own = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_own else []))


def _refusal_of(error: urllib.error.HTTPError) -> str:
    try:
        words = str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError):
        words = f"HTTP {error.code} {error.reason}"
    return f"{words} (set {KEY_VARIABLE})" if error.code == 401 else words


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `status`."""
    parser.add_argument(
        "--json", action="store_true", help="print the response of /tetri/v1/instances as JSON"
    )
    add_url(parser)


def run_status(options: argparse.Namespace) -> int:
    """Show the instances of a running cluster."""
    content = call(options.url, _INSTANCES)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        console_of().print(status_of(content))
    return 0


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `explain`."""
    parser.add_argument("request", help="the x-request-id of its response")
    parser.add_argument("--json", action="store_true", help="what the router says of it, as JSON")
    add_url(parser)


def run_explain(options: argparse.Namespace) -> int:
    """Show where the time of a request went."""
    found = call(options.url, f"/tetri/v1/requests/{quote(options.request, safe='')}")
    print(json.dumps(found) if options.json else explain_text(found))
    return 0


def explain_text(found: Row) -> str:
    """Describe a request as a router does in JSON, in lines: sums of parts, why, and when."""
    parts, lines = found["parts"], []
    state = f"{found['route']}, {found['outcome']}" if found["route"] else found["outcome"]
    lines.append(f"{found['id']}: {state}{': ' * bool(found['problem'])}{found['problem']}")
    if found["ttft_s"] is not None:
        first = _sum([(each["what"], each["before_first_token_s"]) for each in parts])
        lines.append(f"TTFT {_time(found['ttft_s'])} = {first}")
    after = [(each["what"], each["s"] - each["before_first_token_s"]) for each in parts]
    before = [("TTFT", found["ttft_s"] or 0.0)]
    lines.append(f"JCT {_time(found['jct_s'])} = {_sum(before + after)}")
    if found["expected_ttft_s"] is not None:
        expected, error = _time(found["expected_ttft_s"]), _time(found["expected_error_s"])
        lines.append(f"expected: first token in {expected} ± {error} (mean error of this router)")
    lines.append(f"why: {found['reason'] or 'it was sent nowhere'}")
    names = {"prompt_tokens": "prompt", "output_tokens": "output", "predicted": "predicted"}
    known = [f"{word} {found[name]}" for name, word in names.items() if found[name] is not None]
    lines += [f"tokens: {', '.join(known)}"] if known else []
    for each in found["instances"]:
        took = _sum([(name, each[f"{name}_s"]) for name in ("queue", "compute", "output")])
        counts = f"{each['cached_tokens']} tokens cached, {each['preemptions']} preemptions"
        lines.append(f"{each['instance']}: {took}; {counts}")
    events = (f"{each['event']} {each['at']} at {_time(each['s'])}" for each in found["timeline"])
    return "\n".join([*lines, "then: " + "; ".join(events)] if found["timeline"] else lines)


def _sum(parts: list[tuple[str, float]]) -> str:
    """Add up what has one name, in the order in which it comes first."""
    sums: dict[str, float] = {}
    for what, took_s in parts:
        if took_s >= 5e-5:
            sums[what] = sums.get(what, 0.0) + took_s
    return " + ".join(f"{what} {_time(took_s)}" for what, took_s in sums.items()) or "0"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def console_of() -> Console:
    """Return the terminal, or a file or pipe in which lines are never wrapped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def add_flip_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `flip`."""
    _add_instance(parser)
    # fmt: off
    parser.add_argument(
        "role", choices=[role.value for role in Role],
        help="target role; the current role cancels a pending flip")
    parser.add_argument(
        "--now", action="store_true",
        help="take new work at once and finish the old work meanwhile, instead of first")
    parser.add_argument(
        "--deadline", type=float, default=FLIP_DEADLINE_S, metavar="SECONDS",
        help="keep the old role if its work takes longer than this (default: %(default)s)")
    # fmt: on


def run_flip(options: argparse.Namespace) -> int:
    """Give an instance another role while it serves, and wait until it has it."""
    name, role = _name_of(options.instance), options.role
    options.instance = name
    order = {"role": role, "now": options.now, "reason": "ordered by vllm-tetri flip"}
    ordered = _order(options, "flip", order)
    if not ordered["is_under_way"]:
        print(f"{name} is a {role} instance already")
        return 0
    heard_s = spoke_s = time.monotonic()
    for row in _progress(options.url, name):
        flip = row["flip"] or {"stage": "", "epoch": -1}
        if row["state"] == "silent":  # a report may be late
            heard_s = time.monotonic()
            if heard_s - spoke_s > _SILENT_S:
                raise AdminError(f"{name} does not answer any more; see its log")
            continue
        spoke_s = time.monotonic()
        if flip["stage"] in ("draining", "switching"):
            heard_s = time.monotonic()
            continue
        if flip["epoch"] < ordered["epoch"] and row["role"] != role:
            if time.monotonic() - heard_s < _COMMIT_S:  # another router may hear of it later
                continue
            is_still = f"{name} is still a {row['role']} instance"
            raise AdminError(f"{is_still}: the order was lost; repeat it")
        if flip["stage"] != "done" or flip["commit_s"] or flip["age_s"] > _COMMIT_S:
            print(f"{name} {flip_words(flip) if row['flip'] else f'is a {role} instance'}")
            return 0 if row["role"] == role else 1
    raise AdminError(f"{name} left the cluster before it had its new role")


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `drain`."""
    _add_instance(parser)
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS",
        help="end it after this time even with requests in flight (default: no deadline)",
    )  # fmt: skip


def run_drain(options: argparse.Namespace) -> int:
    """Let an instance finish its requests and leave the cluster."""
    name = options.instance = _name_of(options.instance)
    _order(options, "drain", {})
    heard_s = time.monotonic()
    for row in _progress(options.url, name):
        if row["state"] in ("draining", "silent", "starting"):
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > _COMMIT_S:  # another router may hear of it later
            raise AdminError(f"{name} has started anew: the order was lost; repeat it")
    departed = call(options.url, _INSTANCES)["departed"]
    if name not in departed:
        raise AdminError(f"{name} is gone, but did not say goodbye; see its log")
    print(f"{name} has left" + (f"; cut off: {departed[name]}" if departed[name] else ""))
    return 0


def add_mode_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mode`."""
    parser.add_argument(
        "mode", nargs="?", choices=[mode.value for mode in Mode],
        help="prefill and decode on two instances (split), each request on one (whole), or "
        "decided per request (adaptive); without it, the current mode is shown",
    )  # fmt: skip
    add_url(parser)


def run_mode(options: argparse.Namespace) -> int:
    """Show or change how a running router serves requests."""
    body = None if options.mode is None else {"mode": options.mode}
    print(call(options.url, "/tetri/v1/mode", body)["mode"])
    return 0


def add_url(parser: argparse.ArgumentParser) -> None:
    """Declare `--url`."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="base URL of the router (default: %(default)s); its API key is read from the "
        f"environment variable {KEY_VARIABLE}, and SSL_CERT_FILE may name the certificate to trust",
    )


def _add_instance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "instance", help="name of the instance, as `vllm-tetri status` shows it, or its URL"
    )
    parser.add_argument(
        "--force", action="store_true", help="even if no other instance can take over its role"
    )
    add_url(parser)


def _name_of(instance: str) -> str:
    if "://" not in instance:
        return instance
    name = call(instance, "/tetri/v1/instance", what="instance").get("id")
    if not isinstance(name, str):
        raise AdminError(f"{instance} is no instance of a cluster")
    return name


def _order(options: argparse.Namespace, verb: str, order: Row) -> Row:
    path = f"{_INSTANCES}/{quote(options.instance, safe='')}/{verb}"
    order |= {"deadline_s": options.deadline, "force": options.force}
    return call(options.url, path, order)


def _progress(url: str, name: str) -> Iterator[Row]:
    """Poll the row of an instance until it is gone, and print what it still has to do."""
    shown, heard_s = "", time.monotonic()
    while True:
        try:
            rows: list[Row] = call(url, _INSTANCES)["instances"]
        except AdminError:  # a router among several may just end, or come
            if time.monotonic() - heard_s > _UNHEARD_S:
                raise
            time.sleep(_POLL_S)
            continue
        heard_s = time.monotonic()
        row = next((each for each in rows if each["id"] == name), None)
        if row is None:
            return
        words = (
            f"{name} is {row['state']}: {row['running']} running, {row['waiting']} waiting, "
            f"{row['held']} held, {row['in_flight']} in flight"
        )
        if words != shown and row["state"] in ("draining", "flipping"):
            print(words, flush=True)
            shown = words
        yield row
        time.sleep(_POLL_S)


# A format of the row, to which `_extended` adds the names that it does not have.
_COLUMNS = {
    "id": "{id}", "role": "{role}", "state": "{state}", "age": "{age_s:.1f}s",
    "in flight": "{in_flight}", "running": "{running}", "waiting": "{waiting}", "held": "{held}",
    "heavy:light": "{heavy:.3g}:{light:.3g}", "prompt tokens": "{queued_prefill_tokens}",
    "blocks": "{blocks_used}{reserved}/{blocks_total}", "arena": "{arena}", "step": "{step}",
    "url": "{url}",
}  # fmt: skip


def _extended(row: Row) -> Row:
    used, total = row["arena_used_bytes"] >> 20, row["arena_total_bytes"] >> 20
    return {
        **row,
        "reserved": f"+{row['reserved_blocks']}" if row["reserved_blocks"] else "",
        "arena": f"{used}/{total} MiB",
        "step": f"{row['step_s'] * 1000:.0f}ms" if row["step_s"] else "-",
    }


def status_of(content: dict[str, Any]) -> RenderableType:
    """Render what `GET /tetri/v1/instances` returned: instances, flips and the flip policy."""
    rows: list[Row] = content["instances"]
    if not rows:
        return Text("no instances")
    table = Table(*_COLUMNS, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in sorted(rows, key=lambda row: (row["role"], row["id"])):
        table.add_row(*(Text(show.format(**_extended(row))) for show in _COLUMNS.values()))
    flips = sorted((row["flip"]["age_s"], row["id"], row["flip"]) for row in rows if row["flip"])
    lines = ["", "flips:", *(f"  {name} {flip_words(flip)}" for _, name, flip in flips)]
    spared = ", ".join(content["spared"])
    lines = [*(lines if flips else []), *content["apart"], f"flip policy: {content['watcher']}"]
    lines += [f"compute prompts only, at the present load: {spared}"] if spared else []
    return Group(table, Text("\n".join(lines)))


_STAGES = {  # what of a flip is said at each, as formats
    "draining": "draining for {age_s:.1f} s",
    "switching": "switches with its next step",
    "done": "done {age_s:.0f} s ago",
    "rolled_back": "rolled back {age_s:.0f} s ago: {problem}",
}


def flip_words(flip: Row) -> str:
    """Describe one flip on one line."""
    what = _STAGES[flip["stage"]].format(**flip)
    if not flip["is_heard"]:
        what = f"ordered {flip['age_s']:.1f} s ago, not confirmed yet"
    elif flip["stage"] == "done":
        what += f", drained in {flip['drain_s']:.2f} s" if flip["drain_s"] else ""
        what += f", committed in {flip['commit_s'] * 1000:.1f} ms" if flip["commit_s"] else ""
    return f"{flip['source']} → {flip['target']}: {what} ({flip['reason']})"
