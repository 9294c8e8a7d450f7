"""``vllm-tetri flip``: give an instance another role while it serves."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from vllm_tetri.router import admin
from vllm_tetri.router.flips import DEADLINE_S
from vllm_tetri.router.status import words_of
from vllm_tetri.types import Role

_PERIOD_S = 0.1
_COMMIT_S = 2.0  # for the instance to hear that its new role is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("instance", help="its name, as `vllm-tetri status` shows it")
    parser.add_argument(
        "role",
        choices=[role.value for role in Role],
        help="what it is to be; its present role calls off a flip that is under way",
    )
    parser.add_argument(
        "--now",
        action="store_true",
        help="take new work at once and finish the old beside it, instead of before",
    )
    parser.add_argument(
        "--deadline",
        type=admin.seconds,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="keep the old role if its work is not finished after so long (%(default)g)",
    )
    parser.add_argument(
        "--force", action="store_true", help="even if no other instance can do what it does"
    )
    admin.add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Order it and wait until it is done; returns the exit status."""
    order = {
        "role": args.role,
        "now": args.now,
        "deadline_s": args.deadline,
        "force": args.force,
        "reason": "ordered by vllm-tetri flip",
    }
    try:
        ordered = admin.order(args.url, args.instance, "flip", order)
        if not ordered["is_under_way"]:
            print(f"{args.instance} is a {args.role} instance already")
            return 0
        return _wait(args.url, args.instance, args.role, ordered["epoch"])
    except admin.AdminError as error:
        print(f"vllm-tetri flip: {error}", file=sys.stderr)
        return 1


def _wait(url: str, instance: str, role: str, epoch: int) -> int:
    shown, over_s = "", float("inf")
    while True:
        row = _row(url, instance)
        flip = row["flip"] or {}
        if flip.get("stage") in ("draining", "switching"):
            over_s = float("inf")
            words = f"{instance} is {flip['stage']}: {admin.work_of(row)}"
            if words != shown:
                print(words, flush=True)
                shown = words
        else:
            over_s = min(over_s, time.monotonic())
            is_ours = flip.get("epoch", -1) >= epoch or row["role"] == role
            is_known = is_ours and (flip.get("stage") == "rolled_back" or flip.get("commit_s"))
            if is_known or time.monotonic() - over_s > _COMMIT_S:
                return _tell(row, role, epoch)
        time.sleep(_PERIOD_S)


def _tell(row: dict[str, Any], role: str, epoch: int) -> int:
    flip, name = row["flip"], row["id"]
    if row["role"] != role and (flip is None or flip["epoch"] < epoch):
        raise admin.AdminError(f"{name} is still a {row['role']} instance: the order got lost")
    print(f"{name} {words_of(flip)}" if flip else f"{name} is a {role} instance")
    return 0 if row["role"] == role else 1


def _row(url: str, instance: str) -> dict[str, Any]:
    row: dict[str, Any]
    for row in admin.instances(url)["instances"]:
        if row["id"] == instance:
            if row["state"] == "silent":
                raise admin.AdminError(f"{instance} does not answer any more")
            return row
    raise admin.AdminError(f"{instance} is gone")
