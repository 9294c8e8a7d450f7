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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_tetri.engine import compat
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.engine.scheduler import TetriScheduler
from vllm_tetri.errors import UnsupportedError


def seams(own: type) -> str:
    """What does not fit a class of ours that overrides vLLM's methods."""
    return "; ".join(compat.broken_seams([own]))


class Hurried(compat.KVConnectorBase_V1):
    """A connector that was written for another vLLM."""

    def shutdown(self, is_urgent: bool) -> None:  # type: ignore[override]
        pass

    def start_load_kv(self, forward_context: object) -> None:  # type: ignore[override]
        """Takes no `**kwargs`, as vLLM's does."""

    def poll_peers(self) -> None:
        pass

    def get_loaded_kv_cache_group_ids(self, request: object) -> tuple[int, ...]:
        return ()


def test_overrides_that_vllm_would_not_call_as_they_are_are_named() -> None:
    found = seams(Hurried)
    assert "KVConnectorBase_V1.shutdown takes (), ours (is_urgent)" in found
    assert "KVConnectorBase_V1.start_load_kv takes" in found
    assert "KVConnectorBase_V1.poll_peers is missing" in found
    assert "KVConnectorBase_V1.build_connector_meta is new" in found  # ours has none
    assert "get_loaded_kv_cache_group_ids" not in found  # 0.31 has it not, and need not


def test_a_method_that_vllm_has_by_chance_too_is_named() -> None:
    class Unlucky(Scheduler):
        def _free_request_blocks(self, request: object) -> None:
            pass

    assert "Scheduler._free_request_blocks is new" in seams(Unlucky)


@pytest.mark.parametrize(
    ("path", "names", "found"),
    [
        ("Scheduler.has_requests", "is_urgent", r"has_requests takes \(\), not \(is_urgent\)"),
        ("Scheduler.schedule_all", "", r"Scheduler\.schedule_all is missing"),
        ("Scheduler.finish_requests", "request_ids", r"finish_requests takes"),  # one is required
        ("Scheduler.schedule", "", None),  # what is added is optional
    ],
)
def test_a_signature_that_moved_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, path: str, names: str, found: str | None
) -> None:
    monkeypatch.setattr(compat, "SIGNATURES", {path: names})
    if found is None:
        assert list(compat.broken_seams([])) == []
    else:
        with pytest.raises(UnsupportedError, match=found):
            compat.require_contract([], "0.32.0")


def test_an_attribute_that_moved_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.ATTRIBUTES, "Request", ("priority", "urgency"))
    with pytest.raises(UnsupportedError, match=r"0\.33\.0: Request\.urgency is missing\. Install"):
        compat.require_contract([], "0.33.0")


@pytest.mark.slow
def test_a_name_that_moved_is_refused_by_name_and_only_with_a_role() -> None:
    """A process in which vLLM's module of request queues has lost its class."""
    script = """
import sys
from vllm.v1.core.sched import request_queue
from vllm_tetri.engine.plugin import register
register()
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
parser.parse_args([])
del request_queue.RequestQueue
parser.parse_args([])
print("without a role it starts")
parser.parse_args(["--role", "both"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert "without a role it starts" in done.stdout
    assert "cannot import name 'RequestQueue'" in done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_versions_are_silent_warned_of_or_refused() -> None:
    for version in (*compat.TESTED_VLLM, "0.32.0+cpu", "0.31.2", "0.32.1.dev7+g1234567"):
        assert compat.require_contract([], version) == ""
    for version in ("0.33.0", "0.33.1+cu130"):
        assert f"vLLM {version} was not tested" in compat.require_contract([], version)
    for version in ("0.30.0", "0.34.0", "1.33.0", "0.3.3"):
        with pytest.raises(UnsupportedError, match=re.escape(f"vLLM {version}: only 0.31 and")):
            compat.require_contract([], version)


def attributes_set_by(*classes: type) -> set[str]:
    """Names that the methods of classes assign on `self`."""
    return {
        node.attr
        for each in classes
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_our_scheduler_sets_no_attribute_that_vllm_has_by_chance_too() -> None:
    shared = attributes_set_by(TetriScheduler) & attributes_set_by(Scheduler, AsyncScheduler)
    ours_alone = {"connector", "connector_prefix_cache_stats", "vllm_config"}  # encoder-decoder
    ours_before = {"kv_event_publisher"}
    assert shared == {"running", "waiting", "max_num_scheduled_tokens"} | ours_alone | ours_before
    shared = attributes_set_by(TetriConnector) & attributes_set_by(compat.KVConnectorBase_V1)
    assert shared == set()


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
    allowed = {"vllm", "vllm.config", "vllm.engine", "vllm.forward_context"}
    for path in engine.glob("*.py"):
        if path.name == "compat.py":
            continue
        tree = ast.parse(path.read_text())
        # What `doctor` runs in a process of its own; no instance depends on it.
        apart = ("main", "_caches_of") if path.name == "identity.py" else ()
        tree.body = [each for each in tree.body if getattr(each, "name", "") not in apart]
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                assert not name.startswith("vllm.") or name in allowed, f"{path.name}: {name}"


# -- patches, and what the plugin does to a process of vLLM's ----


PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))


@pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="patches are for vLLM 0.32")
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


@pytest.mark.slow
def test_what_we_log_is_seen_among_vllms_lines_and_at_its_level() -> None:
    (line,) = [line for line in said().splitlines() if "decode-0 leaves" in line]
    assert "INFO" in line
    assert "decode-0 leaves" not in said(VLLM_LOGGING_LEVEL="WARNING")
