"""The Helm chart of examples/kubernetes, rendered by helm itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.needed import lacking

CHART = Path(__file__).parents[2] / "examples/kubernetes/chart"
NAME, NAMESPACE = "llm", "serving"
LEAST: dict[str, Any] = {"model": "/models/m", "image": {"repository": "registry/tetri"}}
ROLES = ("prefill", "decode", "both")
Manifest = dict[str, Any]


def helm() -> str:
    """The path of helm, which `.ci/install` puts into the environment."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return shutil.which("helm", path=places) or lacking("the command helm", "run .ci/install")


def helmed(verb: str, *more: str, **values: Any) -> str:
    """What helm prints for the chart and some values, with those that have to be given anyway;
    ValueError with what it says if it refuses."""
    words = [helm(), verb, NAME, str(CHART), "-n", NAMESPACE, "-f", "-", *more]
    text = json.dumps(LEAST | values)
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout


def rendered(**values: Any) -> list[Manifest]:
    """The manifests for some values."""
    return manifests_of(helmed("template", **values))


def manifests_of(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The manifest of this kind whose name ends with `name`."""
    full = f"{NAME}-{name}" if name else NAME
    (found,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, full))
    return found


def pod_of(manifests: list[Manifest], component: str) -> Manifest:
    """The specification of a component's pods."""
    spec: Manifest = one(manifests, "Deployment", component)["spec"]["template"]["spec"]
    return spec


def container_of(manifests: list[Manifest], component: str) -> Manifest:
    (only,) = pod_of(manifests, component)["containers"]
    found: Manifest = only
    return found
