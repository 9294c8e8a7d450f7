"""Faults: which comes next, which process it hits, and what a cluster promises under them. Pure,
but for finding processes and sending signals."""

from __future__ import annotations

import contextlib
import signal
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import psutil

READY = "ready"
KINDS = (
    "kill-prefill", "kill-decode", "kill-router", "kill-predictor", "kill-engine",
    "stop-prefill", "stop-decode", "stop-router", "stop-predictor",
)  # fmt: skip
"""Killed are all processes of a victim, as when its machine dies; stopped ones continue after a
while, as after a pause. Of an engine only the computing process is killed: its API server lives
and has to notice."""

LASTS_S = 5.0
# A request that was sent to a router at the moment of its death counts as in flight there.
_DYING_S = 1.0

States = Mapping[str, tuple[str, str]]
"""Role and state of every instance, router and predictor by name."""


@dataclass(slots=True)
class Fault:
    """One fault that happened; times are monotonic seconds.

    Attributes:
        was_gone: Whether the cluster has noticed.
        whole_s: When the victim was ready again; None if that was not seen.
    """

    kind: str
    victim: str
    at_s: float
    was_gone: bool = False
    whole_s: float | None = None

    def observe(self, states: States, now: float) -> None:
        """Record whether the victim is ready again."""
        state = states.get(self.victim, ("", "gone"))[1]
        if state != READY:
            self.was_gone = True
        elif self.was_gone and self.whole_s is None:
            self.whole_s = now


def victims(kind: str, states: States) -> list[str]:
    """Return the members that a fault may hit: those with another ready one of their role.

    A predictor needs no other one, since its instance works without.
    """
    wanted = kind.partition("-")[2]
    by_role: dict[str, list[str]] = {}
    for name, (role, state) in sorted(states.items()):
        if state == READY:
            by_role.setdefault(role, []).append(name)
    if wanted == "predictor":
        return by_role.get(wanted, [])
    roles = set(by_role) - {"router", "predictor"} if wanted == "engine" else {wanted}
    spared = [by_role.get(role, []) for role in sorted(roles)]
    return sorted(name for names in spared if len(names) > 1 for name in names)


class Deck:
    """Kinds in an order that a seed decides, every kind as often as any other."""

    def __init__(self, kinds: Iterable[str], number: int, rng: Random) -> None:
        kinds = list(kinds)
        cards = [rng.sample(kinds, len(kinds)) for _ in range(-(-number // len(kinds)))]
        self._left = [kind for hand in cards for kind in hand][:number]
        self._rng = rng

    def __len__(self) -> int:
        return len(self._left)

    def draw(self, states: States) -> tuple[str, str] | None:
        """Return the next fault that is possible now and its victim; None if none is."""
        for kind in self._left:
            if found := victims(kind, states):
                self._left.remove(kind)
                return kind, self._rng.choice(found)
        return None


# -- processes -----------------------------------------------------------------------


def members(root: psutil.Process, routers: Mapping[int, str]) -> dict[str, list[psutil.Process]]:
    """Return the processes of every instance, router and predictor below `up`, by name.

    The guard of each is left out: it tells `up` how the member ended. A predictor is also among
    the processes of its instance.

    Args:
        routers: Names of routers by port.
    """
    found: dict[str, list[psutil.Process]] = {}
    for each in root.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            name = _name_of(each.cmdline(), routers)
            if name:
                found[name] = each.children(recursive=True)
    for name, processes in list(found.items()):
        for each in processes:
            words = _words(each)
            if "predictor.server" in words and "--role" not in words:
                found[f"{name}'s predictor"] = [each]
    return found


def _name_of(words: Sequence[str], routers: Mapping[int, str]) -> str:
    if "vllm_tetri.launch.guard" not in words:
        return ""
    command = words[words.index("vllm_tetri.launch.guard") + 4 :]  # after its parent, nice, cores
    if "--tetri-instance" in command:
        return command[command.index("--tetri-instance") + 1]
    if "router" in command and "--port" in command:
        return routers.get(int(command[command.index("--port") + 1]), "")
    return ""


def engine_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the process that computes: the first worker, else the engine's core."""
    named = {each: _words(each) for each in processes}
    for title in ("::Worker", "::EngineCore"):
        found = [each for each, words in named.items() if title in words]
        if found:
            return [min(found, key=lambda each: named[each])]
    return []


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all that are still there."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended; zombies have."""
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


# -- tally ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promise:
    """Something a cluster promises; `is_kept` is None where the run cannot say."""

    text: str
    is_kept: bool | None
    found: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its end; times are monotonic seconds.

    Attributes:
        end: good, wrong (not the output of before), error (one clear error), lost (neither), or
            left (the client did not wait).
        gap_s: The longest time without a token, the wait for the first one included.
        retries: How often the client went on to another router.
        broke: Routers whose connections broke before a byte of the response had come.
    """

    end: str
    began_s: float
    ended_s: float
    gap_s: float = 0.0
    retries: int = 0
    words: str = ""
    router: str = ""
    broke: tuple[str, ...] = ()


def rows(asked: Sequence[Asked], faults: Sequence[Fault]) -> list[dict[str, object]]:
    """Return one row for the time before faults, one per kind, and their sum.

    A request is counted under the newest fault before its end; faults are in order of time.
    """
    cause: dict[str, list[Asked]] = {}
    for each in asked:
        place = bisect_right(faults, each.ended_s, key=lambda fault: fault.at_s)
        cause.setdefault(faults[place - 1].kind if place else "no fault", []).append(each)
    hits = {kind: [each for each in faults if each.kind == kind] for kind in KINDS}
    kinds = ["no fault", *(kind for kind in KINDS if hits[kind])]
    found = [_row(kind, cause.get(kind, []), hits.get(kind, [])) for kind in kinds]
    return [*found, _row("all", asked, faults)]


def _row(name: str, asked: Sequence[Asked], faults: Sequence[Fault]) -> dict[str, object]:
    ends = [each.end for each in asked]
    back = [each.whole_s - each.at_s for each in faults if each.whole_s is not None]
    return {
        "after": name,
        "faults": len(faults),
        **{end: ends.count(end) for end in ("good", "lost", "error", "wrong", "left")},
        "retries": sum(each.retries for each in asked),
        "longest gap, s": round(max((each.gap_s for each in asked), default=0.0), 2),
        "whole after, s": round(max(back, default=0.0), 1),
    }


def promises_of_outputs(asked: Sequence[Asked], faults: Sequence[Fault]) -> list[Promise]:
    """Return what clients are promised. A response that a router has begun dies with it."""
    ends = [each.end for each in asked]
    lost = [each for each in asked if each.end == "lost"]
    beyond = sum(not _died_with(each, each.router, faults) for each in lost)
    broke = [(each, router) for each in asked for router in each.broke]
    alone = sum(not _died_with(each, router, faults) for each, router in broke)
    with_router = f"{beyond}, and {len(lost) - beyond} with their router"
    good, errors, wrong = (ends.count(end) for end in ("good", "error", "wrong"))
    return [
        Promise("no request is lost", beyond == 0, with_router),
        Promise("no router breaks a connection while it lives", alone == 0, f"{alone}"),
        Promise("no output ends with an error", errors == 0, f"{errors}"),
        Promise("no output is wrong", wrong == 0, f"{wrong}"),
        Promise("requests are served", good > 0, f"{good} outputs"),
    ]


def _died_with(asked: Asked, router: str, faults: Sequence[Fault]) -> bool:
    return any(
        each.kind == "kill-router"
        and each.victim == router
        and asked.began_s - _DYING_S <= each.at_s <= asked.ended_s
        for each in faults
    )


@dataclass(slots=True)
class Leftovers:
    """What instances without requests report as left over; what lasts `LASTS_S` counts."""

    stayed: set[str] = field(default_factory=set)
    brief: set[str] = field(default_factory=set)
    _since: dict[str, float] = field(default_factory=dict)

    def record(self, found: Mapping[str, Sequence[str]], now: float) -> None:
        """Record the reports of all idle instances; each entry begins with a number."""
        kinds = {
            f"{name}: {text.partition(' ')[2]}" for name, all_ in found.items() for text in all_
        }
        self._since = {kind: self._since.get(kind, now) for kind in sorted(kinds)}
        self.brief |= kinds
        self.stayed |= {kind for kind, since in self._since.items() if now - since >= LASTS_S}

    def restart(self) -> None:
        """Count anew: a member is stopped, so nothing can be over."""
        self._since.clear()

    def promise(self) -> Promise:
        """Return the promise that idle instances keep nothing."""
        brief = sorted(self.brief - self.stayed)
        words = "; ".join(sorted(self.stayed)) or "nothing"
        words += f" (shorter than {LASTS_S:g} s: {'; '.join(brief)})" if brief else ""
        return Promise("nothing stays in an instance without requests", not self.stayed, words)


def promises_of_usage(samples: Sequence[Mapping[str, float]]) -> list[Promise]:
    """Return that nothing grows from rest to rest; the first sample only warms up.

    Args:
        samples: Sums over all processes while everything is back and idle, by quantity.
    """
    limits = {"processes": 2.0, "descriptors": 4.0, "threads": 2.0, "shared MiB": 0.0}
    judged = samples[1:] if len(samples) > 2 else samples
    found = []
    for name, limit in limits.items():
        text = f"{name}: no growth"
        if len(judged) < 2:
            found.append(Promise(text, None, "too few samples"))
            continue
        # What a killed peer left open is closed after a minute, so the smaller half decides.
        half = len(judged) // 2
        early = min(each[name] for each in judged[: len(judged) - half])
        late = min(each[name] for each in judged[-half:])
        most = limit if name in ("processes", "shared MiB") else limit * judged[0]["processes"]
        words = f"{early:,.0f} to {late:,.0f} ({len(judged)} samples)"
        found.append(Promise(text, late - early <= most, words))
    return found
