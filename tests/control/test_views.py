"""What instances get to know of each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import zmq

from tests.control.channel import INFO, Joined, eventually, joined, monitor, states
from vllm_tetri import messages
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.control.view import row_of
from vllm_tetri.messages import Hello
from vllm_tetri.types import InstanceId, InstanceLoad, InstanceState, InstanceView, Role


@asynccontextmanager
async def three() -> AsyncIterator[tuple[Monitor, dict[str, Joined]]]:
    """A router, and an instance of each role."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(monitor())
        made = {}
        for name, role in roles.items():
            info = replace(INFO, id=InstanceId(name), role=role)
            made[name] = await stack.enter_async_context(joined(router.address, info=info))
        yield router, made


async def test_only_who_dispatches_gets_views_and_only_of_who_decodes() -> None:
    async with three() as (router, made):
        await eventually(lambda: len(states(router)) == 3)
        decoders = [("b", "starting"), ("d", "starting")]
        await eventually(lambda: sorted(made["p"].sees()) == sorted(made["b"].sees()) == decoders)
        assert made["d"].sees() == []

        def seqs() -> dict[str, int]:
            return {each.info.id: each.seq for each in router.view().instances}

        before = seqs()  # all report at the router's pace, with a view or without
        await eventually(lambda: all(seqs()[name] > before[name] + 10 for name in made))
        assert seqs()["p"] < before["p"] + 40


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

            say(messages.Poll("r", 1, 1, rows=[row]))  # of a view that was lost
            await asyncio.wait_for(is_asked_again(), 5)
            assert one.sees() == []
            say(messages.Poll("r", 2, 2, infos=(INFO,), rows=[row_of(seen)]))
            await eventually(lambda: one.sees() == [("i", "ready")])
            say(messages.Poll("r", 3, 2, rows=[row]))
            await eventually(lambda: one.view.seq == 3)
            (now,) = one.view.instances
            assert (now.info, now.load.running, now.load.blocks_total, now.seq) == (INFO, 5, 9, 8)
            say(messages.Poll("r", 4, 2, rows=[]))
            await eventually(lambda: one.agent.dropped_messages == 1)
            say(messages.Poll("r", 5, 3, rows=[row]))
            await asyncio.wait_for(is_asked_again(), 5)
            assert one.view.seq == 3
    finally:
        context.destroy(linger=0)


async def test_a_view_comes_when_instances_come_or_go_and_only_loads_in_between() -> None:
    load = [InstanceLoad()]
    async with monitor() as router, joined(router.address, read_load=lambda: load[0]) as one:
        await eventually(one.sees)
        for running in (1, 2):
            load[0] = InstanceLoad(running=running)
            await eventually(lambda running=running: one.view.instances[0].load.running == running)
        async with joined(router.address, info=replace(INFO, id=InstanceId("j"))):
            await eventually(lambda: len(one.sees()) == 2)
        await eventually(lambda: len(one.sees()) == 1)


async def test_while_they_are_mixed_all_get_views_of_all() -> None:
    async with three() as (router, made):

        def seen() -> list[list[str]]:
            return [sorted(name for name, _ in each.sees()) for each in made.values()]

        await eventually(lambda: seen() == [["b", "d"], [], ["b", "d"]])
        router.mix(True)
        await eventually(lambda: seen() == [["b", "d", "p"]] * 3)
        router.mix(True)  # changes nothing: only loads go on coming
        d = made["d"]
        seq = d.view.seq
        await eventually(lambda: d.view.seq > seq + 2)
        assert seen() == [["b", "d", "p"]] * 3
        last = router.view().seq
        router.mix(False)
        await eventually(lambda: [seen()[0], seen()[2]] == [["b", "d"]] * 2)
        await eventually(lambda: d.view.seq == last)
        await eventually(lambda: made["p"].view.seq > last + 2)
        assert d.view.seq == last  # an instance that only decodes gets no views any more


async def test_once_they_are_mixed_all_are_told_at_once() -> None:
    decode = replace(INFO, role=Role.DECODE)
    async with monitor() as router, joined(router.address, info=decode) as d:
        await eventually(lambda: states(router))
        for is_mixed in (True, False) * 3:
            before = router.view().seq
            router.mix(is_mixed)
            assert router.view().seq == before + is_mixed
            if is_mixed:
                await eventually(lambda before=before: d.view.seq > before)
                assert [name for name, _ in d.sees()] == ["i"]
