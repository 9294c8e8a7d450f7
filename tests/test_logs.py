"""The configuration of logging, which follows vLLM's variables."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.logs import configure_logging

PROGRAM = """
import logging, sys
from vllm_tetri.logs import configure_logging
configure_logging(*sys.argv[1:])
logging.getLogger("vllm_tetri.router.flips").info("an %s line", "info")
logging.getLogger("vllm_tetri.router.flips").error("an error line")
logging.getLogger("aiohttp").info("not shown")
"""


def logged(*arguments: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), **environ},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stderr.splitlines()


def test_lines_have_level_time_and_place() -> None:
    info, error = logged()
    level, date, clock, place, *words = info.split()
    assert (level, words) == ("INFO", ["an", "info", "line"])
    assert (date[2], clock[2], clock[5]) == ("-", ":", ":")
    assert place == "[<string>:5]"
    assert error.startswith("ERROR ")


def test_the_level_comes_from_the_option_then_from_vllms_variable() -> None:
    assert len(logged(VLLM_LOGGING_LEVEL="error")) == 1
    assert len(logged("INFO", VLLM_LOGGING_LEVEL="error")) == 2
    assert logged(VLLM_CONFIGURE_LOGGING="0") == ["an error line"]  # Python's default


@pytest.mark.parametrize("logger", ["vllm", "vllm_tetri"])
def test_a_configuration_made_for_vllm_counts_here(tmp_path: Path, logger: str) -> None:
    path = tmp_path / "logging.json"
    path.write_text(json.dumps({
        "version": 1,
        "formatters": {"json": {"class": "pythonjsonlogger.json.JsonFormatter"}},
        "handlers": {"all": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {logger: {"handlers": ["all"], "level": "INFO"}},
    }))  # fmt: skip
    lines = logged(VLLM_LOGGING_CONFIG_PATH=str(path))
    assert [json.loads(line)["message"] for line in lines] == ["an info line", "an error line"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_LOGGING_LEVEL", "LOUD"), ("VLLM_LOGGING_CONFIG_PATH", "/no/such/file")],
)
def test_a_setting_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    logger = logging.getLogger("vllm_tetri")
    before = (logger.level, list(logger.handlers))
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        configure_logging()
    assert (logger.level, logger.handlers) == before
