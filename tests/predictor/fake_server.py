"""A predictor process with a classifier that only counts.

A prompt's bucket is its number of tokens, at most 9. A prompt of the single token 667 is never
answered, one of 668 gets a bucket that does not exist.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from examples.predictor.server import Server, end_with


def count(batch: Sequence[Sequence[int]]) -> list[int]:
    if [667] in [list(each) for each in batch]:
        time.sleep(3600)
    return [99 if list(each) == [668] else min(9, len(each)) for each in batch]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--fail", type=Path)
    options = parser.parse_args()
    if options.fail is not None and options.fail.exists():
        raise SystemExit(2)
    end_with(options.parent)
    with socket.socket(fileno=options.socket) as channel:
        Server(channel, list, count).run()


if __name__ == "__main__":
    main()
