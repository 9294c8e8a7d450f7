"""Builds what is compiled; everything else is in pyproject.toml.

CMake builds the C++ cores. mypyc compiles decisions, which every request and step waits for, from
the Python files that stay beside them: they take half of the time then. Without mypyc, which pip
fetches for a build, they are not compiled.
"""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from sysconfig import get_config_var

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TARGETS = {"vllm_tetri.transport._core": "_core", "vllm_tetri.router._core": "router_core"}
POLICIES = (
    "adaptive", "admission", "cluster", "dispatch", "fetch", "ledger", "lengths", "order", "queue",
    "residency", "route", "spare", "step_cost", "step_tokens", "tables",
)  # fmt: skip
ROUTER = (
    "connection", "first_token", "http_client", "incoming", "placement", "prefixes", "relay",
    "replies", "request", "response", "resume", "retry", "scheduler", "stream", "table", "upstream",
)  # fmt: skip
COMPILED = [
    *(f"vllm_tetri/policy/{name}.py" for name in POLICIES),
    *(f"vllm_tetri/router/{name}.py" for name in ROUTER),
]
# Whose types they rely on.
TYPED = [f"vllm_tetri/{name}.py" for name in ("types", "handover", "messages")]
SETTINGS = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-aiohttp.*,kubernetes_asyncio.*,opentelemetry.*,prometheus_client.*,torch.*,vllm.*,zmq.*]
follow_imports = skip
follow_imports_for_stubs = true
"""
BUILDING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


class Build(build_ext):
    """Hands the C++ cores to CMake, which alone knows sources and flags."""

    def run(self) -> None:
        """Note what was compiled in place from what: tests ask for it. Without mypyc remove what
        was compiled before, which Python would take before the sources."""
        super().run()
        if not self.inplace:
            return
        note = ROOT / "build" / "compiled.json"
        if {ext.name for ext in self.extensions} - set(TARGETS):
            names = [*COMPILED, *TYPED]
            digests = {name: sha256((ROOT / name).read_bytes()).hexdigest() for name in names}
            note.write_text(json.dumps(digests))
            return
        note.unlink(missing_ok=True)
        for name in (*COMPILED, "vllm_tetri/compiled__mypyc.py"):
            (ROOT / name).with_suffix(get_config_var("EXT_SUFFIX")).unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        if ext.name not in TARGETS:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTETRI_PACKAGE={target.parents[1]}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", TARGETS[ext.name]], check=True)


def compiled() -> list[Extension]:
    """Translate to C, if this run builds anything."""
    if not BUILDING.intersection(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []
    # Of what is not compiled only names are needed: packages need not be there, and large ones are
    # not read.
    settings = ROOT / "build" / "mypyc.ini"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(SETTINGS)
    return mypycify(
        [f"--config-file={settings}", *COMPILED],
        opt_level="2",
        debug_level="0",
        group_name="vllm_tetri.compiled",
    )


setup(
    ext_modules=[*(Extension(name, sources=[]) for name in TARGETS), *compiled()],
    cmdclass={"build_ext": Build},
)
