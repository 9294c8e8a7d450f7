"""Which vLLM releases `--role` accepts. Imports nothing heavy."""

from __future__ import annotations

from vllm_tetri.errors import UnsupportedError

SUPPORTED_VLLM = ("0.32.0",)


def require_supported(version: str) -> None:
    """Refuse a vLLM release that this package was not tested with.

    Args:
        version: ``vllm.__version__``; a local part such as ``+cpu`` is ignored.

    Raises:
        UnsupportedError: The release is not in `SUPPORTED_VLLM`.
    """
    if version.partition("+")[0] not in SUPPORTED_VLLM:
        raise UnsupportedError(
            f"--role needs vLLM {' or '.join(SUPPORTED_VLLM)}, this is {version}; install a "
            "supported version, or leave --role out to run stock vLLM"
        )
