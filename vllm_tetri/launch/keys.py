"""Who needs which key in a cluster of `up`."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from vllm_tetri.errors import ConfigError
from vllm_tetri.router.door_options import INSTANCE_KEY_VARIABLE, KEY_VARIABLE, keys_of

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """All empty where clients need none.

    Attributes:
        clients: What the router asks for.
        instance: What instances ask the router for.
        is_in_command: Whether `vllm serve` was given that one as an option.
    """

    clients: tuple[str, ...] = field(repr=False)
    instance: str = field(repr=False)
    is_in_command: bool

    @property
    def of_router(self) -> Environment:
        """Variables that tell the router; a command could be read by everybody."""
        if not self.clients:
            return ()
        pairs = {KEY_VARIABLE: "\n".join(self.clients), INSTANCE_KEY_VARIABLE: self.instance}
        return tuple(pairs.items())

    @property
    def of_instances(self) -> Environment:
        """Variables that tell `vllm serve`, if its command does not."""
        if not self.clients or self.is_in_command:
            return ()
        return ((KEY_VARIABLE, self.instance),)


def cluster_keys(options: argparse.Namespace, given: Collection[str]) -> ClusterKeys:
    """The keys for these options of `up`.

    Instances get one of their own, new at each start: their ports are on the loopback
    interface, but that is open to everybody on this machine. Keys that were meant for
    them only are asked for by the router, too: else it would open them to all.

    Args:
        given: Names of the options for `vllm serve`.

    Raises:
        ConfigError: A key cannot be used, or cannot be seen.
    """
    in_command = _words_of(options.tail, "--api-key")
    if "api-key" in given and not in_command:
        raise ConfigError(
            "the api-key in the --config file of vllm serve is not seen by the router; give "
            "--api-key-file to `up` instead, before the --"
        )
    clients = keys_of(options) or tuple(in_command)
    if not clients:
        return ClusterKeys((), "", is_in_command=False)
    if in_command:
        return ClusterKeys(clients, in_command[0], is_in_command=True)
    own = os.environ.get(INSTANCE_KEY_VARIABLE) or secrets.token_urlsafe(32)
    return ClusterKeys(clients, own, is_in_command=False)


def _words_of(tail: Sequence[str], option: str) -> list[str]:
    """All that follows an option which takes several words."""
    found: list[str] = []
    for index, word in enumerate(tail):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == option:
            rest = [value] if value else tail[index + 1 :]
            found += takewhile(lambda each: not each.startswith("-"), rest)
    return found
