"""Measuring what is missing in a run of `vllm-tetri bench modes`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import median

from rich.progress import Progress, TaskID

from vllm_tetri.bench import fleet, setting
from vllm_tetri.bench.arrivals import Arrival, Slo
from vllm_tetri.bench.modes import client as modes_client
from vllm_tetri.bench.modes import load as modes_load
from vllm_tetri.bench.modes.cells import Cell, Key, Raw, Request, Speed, requests_of
from vllm_tetri.bench.modes.client import Reply, Turn
from vllm_tetri.bench.modes.figures import tpot_s
from vllm_tetri.bench.modes.load import MIXED, RATES, Load
from vllm_tetri.bench.modes.speed import speeds
from vllm_tetri.bench.modes.systems import STOCK, SYSTEMS, Site, System, serving
from vllm_tetri.bench.modes.usage import used
from vllm_tetri.bench.router.systems import Talker
from vllm_tetri.errors import UnsupportedError

HEAD, CELLS = "modes.json", "cells.jsonl"
_AT_ONCE = 48  # requests that tell a capacity
_LONE = 9  # requests one at a time
_LONE_CLASS = "hpld"
_WARM_UP = 16
_REST_S = 1.0  # between two cells
_SPEED_S = 1.0
_START_S = 45.0  # of a system with its warm-up, for the estimate
_QUIET_S = 180.0  # without a single token a system is stuck, however slow the machine is


@dataclass(frozen=True, slots=True)
class Block:
    """Cells that a system is asked from one start to its end."""

    system: str
    repeat: int
    loads: tuple[Load, ...]


def blocks(
    systems: Sequence[str], loads: Sequence[Load], repeats: int, seed: int, done: Mapping[Key, Cell]
) -> list[Block]:
    """What is not done yet: systems in random order in every repeat, cells in random order."""
    found = []
    for repeat in range(repeats):
        for system in Random(f"{seed} {repeat}").sample(systems, len(systems)):
            order = Random(f"{seed} {repeat} {system}").sample(loads, len(loads))
            left = tuple(load for load in order if (system, *load, repeat) not in done)
            if left:
                found.append(Block(system, repeat, left))
    return found


def cell_s(load: Load, count: int, capacities: Mapping[str, float]) -> float:
    """How long a cell takes stock, roughly."""
    rate_per_s = modes_load.rate_per_s(load, capacities)
    most_per_s = rate_per_s / RATES[load[1]]
    return count / min(rate_per_s, most_per_s) + _REST_S


def estimate_s(left: Sequence[Block], count: int, capacities: Mapping[str, float]) -> float:
    """How long all this takes, if all systems are as fast as stock."""
    return sum(
        _START_S + sum(cell_s(load, count, capacities) for load in block.loads) for block in left
    )


class Run:
    """Everything that measuring needs; used by one thread.

    Args:
        raw: What is there already; results are added to it and to its files.
        count: Requests of a cell.
    """

    def __init__(self, site: Site, raw: Raw, progress: Progress, *, count: int, seed: int) -> None:
        self._site = site
        self._raw = raw
        self._progress = progress
        self._count = count
        self._seed = seed
        self._cells = site.folder / CELLS

    def measure_first(self, classes: Sequence[str]) -> None:
        """Ask stock how long one request takes and how many of each class it answers, as far
        as it is not known yet.

        Raises:
            UnsupportedError: It does not start, or a request fails.
        """
        head = self._raw.head
        missing = [name for name in modes_load.measured(classes) if name not in head["capacities"]]
        if not missing and head["lone"]:
            return
        task = self._progress.add_task("what stock answers", total=len(missing) + 1)
        with self._serving(STOCK) as client:
            if not head["lone"]:
                self._measure_lone(client)
                setting.write_json(self._site.folder / HEAD, head)
            self._progress.advance(task)
            for name in missing:
                self._measure_capacity(client, name)
                setting.write_json(self._site.folder / HEAD, head)
                self._progress.advance(task)
        self._progress.remove_task(task)

    def promise(self, slo: Slo) -> None:
        """What systems that are told are to keep."""
        self._site = replace(self._site, slo=slo)

    def measure(self, left: Sequence[Block]) -> None:
        """One block after the other.

        Raises:
            UnsupportedError: A system does not start, or every request of a cell fails, and not
            because it was refused by a system that is told to.
        """
        capacities = self._raw.head["capacities"]
        total_s = estimate_s(left, self._count, capacities)
        task = self._progress.add_task("starting", total=total_s)
        for block in left:
            self._progress.update(task, description=f"{block.system}, repeat {block.repeat + 1}")
            self._note_speed(block, "before")
            with self._serving(block.system) as client:
                self._progress.advance(task, _START_S)
                for load in block.loads:
                    self._measure_cell(client, block, load, task)
                    self._progress.advance(task, cell_s(load, self._count, capacities))
            self._note_speed(block, "after")
        self._progress.update(task, description="done")

    def _measure_cell(self, client: Client, block: Block, load: Load, task: TaskID) -> None:
        title = f"{block.system}, {' '.join(load)}, repeat {block.repeat + 1}"
        self._progress.update(task, description=title)
        capacities = self._raw.head["capacities"]
        schedule, seed = schedule_of(load, block.repeat, self._count, capacities, self._seed)
        played = self._undisturbed(lambda: client.play(schedule, seed))
        _require_any(played.found, SYSTEMS[block.system], title)
        cell = Cell(
            system=block.system,
            name=load[0],
            rate=load[1],
            repeat=block.repeat,
            rate_per_s=round(modes_load.rate_per_s(load, capacities), 4),
            took_s=round(_took_s(played.found), 4),
            busy=played.busy,
            foreign=played.foreign,
            requests=played.found,
        )
        self._raw.add_cell(self._cells, cell)

    def _measure_lone(self, client: Client) -> None:
        rng = Random(f"{self._seed} lone")
        schedule = modes_load.at_once(_LONE_CLASS, _LONE, rng)
        found = self._measure_stock(
            lambda: [
                each
                for place, due in enumerate(schedule)
                for each in client.play([due], f"{self._seed} lone {place}")
            ]
        )
        self._raw.head["lone"] = {
            "ttft_s": round(median(each.reply.ttft_s for each in found), 5),
            "tpot_s": round(median(tpot_s(each) for each in found), 6),
        }

    def _measure_capacity(self, client: Client, name: str) -> None:
        key = f"{self._seed} capacity {name}"
        schedule = modes_load.at_once(name, _AT_ONCE, Random(key))
        found = self._measure_stock(lambda: client.play(schedule, key))
        self._raw.head["capacities"][name] = round(_AT_ONCE / _took_s(found), 4)

    def _measure_stock(self, play: Callable[[], list[Request]]) -> list[Request]:
        head = self._raw.head
        played = self._undisturbed(play)
        _require(played.found, STOCK)
        head["foreign"] = max(head["foreign"], played.foreign)
        return played.found

    def _undisturbed(self, play: Callable[[], list[Request]]) -> _Played:
        """Play it; again where others used the cores too, but not for ever."""

        def tries() -> Iterator[_Played]:
            while True:
                time.sleep(_REST_S)
                before = used(self._site.cores)
                found = play()
                spent = used(self._site.cores).since(before)
                foreign_s = max(0.0, spent.busy_s - spent.own_s)
                busy, foreign = (round(each / spent.all_s, 4) for each in (spent.own_s, foreign_s))
                yield _Played(found, busy, foreign)

        return fleet.in_time(tries(), lambda each: each.foreign)

    @contextmanager
    def _serving(self, name: str) -> Iterator[Client]:
        with serve(SYSTEMS[name], self._site, self._seed) as (client, _):
            yield client

    def _note_speed(self, block: Block, when: str) -> None:
        gflops = speeds(self._site.cores, _SPEED_S)
        self._raw.add_speed(self._cells, Speed(block.system, block.repeat, when, gflops))


def schedule_of(
    load: Load, repeat: int, count: int, capacities: Mapping[str, float], seed: int
) -> tuple[list[Arrival], str]:
    """Requests of a cell, and the seed of their prompts: nothing here knows the system."""
    key = f"{seed} {' '.join(load)} {repeat}"
    return modes_load.schedule(load, count, capacities, Random(key)), key


@contextmanager
def serve(system: System, site: Site, seed: int) -> Iterator[tuple[Client, str]]:
    """A system, started and warmed up: who asks it, and its URL.

    Raises:
        UnsupportedError: It does not start, or a request fails.
    """
    words = [sys.executable, "-m", modes_client.__name__]
    with (
        serving(system, site) as url,
        Talker(words, site.cores, site.folder / "client.log") as talker,
    ):
        client = Client(talker, url, site.served_name)
        warm_up = modes_load.at_once(MIXED, _WARM_UP, Random(f"{seed} warm-up"))
        warmed = client.play(warm_up, f"{seed} warm-up")
        if system.has_slo:
            warmed = [each for each in warmed if not each.is_refused]
        _require(warmed, f"warming up {system.name}")
        yield client, url


class Client:
    """Sends schedules to one system, from a process of its own."""

    def __init__(self, talker: Talker, url: str, model: str) -> None:
        self._talker = talker
        self._url = url
        self._model = model

    def play(self, schedule: Sequence[Arrival], seed: str) -> list[Request]:
        """Send it and wait for the end."""
        turn = Turn(
            url=self._url,
            model=self._model,
            at_s=[each.at_s for each in schedule],
            prompt_tokens=[each.length.prompt_tokens for each in schedule],
            output_tokens=[each.length.output_tokens for each in schedule],
            seed=seed,
            quiet_s=_QUIET_S,
        )
        answer = self._talker.ask(asdict(turn))
        return requests_of(schedule, [Reply(**each) for each in answer["replies"]])


def _took_s(found: Sequence[Request]) -> float:
    """Until the last answer; without any, until the last request was due."""
    ends = (each.at_s + each.reply.jct_s for each in found if not each.reply.error)
    return max(ends, default=found[-1].at_s)


def _require_any(found: Sequence[Request], system: System, title: str) -> None:
    """A system that is to refuse what comes late may refuse everything; else one that answers
    nothing is broken.

    Raises:
        UnsupportedError: It is.
    """
    if not all(each.reply.error for each in found):
        return
    if system.has_slo and all(each.is_refused for each in found):
        return
    raise UnsupportedError(f"{title}: every request failed: {found[0].reply.error}")


def _require(found: Sequence[Request], what: str) -> None:
    for each in found:
        if each.reply.error:
            raise UnsupportedError(f"{what}: {each.reply.error}")


@dataclass(frozen=True, slots=True)
class _Played:
    """What became of requests, and what parts of the cores' time were used: by the system
    and the client, and by everybody else."""

    found: list[Request]
    busy: float
    foreign: float
