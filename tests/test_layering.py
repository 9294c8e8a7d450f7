"""Which layer may import what. A new layer or dependency is a line in this table."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vllm_tetri"
VALUES = {"types", "errors"}
SHARED = VALUES | {"plugins", "config", "messages", "handover", "logs", "policy", "security"}

# layer: (own layers, packages from outside the standard library)
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "__init__": (set(), set()),
    "types": (set(), set()),
    "errors": (set(), set()),
    "plugins": (VALUES | {"policy"}, set()),
    "config": (VALUES | {"plugins", "policy", "transport.links"}, {"msgspec", "vllm"}),
    "security": (VALUES, {"zmq"}),
    "messages": (VALUES, {"msgspec"}),
    "handover": (VALUES, {"msgspec"}),
    "policy": (VALUES, set()),
    "transport": (VALUES, {"numpy", "torch"}),
    "control": (SHARED, {"cachetools", "msgspec", "zmq"}),
    "router": (
        SHARED | {"control", "__init__"},
        {
            "aiohttp",
            "cachetools",
            "httptools",
            "kubernetes_asyncio",
            "opentelemetry",
            "msgspec",
            "prometheus_client",
            "rich",
            "uvloop",
        },
    ),
    "picker": (SHARED | {"router"}, {"envoy_data_plane", "grpc", "grpc_health", "uvloop"}),
    "predictor": (VALUES, {"numpy", "threadpoolctl"}),
    "engine": (
        SHARED | {"control", "transport", "predictor", "__init__"},
        {
            "cachetools",
            "huggingface_hub",
            "msgspec",
            "numpy",
            "psutil",
            "starlette",
            "torch",
            "vllm",
            "yaml",
        },
    ),
    "launch": (
        SHARED | {"__init__", "router.auth", "router.command", "transport.segments"},
        {"aiohttp", "psutil", "ray", "rich", "vllm"},
    ),
    "sim": (VALUES | {"plugins", "policy"}, {"numpy", "rich"}),
    "admin": (VALUES | {"router.auth"}, {"rich"}),
    "top": ({"admin"}, {"rich"}),
    "regret": (VALUES | {"admin", "policy", "sim"}, {"numpy"}),
    "logs": (VALUES, set()),
    "bench": (VALUES | {"admin", "launch.guard", "launch.machine", "router.auth"}, {"rich"}),
    "cli": (VALUES | {"__init__", "security"}, {"shtab"}),
}

NOT_FOR_POLICY = {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time"}
EXTENSIONS = {"transport": "vllm_tetri.transport._core", "router": "vllm_tetri.router._core"}


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
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, timeout=60, check=True)


# Where a date is written, or where epochs of several hosts must grow; nowhere is it waited by.
WALL_CLOCK = {
    "router/stream.py", "router/app.py", "router/flips.py", "router/kube_lease.py",
    "router/tracing.py",
}  # fmt: skip


def test_nothing_that_serves_looks_at_the_wall_clock() -> None:
    """It may jump: deadlines, ages and heartbeats count on a monotonic one."""
    wall = re.compile(r"\btime\.(time|localtime|gmtime)\(|\bdatetime\.(now|utcnow|today)\(")
    found = {
        path.relative_to(PACKAGE).as_posix() for path in sources() if wall.search(path.read_text())
    }
    assert found == WALL_CLOCK
    native = [*(PACKAGE.parent / "csrc").rglob("*.cc"), *(PACKAGE.parent / "csrc").rglob("*.h")]
    assert native
    for path in native:
        assert "system_clock" not in path.read_text(), path
        assert "CLOCK_REALTIME" not in path.read_text(), path


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_over_others() -> None:
    """Imports for typing only and imports inside functions count too."""
    modules = {module_of(path): path for path in sources()}
    graph = {
        name: {
            target
            for found in imports_of(path)
            for target in (found, found.rpartition(".")[0])
            if target in modules and target != name
        }
        for name, path in modules.items()
    }
    for name in list(graph):  # a package is no module of the cycle through its own members
        graph[name] = {target for target in graph[name] if target != PACKAGE.name}
    TopologicalSorter(graph).prepare()  # CycleError names one


def private_accesses(source: str) -> list[str]:
    """Private names of other modules that a file uses, with their lines."""
    tree = ast.parse(source)
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_self(node.value)
    }
    own |= {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            found.append(f"{node.lineno}: .{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if _is_private(alias.name)]
            found += [f"{node.lineno}: {node.module}.{name}" for name in names if name != "_core"]
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    public = ("_replace", "_exit")  # of named tuples, of os
    return name.startswith("_") and not name.startswith("__") and name not in public


USERS = sorted([*Path(__file__).parent.rglob("*.py"), *PACKAGE.parent.glob("examples/**/*.py")])


# What is left to be mended, with vLLM's own private methods that contracts are about; numbers may
# only shrink.
PRIVATE_ACCESSES = {
    "tests/engine/test_continuation.py": 1,
    "tests/engine/test_contract.py": 1,
    "tests/engine/test_handover.py": 2,
    "tests/engine/test_media.py": 1,
    "tests/engine/test_robustness.py": 4,
    "tests/engine/test_roles.py": 3,
    "tests/runners/any_runner.py": 1,
}


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_private_names_stay_where_they_are(path: Path) -> None:
    found = private_accesses(path.read_text())
    allowed = PRIVATE_ACCESSES.get(path.relative_to(PACKAGE.parent).as_posix(), 0)
    assert len(found) <= allowed, found


def test_no_test_module_imports_another_one() -> None:
    """Helpers that several tests need live in modules without tests."""
    found = {
        f"{path.name}: {name}"
        for path in Path(__file__).parent.rglob("*.py")
        for name in imports_of(path)
        if re.search(r"^tests\.(\w+\.)*test_\w+", name)
    }
    assert found == set()
