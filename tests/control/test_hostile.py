"""An instance whose router says strange things."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan
from random import Random

import pytest
import zmq

from tests.control.channel import INFO, eventually, joined
from tests.mutation import COUNTS, strange_frame
from vllm_tetri import messages
from vllm_tetri.control.view import row_of
from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import (
    CancelTransfer,
    FlipRole,
    LengthMap,
    LoadReport,
    OutputEnded,
    Placed,
    Poll,
    Refused,
    RoleCommitted,
    TransferLost,
    WhoAreYou,
)
from vllm_tetri.types import (
    Flip,
    FlipStage,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
    TransferId,
)

BATCH = 100
PREFIX_BYTES = 5
FLIP = Flip(3, Role.PREFILL, Role.DECODE, FlipStage.DONE, 1.0, 2.0, 3.0, "why", "what")
OTHERS = tuple(
    InstanceView(
        replace(INFO, id=InstanceId(name)), InstanceState.READY, InstanceLoad(), 0.1, 1, FLIP
    )
    for name in ("a", "b")
)
ROWS = [row_of(each) for each in OTHERS]
SHOWN = Poll("r", 1, 5, tuple(each.info for each in OTHERS), ROWS)
GOOD = [
    messages.encode(message)
    for message in (
        SHOWN,
        Poll("r", 2, 5, rows=ROWS),
        Poll("r", in_flight=3),
        FlipRole(4, Role.DECODE, True, 5.0, "why", 2),
        RoleCommitted(4, 1.0),
        WhoAreYou(),
        Refused("why"),
        CancelTransfer(TransferId("x")),
        TransferLost(TransferId("x")),
        OutputEnded(InstanceId("i"), TransferId("x"), 5),
        LengthMap("model", b"1234"),
        Placed(InstanceId("i"), 5, 2, 3.0, InstanceId("j"), 1.0),
    )
]


@pytest.mark.parametrize("count", COUNTS)
async def test_it_goes_on_and_believes_the_next_right_word(count: int) -> None:
    rng = Random(21)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with joined(f"tcp://127.0.0.1:{port}") as one:
            sender, _ = await asyncio.to_thread(router.recv_multipart)
            for start in range(0, count, BATCH):
                for index in range(start, start + BATCH):
                    frame = strange_frame(rng, GOOD[index % len(GOOD)], PREFIX_BYTES)
                    await asyncio.to_thread(router.send_multipart, [sender, frame])
                    while router.poll(0):  # what it has to say to that
                        router.recv_multipart()
                router.send_multipart([sender, b"two", b"parts"])
                mark = CancelTransfer(TransferId(f"batch {start}"))
                router.send_multipart([sender, messages.encode(SHOWN)])
                router.send_multipart([sender, messages.encode(mark)])
                await eventually(lambda mark=mark: mark in one.engine.taken, 20.0)
                assert one.sees() == [("a", "ready"), ("b", "ready")]
                assert len(one.agent.snapshot().view.instances) == 2
            assert one.agent.dropped_messages > count / 3
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("number", [2.0**61, 2.0**63, nan, inf, -inf], ids=str)
def test_sums_of_bytes_are_believed_and_what_is_no_number_is_not(number: float) -> None:
    load = InstanceLoad(kv_bytes_sent=1 << 60, kv_bytes_received=1 << 60, step_s=number)
    report = messages.encode(LoadReport(INFO.id, 1, load))
    row = row_of(InstanceView(INFO, InstanceState.READY, load, 0.0))
    poll = messages.encode(Poll("r", rows=[row]))
    for decode, frame in (messages.decode_to_router, report), (messages.decode_to_instance, poll):
        with nullcontext() if number == 2.0**61 else pytest.raises(ProtocolError):
            decode(frame)
