"""Policies by name: built in, of an installed package, or from a dotted path.

Three decisions can be replaced, and a name means the same to engine, router and simulator:

- `dispatch`: which decode instance takes over a request; `policy.dispatch.DispatchPolicy`
- `order`: which waiting prompt is computed next; `policy.order.Order`, or a plain sort key
- `admission`: when a request enters the decode batch; `policy.admission.AdmissionPolicy`

A name is a built-in one, that of an entry point in the group `vllm_tetri.dispatch`,
`vllm_tetri.order` or `vllm_tetri.admission`, or `package.module:attribute`. Instances run in
processes of their own, so the module must be importable there, whatever the current folder is:
install its package or set PYTHONPATH. `examples/own_policy.py` is an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, overload

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import ADMISSIONS, AdmissionPolicy
from vllm_tetri.policy.dispatch import DISPATCHES, DispatchPolicy
from vllm_tetri.policy.order import ORDERS, Order

Kind = Literal["dispatch", "order", "admission"]

_BUILT_IN: dict[Kind, Mapping[str, Any]] = {
    "dispatch": DISPATCHES,
    "order": ORDERS,
    "admission": ADMISSIONS,
}


@overload
def load_policy(kind: Literal["dispatch"], name: str) -> DispatchPolicy: ...
@overload
def load_policy(kind: Literal["order"], name: str) -> Order: ...
@overload
def load_policy(kind: Literal["admission"], name: str) -> AdmissionPolicy: ...
def load_policy(kind: Kind, name: str) -> Any:
    """Find a policy; ConfigError if none has this name, or it cannot be loaded."""
    found = _BUILT_IN[kind].get(name) or _loaded(kind, name)
    return Order(found) if kind == "order" and not isinstance(found, Order) else found


def policy_names(kind: Kind) -> list[str]:
    """Return the names that need no path: built-in ones, then those of installed packages."""
    installed = (entry.name for entry in entry_points(group=f"vllm_tetri.{kind}"))
    return list(dict.fromkeys((*_BUILT_IN[kind], *installed)))


def _loaded(kind: Kind, name: str) -> Any:
    """Load a policy, make an instance of an admission class, and refuse what cannot be one."""
    entry = EntryPoint(name, name, "") if ":" in name else _entry_point(kind, name)
    try:
        found = entry.load()
        found = found() if kind == "admission" and isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind} policy {name!r} cannot be loaded from {entry.value}: {error}. Write "
            "package.module:attribute, and install the package or add its folder to PYTHONPATH"
        ) from error
    is_policy = callable(found) or isinstance(found, Order)
    if kind == "admission":
        is_policy = hasattr(found, "fits") and hasattr(found, "growth_blocks")
    if not is_policy:
        raise ConfigError(f"{name!r} is no {kind} policy; vllm_tetri/plugins.py says what one is")
    return found


def _entry_point(kind: Kind, name: str) -> EntryPoint:
    for entry in entry_points(group=f"vllm_tetri.{kind}", name=name):
        return entry
    names = policy_names(kind)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? There" if close else "there"
    raise ConfigError(
        f"there is no {kind} policy {name!r}; {hint} are {', '.join(names)}; "
        "name your own as package.module:attribute"
    )
