"""The errors of this package.

TetriError
 ├─ ConfigError        an option is wrong, or two options contradict each other
 ├─ UnsupportedError   this model, platform or vLLM version cannot be carried
 ├─ ProtocolError      a peer sent something that breaks the protocol
 └─ TransferError      moving KV failed
     ├─ TransferTimeout    a deadline passed
     ├─ PeerLost           the other side went away
     ├─ TransferRefused    the handshake found a difference, or the arena is full
     └─ TransferClosed     this side was closed

Every message names the thing, the number and what to do next.
"""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells say it."""


class TetriError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(TetriError, ValueError):
    """An option is wrong, or two options contradict each other."""


class UnsupportedError(TetriError):
    """The model, platform or vLLM version cannot be carried."""


class ProtocolError(TetriError):
    """A peer sent something that breaks the protocol."""


class TransferError(TetriError):
    """Moving KV failed."""


class TransferTimeout(TransferError):
    """A deadline of a transfer passed."""


class PeerLost(TransferError):
    """The other side of a transfer went away."""


class TransferRefused(TransferError):
    """The handshake found a difference, or the receive arena is full."""


class TransferClosed(TransferError):
    """The local endpoint was closed while the call was under way."""
