"""Builds the C++ cores with CMake; everything else is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TARGETS = {"vllm_tetri.transport._core": "_core", "vllm_tetri.router._core": "router_core"}


class CMakeBuild(build_ext):
    """Hands the extensions to CMake, which alone knows sources and flags."""

    def build_extension(self, ext: Extension) -> None:
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


setup(
    ext_modules=[Extension(name, sources=[]) for name in TARGETS],
    cmdclass={"build_ext": CMakeBuild},
)
