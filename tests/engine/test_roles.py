"""`--role` on vLLM's own parsers, and what it leaves alone."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.llama import LLAMA
from vllm_tetri.config import DRAIN_S, TetriConfig, decode_config, file_key_of, option_of, options
from vllm_tetri.engine import roles
from vllm_tetri.engine.plugin import register
from vllm_tetri.engine.scheduler import require_supported
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.machine import free_port
from vllm_tetri.security import VALUE_VARIABLE, VARIABLE, kv_key_of, write_secret
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
def test_several_workers_are_vllms_own_and_share_a_memory_node(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.setenv(binding, "0-1|2-3")
    many = ("--role", role, "--tensor-parallel-size", "1024")
    assert parse(*many).distributed_executor_backend is None
    assert os.environ[binding] == "0-1|2-3"
    monkeypatch.delenv(binding)
    parse(*many)
    assert os.environ[binding] == "nobind"


@pytest.mark.parametrize("role", list(Role))
def test_everything_follows_from_the_role(role: Role) -> None:
    namespace = parse("--role", role, "--port", "8123")
    assert namespace.scheduler_cls == roles.SCHEDULER
    assert namespace.middleware == [roles.MIDDLEWARE]
    assert namespace.distributed_executor_backend == roles.EXECUTOR
    transfer = namespace.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_load_failure_policy) == (
        "TetriConnector",
        "recompute",
    )
    assert config(namespace).instance == f"{role}-{platform.node()}-8123"
    assert config(namespace).url == "http://127.0.0.1:8123"


def test_default_names_differ_by_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(host: str, port: str) -> str:
        monkeypatch.setattr(platform, "node", lambda: host)
        return config(parse("--role", "both", "--port", port)).instance

    names = {named(host, port) for host in ("pod-1", "pod-2") for port in ("8000", "8001")}
    assert names == {f"both-pod-{host}-800{port}" for host in (1, 2) for port in (0, 1)}
    assert config(parse("--role", "both", "--tetri-instance", "prefill-1")).instance == "prefill-1"


@pytest.fixture
def secret(tmp_path: Path) -> tuple[str, str]:
    write_secret(tmp_path / "secret")
    return "--tetri-secret-file", str(tmp_path / "secret")


REMOTE = ("--role", "both", "--port", "8123", "--tetri-control", "tcp://10.0.0.9:1")


@pytest.mark.parametrize(
    ("words", "url", "option"),
    [
        ((), "http://127.0.0.1:8123", "--tetri-host ADDRESS"),
        (("--host", "0.0.0.0"), "http://127.0.0.1:8123", "--tetri-host ADDRESS"),
        (("--host", "localhost"), "http://127.0.0.1:8123", "--host ADDRESS"),
        (("--host", "localhost", "--tetri-host", "10.0.0.5"), "http://127.0.0.1", "--host ADDRESS"),
        (("--host", "::1"), "http://[::1]:8123", "--host ADDRESS"),
        (("--host", "127.0.0.2"), "http://127.0.0.2:8123", "--host ADDRESS"),
        (("--tetri-url", "http://localhost:1"), "http://localhost:1", "--tetri-url http://ADDRESS"),
    ],
)
def test_a_loopback_url_is_refused_if_a_router_is_elsewhere(
    words: tuple[str, ...],
    url: str,
    option: str,
    secret: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refusal(capsys, *REMOTE, *secret, *words)
    assert f"tcp://10.0.0.9:1 is not on this machine and cannot reach {url}" in text
    assert f"give {option}" in text or f"or {option}" in text


def test_urls_and_kv_addresses_that_a_router_elsewhere_reaches(
    secret: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*words: str) -> tuple[str, str]:
        found = config(parse(*REMOTE, *secret, *words))
        return found.url, found.host

    assert made("--host", "10.0.0.5") == ("http://10.0.0.5:8123", "10.0.0.5")
    assert made("--tetri-host", "10.0.0.5") == ("http://10.0.0.5:8123", "10.0.0.5")
    near = config(parse(*REMOTE[:4], *secret, "--host", "10.0.0.5"))  # its router is here
    assert (near.url, near.host) == ("http://10.0.0.5:8123", "10.0.0.5")
    assert made("--tetri-host", "fd00::5")[0] == "http://[fd00::5]:8123"
    url = ("--tetri-url", "http://me:8123")
    assert "cannot send KV to 127.0.0.1; give --tetri-host" in refusal(
        capsys, *REMOTE, *secret, *url
    )
    assert made(*url, "--tetri-host", "127.0.0.1") == ("http://me:8123", "127.0.0.1")


def test_the_role_takes_over_the_time_that_vllm_gives_requests_after_sigterm() -> None:
    for words, drain_s in (((), DRAIN_S), (("--shutdown-timeout", "90"), 90.0)):
        namespace = parse("--role", "both", *words)
        assert (config(namespace).drain_s, namespace.shutdown_timeout) == (drain_s, 0)
    # None of several API servers is the process that gets the signal, so vLLM itself waits.
    namespace = parse("--role", "both", "--shutdown-timeout", "30", "--api-server-count", "2")
    assert (config(namespace).drain_s, namespace.shutdown_timeout) == (30.0, 30)


def test_a_kv_port_that_is_taken_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--role", "both", "--tetri-kv-port", str(taken.getsockname()[1]))
        text = refusal(capsys, *words)
    assert f"--tetri-kv-port {words[-1]}: address already in use on 127.0.0.1" in text
    assert config(parse(*words)).kv_port == int(words[-1])
    assert config(parse("--role", "both")).kv_port == 0


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


def test_a_users_conflicting_option_is_refused_with_both_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, value in (
        ("--scheduler-cls", "a.b"),
        ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'),
        ("--kv-offloading-size", "1"),
        ("--ssl-certfile", "server.pem"),  # it would serve, and never join
        ("--uds", "server.socket"),
    ):
        text = refusal(capsys, "--role", "decode", option, value)
        assert option in text
        assert "--role decode" in text


@pytest.mark.parametrize(
    "words",
    [
        ("--enable-lora",),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
        ("--pipeline-parallel-size", "2"),
        ("--decode-context-parallel-size", "2"),
        ("--nnodes", "2"),
        ("--nnodes", "2", "--headless"),
    ],
    ids=str,
)
def test_what_stock_serves_is_served_with_a_role(words: tuple[str, ...]) -> None:
    assert parse("--role", "decode", *words).scheduler_cls == roles.SCHEDULER


def test_several_workers_need_an_executor_for_them() -> None:
    for option in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        assert parse("--role", "both", option, "2").distributed_executor_backend is None


def test_windows_that_instances_fit_by_themselves_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("--role", "both", "--max-model-len", "2048")
    assert not caplog.records
    parse("--role", "both", "--max-model-len", "auto")
    assert "exchange no KV" in caplog.text


def test_data_parallel_ranks_have_one_api_server(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("--role", "both").api_server_count is None
    assert parse("--role", "both", "--data-parallel-size", "2").api_server_count == 1
    assert not caplog.records
    several = ("--data-parallel-size", "2", "--api-server-count", "2")
    assert parse("--role", "both", *several).api_server_count == 1
    assert "one API server" in caplog.text


@pytest.mark.parametrize(
    ("balances", "rank"),
    [
        ({}, 5),
        ({"data_parallel_hybrid_lb": True}, 1),  # its own server counts its ranks from 0
        ({"data_parallel_external_lb": True}, None),  # has a server of its own
    ],
)
def test_a_rank_is_named_as_its_server_counts(balances: dict[str, Any], rank: int | None) -> None:
    transfer = parse("--role", "both", "--tetri-instance", "a").kv_transfer_config
    parallel = {
        "data_parallel_index": 5,
        "data_parallel_rank_local": 1,
        "data_parallel_hybrid_lb": False,
        "data_parallel_external_lb": False,
    }
    parallel_config = SimpleNamespace(**parallel | balances)
    engine = SimpleNamespace(parallel_config=parallel_config, kv_transfer_config=transfer)
    assert roles.rank_of(engine) is None  # an engine of its own, whatever vLLM's defaults say
    transfer.engine_id += "_dp5"
    assert roles.rank_of(engine) == rank


def test_ranks_have_names_and_kv_ports_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    one = config(parse("--role", "decode", "--tetri-instance", "d", "--tetri-kv-port", "0"))
    assert roles.config_of_rank(one, None) is one
    second = roles.config_of_rank(one, 1)
    assert (second.instance, second.kv_port) == ("d-dp1", 0)
    with socket.create_server(("127.0.0.1", port := free_port())):
        words = ("--role", "decode", "--tetri-kv-port", str(port - 1))
        third = roles.config_of_rank(config(parse(*words)), 2)
        assert third.kv_port == port + 1
        text = refusal(capsys, *words, "--data-parallel-size", "2")
    assert f"--tetri-kv-port {port}" in text
    assert "rank" in text


def names(namespace: Namespace) -> list[str]:
    found = namespace.kv_transfer_config.kv_connector_extra_config[roles.NAMES_KEY]
    return list(found)


def test_an_instance_announces_the_names_that_stock_serves() -> None:
    assert names(parse("--role", "both")) == ["m"]
    assert names(parse("--role", "both", "--served-model-name", "a", "b")) == ["a", "b"]
    adapters = ("--enable-lora", "--lora-modules", "one=/x", "two=/y")  # routers ask for these
    assert names(parse("--role", "both", *adapters)) == ["m"]


def test_wrong_values_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs --role" in refusal(capsys, "--tetri-arena-bytes", "1M")
    assert "loopback" in refusal(capsys, "--role", "both", "--tetri-host", "0.0.0.0")
    assert "loopback" in refusal(capsys, "--role", "both", "--tetri-control", "tcp://10.0.0.1:1")
    assert "is empty" in refusal(capsys, "--role", "both", "--tetri-control", "")
    assert "port 0" in refusal(capsys, "--role", "both", "--tetri-control", "tcp://127.0.0.1:0")
    assert "tcp://[::1]:1" in refusal(capsys, "--role", "both", "--tetri-control", "tcp://::1:1")
    assert "256M" in refusal(capsys, "--role", "both", "--tetri-arena-bytes", "lots")
    assert "streams" in refusal(capsys, "--role", "both", "--tetri-streams", "99")
    none = refusal(capsys, "--role", "both", "--tetri-kv-pool", "1M:/nowhere")
    assert "--tetri-kv-pool 1M:/nowhere: No such file or directory\n" in none


def test_a_secret_opens_other_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    words = ("--role", "both", "--tetri-host", "10.0.0.5", "--tetri-control", "tcp://r:1")
    made = config(parse(*words, "--tetri-secret-file", str(path)))
    assert (made.secret_file, made.host, made.control) == (str(path), "10.0.0.5", ("tcp://r:1",))
    wide = ("--role", "both", "--tetri-host", "0.0.0.0", "--tetri-secret-file", str(path))
    assert "cannot dial" in refusal(capsys, *wide)
    monkeypatch.setenv(VARIABLE, str(path))
    assert config(parse(*words)).secret_file == str(path)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(VALUE_VARIABLE, path.read_text())
    named = parse(*words)
    assert path.read_text().strip() not in str(named)
    assert kv_key_of(config(named).secret_file) == kv_key_of(str(path))
    monkeypatch.setenv(VARIABLE, str(path))
    path.chmod(0o644)
    assert "chmod 600" in refusal(capsys, *words)
    monkeypatch.delenv(VARIABLE)
    assert "vllm-tetri secret FILE" in refusal(capsys, *words)


BAD_VALUES = {
    "chunk_size": ("0", "-5", "1.5", "x", "", "a whole number of at least 1 or auto"),
    "sched_batch": ("0", "-1", "x", "a whole number of at least 1"),
    "prefill_policy": ("best", "SJF", "fcfs, sjf, ljf, srtf"),
    "tbt_slo_s": ("0", "-1", "nan", "inf", "x", "a number above 0 and at most 86400 seconds"),
    "decode_policy": ("vllm", "Greedy", "greedy, reserve-static, reserve-dynamic"),
    "dispatch_policy": ("best", "power-of-two, power-of-two-ratio"),
    "predictor_mode": ("both", "parallel or sequential"),
    "preset": ("vllm", "1", "none or paper"),
    "decode_order": ("sjf", "fcfs or shortest"),
    "kv_port": ("-1", "65536", "x", "a whole number of at least 0 and at most 65535"),
    "streams": ("0", "17", "a whole number of at least 1 and at most 16"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("where", ["command line", "file"])
def test_a_bad_value_is_refused_with_what_is_allowed(
    name: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, file = option_of(name), tmp_path / "tetri.yaml"
    *values, allowed = BAD_VALUES[name]
    for value in values:
        file.write_text(f"{file_key_of(name)}: {value}\n")
        given = [f"{option}={value}"] if where == "command line" else ["--tetri-config", str(file)]
        (line,) = (line for line in refusal(capsys, "--role", "prefill", *given).splitlines()
                   if "error: " in line)  # fmt: skip
        assert option in line
        for word in allowed.replace(" or ", ", ").split(", "):
            assert word in line


def test_the_file_has_the_keys_of_the_command_line_which_goes_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tetri.yaml"
    words = ("--role", "both", "--tetri-config", str(file))
    file.write_text("tbt-slo: 0.2\nhold_timeout_s: 3\nload-budget-bytes: 1m\nchunk-size: 128\n")
    made = config(parse(*words, "--tetri-chunk-size", "64"))
    assert (made.tbt_slo_s, made.hold_timeout_s, made.chunk_size) == (0.2, 3.0, 64)
    assert made.load_budget_bytes == 10**6
    for line, said in (
        ("shed-batch: 3", "did you mean sched-batch"),
        ("arena_bytes: lots", "--tetri-arena-bytes"),
    ):
        file.write_text(line)
        assert said in refusal(capsys, *words)


def test_the_preset_of_the_paper_gives_way_to_other_options(tmp_path: Path) -> None:
    file = tmp_path / "tetri.yaml"
    file.write_text("preset: paper\ndispatch-policy: power-of-two\n")
    paper = ("request", "lower")
    for words, policy in (
        (["--tetri-preset", "paper"], "power-of-two-ratio"),
        (["--tetri-preset", "paper", "--tetri-dispatch-policy", "power-of-two"], "power-of-two"),
        (["--tetri-config", str(file)], "power-of-two"),
    ):
        made = config(parse("--role", "prefill", *words))
        assert (made.push, made.reserve_end) == paper
        assert made.dispatch_policy == policy
    assert config(parse("--role", "prefill", "--tetri-preset", "none")).push == "chunk"


def chunk(*arguments: str) -> int | str:
    return config(parse(*arguments)).chunk_size


@pytest.mark.parametrize("role", [role.value for role in Role])
def test_chunks_are_sized_while_serving_unless_one_is_given(role: str) -> None:
    assert chunk("--role", role) == "auto"
    assert chunk("--role", role, "--tetri-preset", "paper") == 512
    assert chunk("--role", role, "--tetri-tbt-slo", "0.05", "--tetri-chunk-size", "64") == 64


@pytest.mark.parametrize("role", [role.value for role in Role])
def test_a_queue_is_limited_only_if_the_user_says_so(role: str) -> None:
    assert parse("--role", role).max_num_queued_tokens is None
    given = parse("--role", role, "--max-num-queued-tokens", "5k")
    assert given.max_num_queued_tokens == 5000


def test_help_lists_every_option_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    FlexibleArgumentParser._search_keyword = "role"
    try:
        text = parser.format_help()
    finally:
        FlexibleArgumentParser._search_keyword = None
    for option in options().values():
        assert option.flag in text
        assert option.default in " ".join(text.split())
    assert "--role" in text


def test_every_field_is_an_option_or_follows_from_the_preset_or_the_role() -> None:
    others = set(TetriConfig.__struct_fields__) - set(options())
    assert others == {"role", "reserve_end", "drain_s"}


def test_a_release_that_was_not_tested_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    require_supported("0.32.0")
    assert not caplog.records
    require_supported("0.33.1")
    (record,) = caplog.records
    assert (record.levelname, "0.33.1" in record.message) == ("WARNING", True)
    with pytest.raises(UnsupportedError, match=r"0\.30\.0: only"):
        require_supported("0.30.0")


DUMP = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(
    ["--model", sys.argv[1], "--skip-tokenizer-init", "--enforce-eager"])
config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
config.instance_id = ""
shown = {key: str(value) for key, value in vars(config).items()}
print("DUMP" + json.dumps({"config": shown, "hash": config.compute_hash(),
    "namespace": {key: str(value) for key, value in vars(namespace).items()}}))
"""


@pytest.mark.slow
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


@pytest.mark.parametrize("push", ["layer", "auto"])
def test_layers_leave_from_host_memory_only(
    push: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config(parse("--role", "prefill", "--tetri-push", push)).push == push
    monkeypatch.setattr(roles, "is_cpu", lambda: False)
    assert "full CUDA graphs; use chunk" in refusal(
        capsys, "--role", "prefill", "--tetri-push", push
    )
