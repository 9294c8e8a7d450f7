"""Packs what a GPU host without vLLM and without a network needs: `python -m tests.gpu.pack`.

Parts go to `.gpu/a` to `.gpu/d`, each below 56 MiB: packages (a), vLLM's CUDA operators (b), its
FlashAttention 3 and Python files (c), what benchmarks want (d). `tests/gpu/pins` names every wheel
with its hash. The host has Python 3.12, torch (2.11 or newer, CUDA 13), Triton, transformers with
tokenizers and safetensors, numpy, g++ and cmake; vLLM 0.32.0 asks torch for its stable ABI only.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / ".gpu"
PINS = Path(__file__).parent / "pins"
LIMIT_MIB = 56
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
SUFFIXES = (".py", ".json", ".jinja", ".txt")
LIBRARIES = {
    "b": ("vllm/_C_stable_libtorch.abi3.so",),
    "c": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/cumem_allocator.abi3.so"),
}


def main() -> int:
    for part in "abcd":
        shutil.rmtree(TARGET / part, ignore_errors=True)
        (TARGET / part).mkdir(parents=True)
    for part in "ad":
        download(PINS / f"{part}.txt", TARGET / part)
    with tempfile.TemporaryDirectory(dir=TARGET) as scratch:
        download(PINS / "vllm.txt", Path(scratch))
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        for part, libraries in LIBRARIES.items():
            take(wheel, TARGET / part / "vllm.tar.xz", libraries, with_python=part == "c")
    too_large = False
    for part in "abcd":
        files = sorted((TARGET / part).iterdir())
        size = seal(TARGET / part, files)
        too_large |= size >= LIMIT_MIB
        print(f"{TARGET / part}: {len(files)} files, {size:.1f} MiB of {LIMIT_MIB}")
    if too_large:
        print("pack: a part is too large", file=sys.stderr)
        return 1
    print("""
Copy this tree with .gpu/ to the GPU host, or first the tree and then part after part. There:

  python3 -m tests.gpu.run A         # with part a
  python3 -m tests.gpu.run B         # and parts b and c
  python3 -m tests.gpu.run C         # and part d""")
    return 0


def download(pins: Path, folder: Path) -> None:
    """Download the wheels of a list for the host; pip checks every hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
               "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp",
               "--python-version", PYTHON, "--dest", str(folder)]  # fmt: skip
    command += ["--requirement", str(pins)]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True)


def take(wheel: Path, target: Path, libraries: tuple[str, ...], *, with_python: bool) -> None:
    """Copy libraries of vLLM's wheel, or all but its binaries and headers too, into an archive that
    is smaller than the wheel."""
    with zipfile.ZipFile(wheel) as source, tarfile.open(target, "w:xz") as to:
        for name in source.namelist():
            is_python = name.endswith(SUFFIXES) or ".dist-info/" in name
            if name in libraries or (with_python and is_python):
                content = source.read(name)
                info = tarfile.TarInfo(name)
                info.size = len(content)
                to.addfile(info, io.BytesIO(content))


def seal(folder: Path, files: list[Path]) -> float:
    """Write the manifest of a part, and return the part's size in MiB."""
    hashes = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    (folder / "manifest.json").write_text(json.dumps(hashes, indent=1) + "\n")
    return sum(each.stat().st_size for each in files) / (1 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
