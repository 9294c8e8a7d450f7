"""A suite of fake commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_tetri import cli

# Stands for `vllm-tetri`: notes what it is asked, and does as the file `behaviour` says.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
words, here = sys.argv[1:], Path(__file__).parent
name = words[1]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
behaviour = json.loads((here / "behaviour").read_text()).get(name, "")
if behaviour == "fail":
    print("out of luck", flush=True)
    sys.exit(3)
if behaviour == "hang":
    try:
        (here / "pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        (here / "ended").write_text("in good order")
        sys.exit(130)
if behaviour != "nothing":
    place = Path(words[words.index("--json" if "--json" in words else "--output") + 1])
    folder = place.parent if place.suffix else place
    (folder / f"{name}.json").write_text("{}")
"""


class Stage:
    """A folder with the fake program, and what it was asked so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "fake.py"
        self.program.write_text(FAKE)
        self.behave()

    def behave(self, **behaviour: str) -> None:
        (self.folder / "behaviour").write_text(json.dumps(behaviour))

    def calls(self) -> list[list[str]]:
        """Since the last time."""
        path = self.folder / "calls"
        found = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        path.unlink(missing_ok=True)
        return found

    def names(self) -> list[str]:
        return [words[1] for words in self.calls()]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "suite.json").read_text())
        return found


def run(*words: str, only: str = "e8,e10", model: str = "a-model") -> int:
    return cli.main(["bench", "suite", model, "--quick", "--only", only, "--output", "out", *words])
