"""Entry point of vLLM's `vllm.general_plugins` group, and the options that it adds.

vLLM calls `register` in every process, some of them short-lived, so it is cheap, idempotent
and free of threads and sockets. The argument parsers of `vllm serve` learn `--role` and
`--tetri-*`; without `--role` the parsed arguments are untouched. `vllm_tetri.config` has the
table of options. An option that is not given leaves no attribute, so that it can come from
the file given with `--tetri-config`, then from `--tetri-preset`, then from `TetriConfig`.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from pathlib import Path
from typing import Any

import yaml

from vllm_tetri.config import CONNECTOR, PRESETS, file_key_of, option_of, options, parse_size
from vllm_tetri.errors import ConfigError, TetriError
from vllm_tetri.types import Role

_MARK = "_tetri_registered"
# vLLM prints the group with this title for `--help=role`.
GROUP = "Role"


def register() -> None:
    """Teach vLLM's argument parsers our options (seams: `EngineArgs.add_cli_args`)."""
    # Our loggers take level, handlers and format from vLLM's.
    logging.getLogger("vllm_tetri").parent = logging.getLogger("vllm")
    worker_base = sys.modules.get("vllm.v1.worker.worker_base")
    if (wrapper := getattr(worker_base, "WorkerWrapperBase", None)) is not None:
        _watch_loading(wrapper)
    from vllm.engine import arg_utils

    stock = arg_utils.EngineArgs.add_cli_args
    if getattr(stock, _MARK, False):
        return

    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = stock(parser)
        add_options(parser)
        _expand_after_parsing(parser)
        return parser

    setattr(add_cli_args, _MARK, True)
    arg_utils.EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _watch_loading(wrapper: Any) -> None:
    """Let workers of instances with the length head have their model give out a layer in its middle
    (seam: `WorkerWrapperBase`, which leaves `load_model` to the device's worker)."""
    if "load_model" in vars(wrapper):
        return

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.worker.load_model(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            from vllm_tetri.engine.connector import prepare_model

            prepare_model(self.worker.model_runner, self.vllm_config)
        return found

    wrapper.load_model = load_model


def _expand_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Let this parser turn `--role` into vLLM's own options once it has parsed.

    The hook sits on the parser instance, where both the command line and
    vLLM's `--config` file have already been merged.
    """
    parse_known_args = parser.parse_known_args

    def parse_and_expand(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        is_ours = [each for each in vars(namespace) if each.startswith("tetri_")]
        try:
            if is_ours or getattr(namespace, "role", None):  # else any release of vLLM will do
                from vllm_tetri.engine.compat import WorkerWrapperBase
                from vllm_tetri.engine.roles import expand_role
                from vllm_tetri.engine.scheduler import require_supported

                require_supported()
                expand_role(namespace, given_options)
                _watch_loading(WorkerWrapperBase)  # processes that are forked inherit it
        except TetriError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_expand  # type: ignore[method-assign]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our group to one of vLLM's parsers."""
    group = parser.add_argument_group(
        GROUP, "Disaggregated prefill and decode (vllm-tetri). Without --role, none has an effect."
    )
    group.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=None,
        help="serve as a prefill or decode instance of a cluster, or as both",
    )
    group.add_argument(
        "--tetri-config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML or JSON file with the options below, without their tetri- prefix",
    )
    group.add_argument(
        "--tetri-preset",
        choices=tuple(PRESETS),
        default=argparse.SUPPRESS,
        help="paper: send KV once per request, dispatch by the lowest ratio of heavy "
        "to light decodes and reserve the lower end of a predicted length, as the paper does; "
        "other options still count (default: none)",
    )
    for name, option in options().items():
        kind: Any = {"choices": option.choices} if option.choices else {"metavar": option.unit}
        group.add_argument(
            option.flag,
            dest="tetri_" + name,
            default=argparse.SUPPRESS,
            help=f"{option.text} (default: {option.default})",
            **kind,
        )


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return what the user set: by preset, overridden by the file, then by the command line.
    ConfigError if the file cannot be read, is no mapping or has an unknown key; or a size is none.
    """
    path = getattr(namespace, "tetri_config", None)
    given = _read_file(path) if path else {}
    for name in ("preset", *options()):
        value = getattr(namespace, "tetri_" + name, None)
        if value is not None:
            given[name] = value
    preset = given.pop("preset", "none")
    if preset not in PRESETS:
        raise ConfigError(f"--tetri-preset {preset}: must be {' or '.join(PRESETS)}")
    given = PRESETS[preset] | given
    if isinstance(given.get("control"), str):
        given["control"] = [part.strip() for part in given["control"].split(",") if part.strip()]
    for name, value in given.items():
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                given[name] = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{option_of(name)}: {error}") from error
    return given


def _read_file(path: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--tetri-config {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--tetri-config {path}: expected a mapping of option names to values")
    fields = {file_key_of(name): name for name in ("preset", *options())}
    given = {}
    for key, value in raw.items():
        name = fields.get(file_key_of(str(key)))
        if name is None:
            close = difflib.get_close_matches(file_key_of(str(key)), fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(fields)}"
            raise ConfigError(f"--tetri-config {path}: there is no option {key}; {hint}")
        given[name] = value
    return given
