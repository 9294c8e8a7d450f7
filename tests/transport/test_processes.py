"""A sender in another process that is killed or stopped, and what it leaves."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.eventually import eventually
from tests.footprint import footprint
from tests.transport.children import child, receiving, stop
from tests.transport.conftest import IDENTITY, Backend, empty, ended, fails
from vllm_tetri.transport.native import SlotState, Status, TransferState


def test_a_killed_sender_frees_its_slot_at_once(core: Backend) -> None:
    receiver = core.receiver(arena_bytes=4 << 20)
    with child(receiver.endpoint, core.link) as process:
        assert receiver.find("child").state == SlotState.FILLING
        process.kill()
        eventually(lambda: empty(receiver))
    slot = receiver.find("child")
    assert slot.state == SlotState.FAILED
    assert "went away" in slot.error
    eventually(lambda: receiver.stats().connections == 0)


def test_a_stopped_shm_writer_is_quarantined_until_it_answers(shm: Backend) -> None:
    receiver = shm.receiver(arena_bytes=4 << 20)
    sender = shm.sender()
    cache = shm.cache(1, 64, 65536, seed=1)
    with child(receiver.endpoint, "shm") as process:
        stop(process)
        receiver.cancel("child")
        assert receiver.stats().quarantined_bytes == 4 << 20
        full = shm.push(sender, receiver, "next", cache, range(64))
        fails(full, Status.FULL)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: empty(receiver))
        shm.pushed(sender, receiver, "next", cache, range(64))
        assert process.stdout is not None
        assert process.stdout.readline() == "CANCELLED\n"
        assert shm.arrived(receiver, "next", cache) == cache.bytes_of(range(64))


def test_a_stopped_tcp_sender_times_out_and_its_bytes_go_nowhere(tcp: Backend) -> None:
    receiver = tcp.receiver(arena_bytes=4 << 20, fill_timeout_s=0.3)
    cache = tcp.cache(1, 64, 65536, seed=1)
    with child(receiver.endpoint, "tcp") as process:
        stop(process)
        eventually(lambda: empty(receiver))
        tcp.pushed(tcp.sender(), receiver, "next", cache, range(64))
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() in ("TIMEOUT\n", "STALE\n")
        assert tcp.arrived(receiver, "next", cache) == cache.bytes_of(range(64))


def test_a_receiver_that_stops_answering_times_out(core: Backend) -> None:
    sender = core.sender(open_timeout_s=3.0, io_timeout_s=1.0)
    cache = core.cache(seed=1)
    with receiving(IDENTITY) as (process, endpoint):
        first = sender.open(endpoint, "a", 2, cache.layout.block_bytes)
        eventually(lambda: first.state == TransferState.SENDING)
        stop(process)
        second = sender.open(endpoint, "b", 2, cache.layout.block_bytes)
        first.write(cache.layout, 0, np.array([0, 1], np.int32))
        first.finish()
        fails(first, Status.TIMEOUT)
        fails(second, Status.TIMEOUT)
        assert first.quiesced
        assert second.quiesced
    later = sender.open(endpoint, "c", 2, cache.layout.block_bytes)
    assert ended(later) == TransferState.FAILED
    assert later.status in (Status.PEER_LOST, Status.TIMEOUT)


def test_nothing_is_left_after_close(core: Backend) -> None:
    cache, segments = core.cache(seed=1), []
    before = footprint()
    for index in range(5):
        receiver, sender = core.receiver(), core.sender()
        segments.append(Path(receiver.segment))
        for name in ("a", "b"):
            core.push(sender, receiver, f"{name}{index}", cache, range(8))
        sender.open(receiver.endpoint, "open", 4, 512)
        (sender if index % 2 else receiver).close()
        (receiver if index % 2 else sender).close()
    core.closing.clear()
    eventually(lambda: footprint().fits(before))
    assert not [path for path in segments if path.exists()]


def core_threads() -> set[str]:
    """The threads of this process that the core named: others come and go."""
    named = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith("tetri-"):
                named.add(task.name)
    return named


def wakes(threads: set[str]) -> dict[str, int]:
    """How often those of these threads that have not ended went to sleep so far."""
    found = {}
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/self/task/{thread}/status").read_text()
            found[thread] = int(state.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return found


def test_an_idle_pair_sleeps(core: Backend) -> None:
    others = core_threads()
    receiver, sender, cache = core.ends()
    ended(core.push(sender, receiver, "t", cache, range(8)))
    held = sender.open(receiver.endpoint, "held", 4, 512)
    eventually(lambda: receiver.find("held"))
    before = wakes(core_threads() - others)
    threading.Event().wait(1.0)
    after = wakes(set(before))
    assert after, "all threads of an idle pair ended"
    assert sum(after[thread] - before[thread] for thread in after) <= 20
    held.cancel()
