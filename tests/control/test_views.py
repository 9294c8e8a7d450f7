"""What instances get to know of each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import zmq

from tests.control.channel import (
    INFO,
    PERIOD_S,
    Joined,
    eventually,
    joined,
    monitor,
    states,
)
from vllm_tetri import messages
from vllm_tetri.control.views import row_of
from vllm_tetri.messages import Hello
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)


async def test_only_who_dispatches_gets_views_and_only_of_who_decodes() -> None:
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    infos = {n: replace(INFO, id=InstanceId(n), role=role) for n, role in roles.items()}
    async with (
        monitor() as router,
        joined(router.address, info=infos["p"]) as p,
        joined(router.address, info=infos["d"]) as d,
        joined(router.address, info=infos["b"]) as b,
    ):
        await eventually(lambda: len(states(router)) == 3)
        decoders = [("b", "starting"), ("d", "starting")]
        await eventually(lambda: sorted(p.sees()) == sorted(b.sees()) == decoders)
        assert d.sees() == []

        def seqs() -> dict[str, int]:
            return {each.info.id: each.seq for each in router.view().instances}

        before = seqs()  # all report at the router's pace, with a view or without
        await eventually(lambda: all(seqs()[name] > before[name] + 3 for name in roles), 0.5)


async def test_ages_grow_with_local_time() -> None:
    async with monitor() as router:
        one = Joined(router.address)
        await eventually(one.sees)
    try:
        before = one.agent.view().instances[0].age_s
        await asyncio.sleep(0.05)
        assert one.agent.view().instances[0].age_s >= before + 0.04
    finally:
        await one.close()


async def test_a_picture_stays_the_same_until_something_new_comes() -> None:
    async with monitor() as router:
        one = Joined(router.address)
        await eventually(one.sees)
        first = one.agent.picture()
        await eventually(lambda: one.agent.picture() is not first)
    try:
        last = one.agent.picture()
        await asyncio.sleep(3 * PERIOD_S)
        assert one.agent.picture() is last
        (then,), (now,) = last.view.instances, one.agent.view().instances
        assert now.age_s >= then.age_s + 3 * PERIOD_S
    finally:
        await one.close()


async def test_loads_belong_to_the_view_before_them() -> None:
    seen = InstanceView(INFO, InstanceState.READY, InstanceLoad(), 0.0)
    row = row_of(replace(seen, load=InstanceLoad(running=5, blocks_total=9), seq=8))
    context = zmq.Context()
    try:
        false_router = context.socket(zmq.ROUTER)
        port = false_router.bind_to_random_port("tcp://127.0.0.1")
        async with joined(f"tcp://127.0.0.1:{port}") as one:
            sender, _ = await asyncio.to_thread(false_router.recv_multipart)

            def say(message: messages.ToInstance) -> None:
                false_router.send_multipart([sender, messages.encode(message)])

            async def is_asked_again() -> None:
                while True:
                    _, frame = await asyncio.to_thread(false_router.recv_multipart)
                    if messages.decode_to_router(frame) == Hello(INFO):
                        return

            say(messages.Loads(1, 1, [row]))  # of a view that was lost
            await asyncio.wait_for(is_asked_again(), 5)
            assert one.sees() == []
            say(messages.View(ClusterView("r", 2, (seen,)), roster=2))
            await eventually(lambda: one.sees() == [("i", "ready")])
            say(messages.Loads(2, 3, [row]))
            await eventually(lambda: one.agent.view().seq == 3)
            (now,) = one.agent.view().instances
            assert (now.info, now.load.running, now.load.blocks_total, now.seq) == (INFO, 5, 9, 8)
            say(messages.Loads(2, 4, []))
            await eventually(lambda: one.agent.dropped_messages == 1)
            say(messages.Loads(3, 5, [row]))
            await asyncio.wait_for(is_asked_again(), 5)
            assert one.agent.view().seq == 3
    finally:
        context.destroy(linger=0)


async def test_a_view_comes_when_instances_come_or_go_and_only_loads_in_between() -> None:
    load = [InstanceLoad()]
    async with monitor() as router, joined(router.address, read_load=lambda: load[0]) as one:
        await eventually(one.sees)
        for running in (1, 2):
            load[0] = InstanceLoad(running=running)
            await eventually(
                lambda running=running: one.agent.view().instances[0].load.running == running
            )
        async with joined(router.address, info=replace(INFO, id=InstanceId("j"))):
            await eventually(lambda: len(one.sees()) == 2)
        await eventually(lambda: len(one.sees()) == 1)
