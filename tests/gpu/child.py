"""One step in a process of its own: `python -m tests.gpu.child MODULE:FUNCTION DEVICE FOLDER`.

It writes `result.json` into the folder: the verdict, a reason in one line, and the figures.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.catalogue import Skip

_MOST_CHARACTERS = 300


def said(verdict: str, reason: str, figures: dict[str, Any] | None = None) -> dict[str, Any]:
    text = " ".join(reason.split())
    return {"verdict": verdict, "reason": text[:_MOST_CHARACTERS], "figures": figures or {}}


def perform(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Run the function; its figures with one or two of them in words as the reason."""
    try:
        module, _, function = name.partition(":")
        figures = getattr(importlib.import_module(module), function)(device, folder)
    except Skip as reason:
        return said("SKIP", str(reason))
    except Exception as error:
        traceback.print_exc()
        return said("FAIL", f"{type(error).__name__}: {error}", getattr(error, "figures", {}))
    return said("PASS", figures.pop("summary", ""), figures)


def main() -> int:
    name, device, folder = sys.argv[1:]
    result = perform(name, device, Path(folder))
    (Path(folder) / "result.json").write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 0 if result["verdict"] != "FAIL" else 1


if __name__ == "__main__":
    raise SystemExit(main())
