"""Who is hit in a soak, when, and how a victim is known."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import psutil
import pytest

from tests.eventually import eventually
from vllm_tetri.bench.soak import processes
from vllm_tetri.bench.soak.faults import AWAY, Deck, Fault, Kind, victims

PAIRS = {
    "prefill-0": ("prefill", "ready"),
    "prefill-1": ("prefill", "ready"),
    "decode-0": ("decode", "ready"),
    "decode-1": ("decode", "ready"),
    "router-0": ("router", "ready"),
    "router-1": ("router", "ready"),
    "prefill-0's predictor": ("predictor", "ready"),
}
NOBODY = {"router-0": ("router", AWAY), "router-1": ("router", AWAY)}


def test_the_last_of_a_role_is_spared() -> None:
    assert victims(Kind.KILL_PREFILL, PAIRS) == ["prefill-0", "prefill-1"]
    assert victims(Kind.KILL_ROUTER, PAIRS) == ["router-0", "router-1"]
    alone = {**PAIRS, "prefill-1": ("prefill", "silent"), "router-0": ("router", AWAY)}
    assert victims(Kind.STOP_PREFILL, alone) == []
    assert victims(Kind.KILL_ROUTER, alone) == []
    assert victims(Kind.KILL_ENGINE, PAIRS) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert victims(Kind.KILL_ENGINE, alone) == ["decode-0", "decode-1"]
    assert victims(Kind.KILL_ENGINE, NOBODY) == []


def test_the_only_predictor_is_not_spared() -> None:
    assert victims(Kind.KILL_PREDICTOR, PAIRS) == ["prefill-0's predictor"]
    away = {**PAIRS, "prefill-0's predictor": ("predictor", AWAY)}
    assert victims(Kind.STOP_PREDICTOR, away) == []


def test_every_kind_comes_as_often_as_any_other_and_a_seed_decides() -> None:
    decks = [Deck(list(Kind), 2 * len(Kind), Random(7)) for _ in range(2)]
    drawn = [[deck.draw(PAIRS) for _ in range(2 * len(Kind))] for deck in decks]
    assert drawn[0] == drawn[1]
    kinds = [found[0] for found in drawn[0] if found]
    assert sorted(kinds) == sorted([*Kind, *Kind])
    assert decks[0].is_empty
    assert decks[0].draw(PAIRS) is None


def test_what_is_not_possible_now_comes_later() -> None:
    deck = Deck([Kind.KILL_PREFILL, Kind.STOP_DECODE], 4, Random(0))
    alone = {**PAIRS, "prefill-1": ("prefill", "silent")}
    kinds = [found[0] for found in (deck.draw(alone) for _ in range(2)) if found]
    assert kinds == [Kind.STOP_DECODE] * 2
    assert deck.draw(alone) is None
    kinds = [found[0] for found in (deck.draw(PAIRS) for _ in range(2)) if found]
    assert kinds == [Kind.KILL_PREFILL] * 2
    assert deck.is_empty


def test_what_did_not_happen_is_put_back() -> None:
    deck = Deck([Kind.KILL_DECODE], 1, Random(0))
    drawn = [deck.draw(PAIRS), deck.draw(PAIRS)]
    deck.put_back(Kind.KILL_DECODE)
    drawn += [deck.draw(PAIRS), deck.draw(PAIRS)]
    assert [found and found[0] for found in drawn] == [
        Kind.KILL_DECODE, None, Kind.KILL_DECODE, None,
    ]  # fmt: skip


def test_a_victim_is_back_when_it_was_gone_and_is_ready() -> None:
    fault = Fault(Kind.KILL_DECODE, "decode-0", 10.0)
    fault.look(PAIRS, 10.5)  # no router has noticed
    assert fault.whole_s is None
    fault.look(NOBODY, 11.0)  # nobody to ask
    assert not fault.was_gone
    fault.look({**PAIRS, "decode-0": ("decode", "silent")}, 12.0)
    fault.look(PAIRS, 20.0)
    fault.look(PAIRS, 30.0)
    assert fault.whole_s == 20.0


def test_a_router_is_back_when_it_answers() -> None:
    fault = Fault(Kind.KILL_ROUTER, "router-1", 10.0)
    fault.look({**PAIRS, "router-1": ("router", AWAY)}, 10.5)
    fault.look(PAIRS, 13.0)
    assert fault.whole_s == 13.0


def test_a_predictor_is_back_when_its_process_is() -> None:
    fault = Fault(Kind.KILL_PREDICTOR, "prefill-0's predictor", 10.0)
    fault.look({name: PAIRS[name] for name in PAIRS if name != fault.victim}, 10.5)
    fault.look(PAIRS, 11.0)
    assert fault.whole_s == 11.0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["serve", "--tetri-instance", "d-0"], "d-0"),
        (["-m", "vllm_tetri.cli", "router", "--mode", "split", "--port", "8001"], "router-1"),
        (["-m", "vllm_tetri.cli", "router", "--port", "9000"], ""),
        (["-m", "vllm_tetri.cli", "up", "m", "--port", "8001"], ""),
    ],
)
def test_a_guard_tells_whose_it_is(words: list[str], name: str) -> None:
    routers = {8000: "router-0", 8001: "router-1"}
    guard = ["python", "-m", "vllm_tetri.launch.guard", "--parent", "1", "--", "py"]
    assert processes.name_of([*guard, *words], routers) == name
    assert processes.name_of(["py", *words], routers) == ""


# -- real processes ----------------------------------------------------------------

_WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def running(*words: str) -> Iterator[psutil.Process]:
    """A process whose command line has these words; it does nothing."""
    command = [sys.executable, "-c", _WAIT, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def test_the_engine_is_the_first_worker_where_there_is_one() -> None:
    with (
        running("server") as server,
        running("VLLM::EngineCore") as engine,
        running("VLLM::Worker_TP1") as second,
        running("VLLM::Worker_TP0") as first,
    ):
        assert processes.engine_of([server]) == []
        assert processes.engine_of([server, engine]) == [engine]
        assert processes.engine_of([server, engine, second, first]) == [first]


def test_a_stopped_process_is_alive_and_does_not_run() -> None:
    with running() as each:
        assert processes.is_running(each)
        each.send_signal(signal.SIGSTOP)
        eventually(lambda: not processes.is_running(each))
        assert processes.alive([each]) == [each]
        each.kill()
        each.wait(10)
        assert not processes.is_running(each)


def test_members_are_found_below_their_guards() -> None:
    """This process is `up`, and its children say that they are guards."""
    guard = ("-m", "vllm_tetri.launch.guard", "--", "py")
    router = ("-m", "vllm_tetri.cli", "router", "--port")
    with (
        running(*guard, "serve", "--tetri-instance", "prefill-0"),
        running(*guard, *router, "8000"),
        running(*guard, *router, "8001"),
    ):
        found = processes.members(psutil.Process(), {8000: "router-0", 8001: "router-1"})
        assert set(found) == {"prefill-0", "router-0", "router-1"}
