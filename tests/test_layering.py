"""Which layer may import what. A new layer or dependency is a line in this table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vllm_tetri"
VALUES = {"types", "errors"}
SHARED = VALUES | {"config", "messages", "handover", "policy", "secret"}

# layer: (own layers, packages from outside the standard library)
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "__init__": (set(), set()),
    "types": (set(), set()),
    "errors": (set(), set()),
    "config": (VALUES | {"policy"}, {"msgspec"}),
    "secret": (VALUES, set()),
    "messages": (VALUES, {"msgspec"}),
    "handover": (VALUES, {"msgspec"}),
    "policy": (VALUES, set()),
    "transport": (VALUES, {"numpy", "rich"}),
    "kv": (VALUES | {"transport"}, {"numpy", "torch"}),
    "control": (SHARED, {"msgspec", "zmq"}),
    "router": (
        SHARED | {"control", "__init__"},
        {"aiohttp", "httptools", "msgspec", "prometheus_client", "rich", "uvloop"},
    ),
    "predictor": (
        VALUES | {"config", "policy", "secret", "control.curve", "bench.picture"},
        {
            "aiohttp",
            "matplotlib",
            "msgspec",
            "numpy",
            "rich",
            "torch",
            "transformers",
            "zmq",
        },
    ),
    "engine": (
        SHARED | {"control", "transport", "kv", "predictor", "__init__"},
        {"msgspec", "numpy", "psutil", "torch", "vllm", "yaml"},
    ),
    "launch": (
        SHARED
        | {
            "__init__",
            "engine.cache",
            "engine.versions",
            "router.door_options",
            "transport.leftovers",
        },
        {"aiohttp", "psutil", "rich", "torch", "yaml"},
    ),
    "bench": (
        SHARED | {"__init__", "control", "engine", "launch", "predictor", "sim", "transport"},
        {"aiohttp", "matplotlib", "numpy", "psutil", "rich", "transformers", "uvloop", "vllm"},
    ),
    "sim": (VALUES | {"policy"}, {"numpy", "rich"}),
    "cli": (VALUES | {"__init__"}, set()),
}

NOT_FOR_POLICY = {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time"}
EXTENSIONS = {
    "transport": "vllm_tetri.transport._core",
    "policy": "vllm_tetri.policy._occupancy",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth, also for typing only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(layer: str, names: set[str]) -> list[str]:
    own, outside = MAY_IMPORT[layer]
    found = []
    for name in sorted(names):
        top, *inner = name.split(".")
        if top == PACKAGE.name:
            target = _own_layer(inner)
            allowed = {target, ".".join(inner[:2])} & (own | {layer})
            if not allowed:
                found.append(f"{layer} imports {name}")
        elif top not in sys.stdlib_module_names and top not in outside:
            found.append(f"{layer} imports {name}")
    if layer == "policy":
        tops = {name.split(".")[0] for name in names}
        found += [f"policy imports {name}" for name in sorted(tops & NOT_FOR_POLICY)]
        found += [f"policy uses {name}" for name in sorted(names) if _is_global_random(name)]
    return found


def _own_layer(inner: list[str]) -> str:
    is_layer = bool(inner) and any(
        path.exists() for path in (PACKAGE / inner[0], PACKAGE / f"{inner[0]}.py")
    )
    return inner[0] if is_layer else "__init__"


def _is_global_random(name: str) -> bool:
    return name.split(".")[0] == "random" and name != "random.Random"


def test_every_layer_is_in_the_table() -> None:
    assert {layer_of(path) for path in sources()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(layer_of(path), imports_of(path)) == []


@pytest.mark.parametrize("layer", EXTENSIONS)
def test_an_extension_is_imported_only_where_it_is(layer: str) -> None:
    name = EXTENSIONS[layer]
    assert {layer_of(path) for path in sources() if _uses(imports_of(path), name)} == {layer}


def _uses(names: set[str], extension: str) -> bool:
    return any(name == extension or name.startswith(extension + ".") for name in names)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("policy", "time.monotonic"),
        ("policy", "random.choice"),
        ("policy", "vllm_tetri.config.TetriConfig"),
        ("router", "vllm.LLM"),
        ("engine", "zmq.Context"),
        ("launch", "vllm_tetri.engine.roles.expand_role"),
        ("cli", "torch"),
    ],
)
def test_forbidden_import_is_noticed(layer: str, name: str) -> None:
    assert violations(layer, {name})


def test_policy_imports_with_everything_else_out_of_reach() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sources()
        if layer_of(path) == "policy"
    ]
    others = ("vllm", "zmq", "torch", "numpy", "msgspec", "asyncio", "threading")
    poisoned = (*others, EXTENSIONS["transport"])
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({poisoned!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Where a date is written, or where epochs of several hosts must grow; nowhere is it waited by.
WALL_CLOCK = {"router/relay.py", "router/app.py", "router/lease.py", "router/kube_api.py"}


def test_nothing_that_serves_looks_at_the_wall_clock() -> None:
    """It may jump: deadlines, ages and heartbeats count on a monotonic one."""
    wall = re.compile(r"\btime\.(time|localtime|gmtime)\(|\bdatetime\.(now|utcnow|today)\(")
    found = {
        path.relative_to(PACKAGE).as_posix() for path in sources() if wall.search(path.read_text())
    }
    assert {path for path in found if not path.startswith("bench/")} == WALL_CLOCK
    native = [*(PACKAGE.parent / "csrc").rglob("*.cc"), *(PACKAGE.parent / "csrc").rglob("*.h")]
    assert native
    for path in native:
        assert "system_clock" not in path.read_text(), path
        assert "CLOCK_REALTIME" not in path.read_text(), path
