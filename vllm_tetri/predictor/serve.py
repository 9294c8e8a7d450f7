"""`vllm-tetri predictor serve`: a length predictor in a process of its own.

An instance starts one beside itself (`client`). Prompts come as the target model's
tokens, since that is what an engine has; they are turned back into text here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.artefact import load
from vllm_tetri.predictor.server import SECRET_VARIABLE, Model, Server, given_secret

NICE = 5
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `predictor serve`."""
    add = parser.add_argument
    add("artefact", type=Path, metavar="ARTEFACT", help="folder that `predictor train` wrote")
    add(
        "--address", required=True, metavar="ADDRESS", help="ipc://PATH or ipc://@NAME to listen at"
    )
    add("--tokenizer", required=True, metavar="MODEL", help="that of the target model")
    add("--nice", type=int, default=NICE, metavar="N", help=f"added to the niceness ({NICE})")
    add("--cores", default="", metavar="N,N", help="logical CPUs to run on; default: all it may")
    add("--parent", type=int, metavar="PID", help="end with this process, which started it")


def run(options: argparse.Namespace) -> int:
    """Serve until it is ended.

    Raises:
        ConfigError: The artefact or the target's tokenizer cannot be loaded, or the
            address is none or in use.
    """
    logging.basicConfig(level=logging.INFO, format="predictor: %(message)s", stream=sys.stderr)
    if not options.address.startswith("ipc://"):
        raise ConfigError(f"--address {options.address}: must be ipc://PATH or ipc://@NAME")
    secret = given_secret()
    if options.address.startswith("ipc://@") and secret is None:
        raise ConfigError(
            f"--address {options.address}: every user of this machine may connect to that; use "
            f"ipc://PATH in a folder of your own, or give a secret in {SECRET_VARIABLE}"
        )
    if options.parent is not None:
        end_with(options.parent)
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.nice(options.nice)
    model = _TextModel(options.artefact, options.tokenizer)
    server = Server(options.address, model, secret)
    _log.info("serves at %s", options.address)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0


def end_with(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends.

    Raises:
        ConfigError: It has ended already.
    """
    with contextlib.suppress(AttributeError):  # not Linux: the parent ends its children itself
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ConfigError(f"--parent {parent}: it is gone")


class _TextModel(Model):
    """An artefact behind the target's tokenizer."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self._artefact = load(folder, num_threads=1)
        self._text_of = _decoder(tokenizer)

    def encode(self, token_ids: Sequence[int]) -> list[int]:
        return self._artefact.encode(self._text_of(token_ids))

    def classify(self, batch: Sequence[Sequence[int]]) -> list[int]:
        return [prediction.bucket for prediction in self._artefact.predict(batch)]


def _decoder(name: str) -> Callable[[Sequence[int]], str]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {name}: {str(error).splitlines()[0]}") from error

    def text_of(token_ids: Sequence[int]) -> str:
        # Special tokens stay: the artefact knows the chat template by them.
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    return text_of
