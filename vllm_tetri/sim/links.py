"""KV on its way: how long it takes when other KV is sent at the same time.

Every instance has one link out and one link in, of the same bandwidth, independent of each other.
An end gives equal parts of it to the transfers that have something to send at the moment, and a
transfer gets the smaller of its two parts; what it cannot use is not given to others. So one of n
transfers from the same sender, or to the same receiver, has an n-th of the bandwidth. Pieces of a
transfer (chunks, as they are computed) follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.loop import Call, Loop
from vllm_tetri.types import InstanceId

_GBIT_BYTES = 1e9 / 8

# Bytes per second of the two that TetriInfer emulates (section 5.1): 200 Gbit/s RoCE, and NVLink.
LINKS = {"roce": 200 * _GBIT_BYTES, "nvlink": 300e9}


def link(text: str) -> float:
    """Return the bytes per second of a name in `LINKS`, or of Gbit/s; raises ConfigError if it is
    something else, or out of range."""
    try:
        found = LINKS[text] if text in LINKS else float(text) * _GBIT_BYTES
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ConfigError(f"link {text!r}: there are {', '.join(LINKS)}, and Gbit/s above 0")
    return found


@dataclass(slots=True, eq=False)
class Transfer:
    """KV of one request, from one instance to another. Owner: `Links`."""

    sender: InstanceId
    receiver: InstanceId
    on_end: Call  # when all of it has arrived
    left_bytes: float = 0.0  # not sent at `at_s`
    at_s: float = 0.0
    rate: float = 0.0  # bytes per second since then; 0 while there is nothing to send
    is_complete: bool = False  # no further piece follows
    plan: int = 0  # number of the newest planned end; earlier ones are ignored


class Links:
    """The links of all instances."""

    def __init__(self, bytes_per_s: float, loop: Loop) -> None:
        self._bytes_per_s = bytes_per_s
        self._at = loop.at
        self._out: dict[InstanceId, dict[Transfer, None]] = {}
        self._in: dict[InstanceId, dict[Transfer, None]] = {}

    def send(self, transfer: Transfer, num_bytes: float, now: float, *, is_last: bool) -> None:
        """Add a piece of more than 0 bytes to a transfer."""
        transfer.is_complete = is_last
        if transfer.rate:
            _settle(transfer, now)
            transfer.left_bytes += num_bytes
            self._plan(transfer)
            return
        transfer.left_bytes, transfer.at_s = num_bytes, now
        self._out.setdefault(transfer.sender, {})[transfer] = None
        self._in.setdefault(transfer.receiver, {})[transfer] = None
        self._share(transfer, now)

    def _share(self, changed: Transfer, now: float) -> None:
        """Set the rates at both ends of a transfer that begins or pauses."""
        out, into = self._out[changed.sender], self._in[changed.receiver]
        for each in (*out, *(other for other in into if other.sender != changed.sender)):
            num = max(len(self._out[each.sender]), len(self._in[each.receiver]))
            rate = self._bytes_per_s / num
            if rate != each.rate:
                _settle(each, now)
                each.rate = rate
                self._plan(each)

    def _plan(self, transfer: Transfer) -> None:
        transfer.plan += 1
        end_s = transfer.at_s + transfer.left_bytes / transfer.rate
        self._at(end_s, partial(self._sent, transfer, transfer.plan))

    def _sent(self, transfer: Transfer, plan: int, now: float) -> None:
        if plan != transfer.plan:
            return
        transfer.rate = 0.0
        del self._out[transfer.sender][transfer], self._in[transfer.receiver][transfer]
        self._share(transfer, now)
        if transfer.is_complete:
            self._at(now, transfer.on_end)


def _settle(transfer: Transfer, now: float) -> None:
    """Subtract what was sent until now."""
    sent_bytes = (now - transfer.at_s) * transfer.rate
    transfer.left_bytes = max(0.0, transfer.left_bytes - sent_bytes)
    transfer.at_s = now
