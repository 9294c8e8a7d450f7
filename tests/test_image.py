"""The Dockerfile: linted, and its steps with pip run where no container engine is."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installing import ROOT, clean_environment, copy_sources, make_environment, run
from tests.needed import needed
from vllm_tetri import __version__

DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"
OUTSIDE = ("apt-get", "rm -rf /var/lib", "useradd")  # steps that change the whole system


def stages() -> list[list[tuple[str, str]]]:
    """Instructions of each stage and their values."""
    content = io.BytesIO(DOCKERFILE.read_bytes())
    found: list[list[tuple[str, str]]] = []
    for each in needed("dockerfile_parse").DockerfileParser(fileobj=content).structure:
        if each["instruction"] == "FROM":
            found.append([])
        if found and each["instruction"] != "COMMENT":
            found[-1].append((each["instruction"], each["value"]))
    return found


def test_hadolint_finds_nothing() -> None:
    needed("dockerfile_parse")  # is installed together with hadolint
    run(str(Path(sys.prefix, "bin", "hadolint")), str(DOCKERFILE))


def test_the_image_runs_the_command_as_an_ordinary_user() -> None:
    final = dict(stages()[-1])
    assert json.loads(final["ENTRYPOINT"]) == ["vllm-tetri"]
    assert int(final["USER"]) > 0


def test_only_what_the_wheel_needs_goes_to_the_container_engine() -> None:
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = {name for value in copies() for name in value.split()[:-1]}
    assert sent == copied


def copies() -> Iterator[str]:
    """Values of the instructions that copy from the clone."""
    for name, value in stages()[0]:
        if name == "COPY":
            yield value


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_steps_install_a_wheel_beside_vllm(tmp_path: Path) -> None:
    """Folders of the image are below `tmp_path`; each stage has an environment, the last one with
    vLLM in reach, as its base has."""
    clone = tmp_path / "clone"
    copy_sources(clone)
    for number, stage in enumerate(stages()):
        place = tmp_path / f"stage-{number}"
        make_environment(place, has_vllm=number == 1)
        environment = clean_environment(PATH=f"{place}/bin:/usr/bin:/bin")
        folder = tmp_path
        for name, value in stage:
            if name == "WORKDIR" and number == 0:
                folder = tmp_path / value.lstrip("/")
                folder.mkdir()
            elif name == "COPY":
                *sources, target = value.split()
                for source in sources:
                    run("cp", "-r", str(clone / source), str(folder / target))
            elif name == "RUN":
                for step in steps(value):
                    below = re.sub(r"(?<=[ =])/(?=\w)", f"{tmp_path}/", step)
                    run("bash", "-ec", below, cwd=folder, env=environment)
    entry, command = (str(tmp_path / "stage-1" / "bin" / "vllm-tetri"), "--version")
    shown = run(entry, command, cwd=tmp_path, env=clean_environment())
    assert shown == f"vllm-tetri {__version__}\n"


def steps(value: str) -> list[str]:
    """Commands of a RUN instruction without its mounts, and without what changes the system."""
    command = re.sub(r"^(--\S+\s+)*", "", value)
    return [step for step in re.split(r"\s+&& ", command) if not step.startswith(OUTSIDE)]
