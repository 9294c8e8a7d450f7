"""Whole trees of processes are killed and stopped."""

from __future__ import annotations

import psutil

from tests.eventually import eventually
from tests.faults.processes import started
from vllm_tetri.bench.soak.processes import alive

FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


def test_a_tree_is_killed_as_a_whole() -> None:
    with started(["-c", FAMILY]) as family:
        assert family.line() == "ready"
        below = eventually(lambda: len(found := family.look()) == 2 and found)
        family.kill()
        family.gone()
        assert alive(below) == []


def test_a_tree_is_stopped_and_goes_on() -> None:
    with started(["-c", FAMILY]) as family:
        assert family.line() == "ready"
        eventually(lambda: len(family.look()) == 2)
        family.stop()
        assert {each.status() for each in family.look()} == {psutil.STATUS_STOPPED}
        family.resume()
        eventually(lambda: psutil.STATUS_STOPPED not in {each.status() for each in family.look()})
    family.gone()
