"""The errors of this package. Each message names the thing, the number and what to do next."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells say it."""


class TetriError(Exception):
    """Base of every error raised on purpose by this package."""

    exit_status = 2  # of a command that it ends: wrong use


class ConfigError(TetriError, ValueError):
    """An option is wrong, or two options contradict each other."""


class UnsupportedError(TetriError):
    """The model, platform or vLLM version cannot be carried."""


class ProtocolError(TetriError):
    """A peer sent something that breaks the protocol."""


class TransferError(TetriError):
    """KV cannot travel over a link, or a device has no room for a receive arena."""
