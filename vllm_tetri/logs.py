"""Logging of router, launcher and commands, configured like vLLM's.

The environment variables are vLLM's own, so that one setting serves all processes of a
cluster: `VLLM_LOGGING_LEVEL`, `VLLM_LOGGING_CONFIG_PATH` (a JSON file for
`logging.config.dictConfig`, for instance with a JSON formatter), `VLLM_CONFIGURE_LOGGING=0`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import logging.config
import os
from pathlib import Path

from vllm_tetri.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"
QUIET_S = 10.0  # without effect for so long, a limit counts as out of effect

_log = logging.getLogger(__name__)


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--log-level`."""
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=LEVELS,
        help=f"least severe log lines to show (default: that of {LEVEL_VARIABLE}, else INFO); "
        f"{CONFIG_VARIABLE} may name a file with a logging configuration, as for vLLM",
    )


def configure_logging(level: str | None = None) -> None:
    """Configure the loggers of this package in this process; `level` overrides
    `VLLM_LOGGING_LEVEL`. ConfigError if that or the configuration file cannot be used."""
    level = level or os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}={level}: choose one of {', '.join(LEVELS)}")
    if path := os.environ.get(CONFIG_VARIABLE):
        try:
            config = json.loads(Path(path).read_text())
            loggers = config.get("loggers", {})
            if "vllm" in loggers:  # a file made for vLLM names its logger only
                loggers.setdefault("vllm_tetri", loggers["vllm"])
            logging.config.dictConfig(config)
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(f"{CONFIG_VARIABLE}={path} cannot be used: {error}") from error
    elif os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        logging.basicConfig(format=_FORMAT, datefmt=_DATE_FORMAT, level=logging.WARNING)
        logging.getLogger("vllm_tetri").setLevel(level)


class LimitLog:
    """Logs when a limit takes effect, and when it has had none for `QUIET_S`: two lines, however
    many requests it affects. Owned by the event loop."""

    def __init__(self) -> None:
        self._affected: dict[str, tuple[int, float]] = {}  # requests by limit, and the last time

    def record(self, limit: str, words: str) -> None:
        """A limit affects a request."""
        count, _ = self._affected.get(limit, (0, 0.0))
        self._affected[limit] = count + 1, asyncio.get_running_loop().time()
        if not count:
            _log.warning("%s takes effect: %s", limit, words)
            self._check(limit)

    def _check(self, limit: str) -> None:
        loop, (count, last_s) = asyncio.get_running_loop(), self._affected[limit]
        if (left_s := last_s + QUIET_S - loop.time()) > 0:
            loop.call_later(left_s, self._check, limit)
            return
        del self._affected[limit]
        words = "%s affected %d requests, and none in the last %g s"
        _log.info(words, limit, count, QUIET_S)
