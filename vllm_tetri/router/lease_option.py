"""``--flip-lease``: where several routers agree which of them decides on roles."""

from __future__ import annotations

from vllm_tetri.router.kube_api import place_of
from vllm_tetri.router.kube_lease import KubeLease
from vllm_tetri.router.lease import FileLease, Lease

_KUBERNETES = "kubernetes:"

HELP = (
    "where several routers agree which of them decides on roles; the same for all: on one host "
    "a file, in a folder that only you may write to, in Kubernetes a Lease object of this pod's "
    "namespace, kubernetes:NAME (this router decides alone)"
)


def lease_of(text: str | None) -> Lease | None:
    """The lease that the option names; None without it.

    Raises:
        ConfigError: It cannot be used here.
    """
    if not text:
        return None
    if text.startswith(_KUBERNETES):
        return KubeLease(place_of(text.removeprefix(_KUBERNETES)))
    return FileLease(text)
