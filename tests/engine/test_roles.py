"""`--role` on vLLM's own parsers, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.llama import LLAMA
from vllm_tetri.config import TetriConfig, decode_config
from vllm_tetri.engine import roles
from vllm_tetri.engine.options import HELP
from vllm_tetri.engine.plugin import register
from vllm_tetri.engine.versions import require_supported
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.types import Role


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()
    register()  # idempotent: vLLM loads plugins more than once


def parse(*arguments: str) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser())
    return parser.parse_args(["--model", "m", *arguments])


def config(namespace: Namespace) -> TetriConfig:
    return decode_config(namespace.kv_transfer_config.kv_connector_extra_config[roles.CONFIG_KEY])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("role", list(Role))
def test_everything_follows_from_the_role(role: Role) -> None:
    namespace = parse("--role", role, "--port", "8123")
    assert namespace.scheduler_cls == roles.SCHEDULER
    assert namespace.middleware == [roles.MIDDLEWARE]
    assert namespace.distributed_executor_backend == roles.EXECUTOR
    transfer = namespace.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == (
        roles.CONNECTOR,
        "recompute",
    )
    assert config(namespace).instance == f"{role}-8123"
    assert config(namespace).url == "http://127.0.0.1:8123"


def test_options_reach_the_config() -> None:
    namespace = parse(
        "--role", "decode", "--tetri-arena-bytes", "64M", "--tetri-control",
        "tcp://127.0.0.1:1,tcp://127.0.0.1:2", "--tetri-transfer-timeout", "3",
    )  # fmt: skip
    assert config(namespace).arena_bytes == 64 << 20
    assert config(namespace).control == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert config(namespace).transfer_timeout_s == 3.0


def test_vllm_config_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("role: prefill\ntetri-chunk-size: 128\ntetri-streams: 3\n")
    # `vllm serve` merges --config before its own parser runs; do the same here.
    parser = FlexibleArgumentParser()
    merged = parser._pull_args_from_config(
        ["serve", "m", "--config", str(file), "--tetri-streams", "4"]
    )
    namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(merged[1:])
    assert config(namespace).role is Role.PREFILL
    assert config(namespace).chunk_size == 128
    assert config(namespace).streams == 4


def test_tetri_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tetri.yaml"
    file.write_text("arena_bytes: 32M\nchunk-size: 128\n")
    namespace = parse("--role", "both", "--tetri-config", str(file), "--tetri-chunk-size", "64")
    assert (config(namespace).arena_bytes, config(namespace).chunk_size) == (32 << 20, 64)
    file.write_text("chunk_sz: 3\n")
    assert "chunk_sz" in refusal(capsys, "--role", "both", "--tetri-config", str(file))


def test_a_users_conflicting_option_is_refused_with_both_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, value in (
        ("--scheduler-cls", "a.b"),
        ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'),
        ("--pipeline-parallel-size", "2"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    ):
        text = refusal(capsys, "--role", "decode", option, value)
        assert option in text
        assert "--role decode" in text
    assert "--enable-lora" in refusal(capsys, "--role", "decode", "--enable-lora")


def test_wrong_values_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs --role" in refusal(capsys, "--tetri-arena-bytes", "1M")
    assert "loopback" in refusal(capsys, "--role", "both", "--tetri-host", "0.0.0.0")
    assert "loopback" in refusal(capsys, "--role", "both", "--tetri-control", "tcp://10.0.0.1:1")
    assert "256M" in refusal(capsys, "--role", "both", "--tetri-arena-bytes", "lots")
    assert "streams" in refusal(capsys, "--role", "both", "--tetri-streams", "99")


def test_help_lists_every_option_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    FlexibleArgumentParser._search_keyword = "role"
    try:
        text = parser.format_help()
    finally:
        FlexibleArgumentParser._search_keyword = None
    for name in HELP:
        assert "--tetri-" + name.replace("_", "-").removesuffix("-s") in text
    assert "--role" in text


def test_every_field_of_the_config_is_an_option() -> None:
    assert set(HELP) == set(TetriConfig.__struct_fields__) - {"role"}


def test_version_gate() -> None:
    require_supported("0.32.0+cpu")
    with pytest.raises(UnsupportedError, match=r"0\.33\.1.*|supported"):
        require_supported("0.33.1")


DUMP = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(
    ["--model", sys.argv[1], "--skip-tokenizer-init", "--enforce-eager"])
config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
config.instance_id = ""
shown = {key: str(value) for key, value in vars(config).items()}
print("DUMP" + json.dumps({"config": shown, "hash": config.compute_hash(),
    "namespace": {key: str(value) for key, value in vars(namespace).items()}}))
"""


def test_without_a_role_nothing_changes(tmp_path: Path) -> None:
    """vLLM's resolved configuration is the same with and without this package."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with_us, without = (resolved(tmp_path, plugins) for plugins in ("tetri", "none"))
    assert with_us.pop("namespace") == {**without.pop("namespace"), "role": "None"}
    assert with_us == without


def resolved(model: Path, plugins: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", DUMP, str(model)],
        env={**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("DUMP"))
    found: dict[str, Any] = json.loads(line.removeprefix("DUMP"))
    return found
