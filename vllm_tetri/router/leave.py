"""``vllm-tetri leave``: let an instance finish what it has and go."""

from __future__ import annotations

import argparse
import sys
import time

from vllm_tetri.router import admin

_PERIOD_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("instance", help="its name, as `vllm-tetri status` shows it")
    parser.add_argument(
        "--deadline",
        type=admin.seconds,
        metavar="SECONDS",
        help="let it go after so long even if it has not finished; default: wait for ever",
    )
    parser.add_argument(
        "--force", action="store_true", help="even if no other instance can do what it does"
    )
    admin.add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Order it and wait until it is gone; returns the exit status."""
    order = {"force": args.force, "deadline_s": args.deadline}
    try:
        admin.order(args.url, args.instance, "leave", order)
        _wait(args.url, args.instance)
    except admin.AdminError as error:
        print(f"vllm-tetri leave: {error}", file=sys.stderr)
        return 1
    return 0


def _wait(url: str, instance: str) -> None:
    shown = ""
    while True:
        answer = admin.instances(url)
        row = next((each for each in answer["instances"] if each["id"] == instance), None)
        if row is None:
            break
        words = f"{instance} is {row['state']}: {admin.work_of(row)}"
        if words != shown:
            print(words, flush=True)
            shown = words
        time.sleep(_PERIOD_S)
    departed = answer.get("departed", {})
    if instance not in departed:
        raise admin.AdminError(f"{instance} is gone, but did not say that it has left")
    cut_off = departed[instance]
    print(f"{instance} has left" + (f"; cut off: {cut_off}" if cut_off else ""))
