"""The steps, in the order in which they run. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = {
    "A": "torch alone: what links and movers ask of a device",
    "B": "stock vLLM: equality, contracts, kills, sleep",
    "C": "speed: full graphs, an 8B shape, sweeps, hand-over, flips",
}


class Skip(Exception):
    """The step cannot run here; the text says why."""


@dataclass(frozen=True)
class Step:
    """A function `f(device, folder)`, named `module:function`, that returns figures. It raises
    AssertionError or anything else when it fails, and `Skip` with a reason where it
    cannot run. `limit_s` is the time after which it is ended, by device."""

    stage: str
    name: str
    function: str
    limit_s: dict[str, float]
    not_on_cpu: str = ""  # why there is nothing to run on a CPU


def _step(
    stage: str, module: str, name: str, cuda_s: float, cpu_s: float, not_on_cpu: str = ""
) -> Step:
    function = f"tests.gpu.{module}:{name}"
    return Step(stage, name, function, {"cuda": cuda_s, "cpu": cpu_s}, not_on_cpu)


STEPS = (
    _step("A", "memory", "mover", 180, 120),
    _step("A", "memory", "arena", 120, 120),
    _step("A", "memory", "streams", 180, 120),
    _step("A", "memory", "ipc", 120, 120),
    _step("A", "memory", "bandwidth", 180, 120),
    _step("B", "serving", "contract", 240, 300),
    _step("B", "serving", "dummy", 420, 300),
    _step("B", "serving", "links", 420, 0, "links of a GPU's memory"),
    _step("B", "serving", "models", 420, 0, "`tests.models.run` is the same on a CPU"),
    _step("B", "serving", "suite", 900, 0, "`make test-all` runs these tests"),
    _step("B", "serving", "real", 420, 0, "interpreted kernels are too slow for SmolLM2"),
    _step("B", "serving", "kills", 480, 480),
    _step("B", "serving", "sleep", 300, 0, "vLLM's CPU worker ignores sleep mode"),
    _step("C", "speed", "graphs", 540, 0, "a CPU captures no graphs"),
    _step("C", "speed", "bench", 480, 600),
    _step("C", "speed", "classes", 1800, 600),
    _step("C", "speed", "sweeps", 1500, 600),
    _step("C", "speed", "handover", 480, 600),
    _step("C", "speed", "flips", 420, 600),
)
