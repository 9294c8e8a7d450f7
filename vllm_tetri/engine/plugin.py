"""Entry point of vLLM's `vllm.general_plugins` group.

vLLM calls `register` in every process, some of them short-lived, so it must be
cheap, idempotent and free of threads and sockets. Its effects are that the
argument parsers of `vllm serve` learn `--role` and `--tetri-*` (without `--role` the
parsed arguments are untouched), and that what we log is seen beside vLLM's own.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

_MARK = "_tetri_registered"


def register() -> None:
    """Teach vLLM's argument parsers our options (seams: `EngineArgs.add_cli_args`)."""
    # As if ours were one of vLLM's loggers: its level, its handlers, its format.
    logging.getLogger("vllm_tetri").parent = logging.getLogger("vllm")
    from vllm.engine import arg_utils

    stock = arg_utils.EngineArgs.add_cli_args
    if getattr(stock, _MARK, False):
        return

    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from vllm_tetri.engine.options import add_options

        parser = stock(parser)
        add_options(parser)
        _expand_after_parsing(parser)
        return parser

    setattr(add_cli_args, _MARK, True)
    arg_utils.EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _expand_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Let this parser turn `--role` into vLLM's own options once it has parsed.

    The hook sits on the parser instance, where both the command line and
    vLLM's `--config` file have already been merged.
    """
    parse_known_args = parser.parse_known_args

    def parse_and_expand(*args: Any, **kwargs: Any) -> Any:
        from vllm_tetri.engine.roles import expand_role
        from vllm_tetri.errors import TetriError

        namespace, rest = parse_known_args(*args, **kwargs)
        try:
            expand_role(namespace)
        except TetriError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_expand  # type: ignore[method-assign]
