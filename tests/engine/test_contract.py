"""What we rely on inside vLLM. A failure names the seam that moved."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_tetri.engine import compat
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.errors import UnsupportedError


class Hurried(TetriConnector):
    """A connector that was written for another vLLM."""

    def shutdown(self, is_urgent: bool) -> None:  # type: ignore[override]
        pass


class Moved:
    """A scheduler of a vLLM in which everything has another name."""

    connector = object.__new__(Hurried)


def test_an_attribute_that_moved_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"Scheduler\.kv_holding_waiting is missing"):
        compat.require_contract(Moved())  # type: ignore[arg-type]


def test_a_parameter_that_moved_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.SIGNATURES, Scheduler.has_requests, "is_urgent")
    with pytest.raises(
        UnsupportedError, match=r"Scheduler\.has_requests takes \(\).*shutdown takes"
    ):
        compat.require_contract(Moved())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", compat.SCHEDULER_ATTRIBUTES)
def test_scheduler_attribute(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(Scheduler.__init__), name


def test_runner_rewinds_a_generator_by_its_offset() -> None:
    """`RewindableGenerator` can go when this fails."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner)
    assert "generator" in inspect.signature(compat.CachedRequestState).parameters


def test_runner_makes_request_states_from_what_the_scheduler_says_is_new() -> None:
    """`engine/continuation.py` relies on it: the prompt's list arrives as it is."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._update_states)
    assert "prompt_token_ids=new_req_data.prompt_token_ids" in source
    assert "output_token_ids=[]" in source
    assert hasattr(compat.CachedRequestState, "__post_init__")
    names = inspect.signature(compat.NewRequestData).parameters
    assert {"req_id", "prompt_token_ids"} <= set(names)


def test_waiting_queue_has_no_new_duty() -> None:
    assert compat.RequestQueue.__abstractmethods__ == {
        "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests",
        "remove_request", "remove_requests", "__bool__", "__len__", "__iter__",
    }  # fmt: skip


def test_every_request_passes_the_method_that_lowers_its_tokens() -> None:
    """Running and waiting ones: once each in `schedule` (docs/adr/0004)."""
    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_the_connector_is_asked_about_every_request_that_enters() -> None:
    """Where requests are held back (`engine/admission.py`)."""
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self.connector.get_num_new_matched_tokens(") == 1
    asked = source.index("if ext_tokens is None:")
    assert asked < source.index("self.kv_cache_manager.allocate_slots(", asked)
    assert "skip_request(request_queue)" in source[asked : asked + 400]


def test_plugins_load_before_the_arguments_are_added() -> None:
    """`register` must come in time to wrap `EngineArgs.add_cli_args`."""
    from vllm.engine import arg_utils

    source = textwrap.dedent(inspect.getsource(arg_utils.AsyncEngineArgs.add_cli_args))
    calls = [
        ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    ]
    assert calls.index("load_general_plugins") < calls.index("EngineArgs.add_cli_args")


def test_every_private_name_is_imported_in_compat() -> None:
    """Other modules take vLLM's scheduler and connector names from compat only."""
    engine = Path(compat.__file__).parent
    allowed = {
        "vllm",
        "vllm.config",
        "vllm.engine",
        "vllm.platforms",
        "vllm.forward_context",
        "vllm.distributed.parallel_state",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.outputs",
    }
    for path in engine.glob("*.py"):
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                assert not name.startswith("vllm.") or name in allowed, f"{path.name}: {name}"


# -- patches, and what the plugin does to a process of vLLM's ----


PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_applies_to_a_copy_of_vllm(patch: Path, tmp_path: Path) -> None:
    text = patch.read_text()
    for heading in ("What:", "Why:", "Remove when:"):
        assert re.search(f"^{heading} \\w", text, re.MULTILINE), heading
    for name in re.findall(r"^--- a/(vllm/\S+)$", text, re.MULTILINE):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(vllm.__file__).parent.parent / name, target)
    subprocess.run(["git", "apply", "--check", "-p1", str(patch)], cwd=tmp_path, check=True)


SAYS = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.plugins import load_general_plugins
load_general_plugins()
configure_logging(LoggingConfig())  # as every process of `vllm serve` does
logging.getLogger("vllm_tetri.control.agent").info("decode-0 leaves")
"""


def said(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_what_we_log_is_seen_among_vllms_lines_and_at_its_level() -> None:
    (line,) = [line for line in said().splitlines() if "decode-0 leaves" in line]
    assert "INFO" in line
    assert "decode-0 leaves" not in said(VLLM_LOGGING_LEVEL="WARNING")
