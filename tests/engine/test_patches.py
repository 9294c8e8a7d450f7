"""Every patch still fits the installed vLLM and says what it is for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import vllm

PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_applies_to_a_copy_of_vllm(patch: Path, tmp_path: Path) -> None:
    text = patch.read_text()
    for heading in ("What:", "Why:", "Remove when:"):
        assert re.search(f"^{heading} \\w", text, re.MULTILINE), heading
    for name in re.findall(r"^--- a/(vllm/\S+)$", text, re.MULTILINE):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(vllm.__file__).parent.parent / name, target)
    subprocess.run(["git", "apply", "--check", "-p1", str(patch)], cwd=tmp_path, check=True)
