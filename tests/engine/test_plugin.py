"""What the plugin does to a process of vLLM's, seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys

SAYS = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.plugins import load_general_plugins
load_general_plugins()
configure_logging(LoggingConfig())  # as every process of `vllm serve` does
logging.getLogger("vllm_tetri.control.agent").info("decode-0 leaves")
"""


def said(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_what_we_log_is_seen_among_vllms_lines_and_at_its_level() -> None:
    (line,) = [line for line in said().splitlines() if "decode-0 leaves" in line]
    assert "INFO" in line
    assert "decode-0 leaves" not in said(VLLM_LOGGING_LEVEL="WARNING")
