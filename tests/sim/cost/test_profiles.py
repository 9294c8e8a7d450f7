"""What the simulator knows of devices and models."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.sim.builders import spec, steps
from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import PROFILES, profile
from vllm_tetri.sim.cost.step_cost import Roofline, linear

DOCS = Path(__file__).parents[3] / "docs"


def test_a_profile_says_where_it_comes_from() -> None:
    assert not profile("smollm2-1core").is_estimate
    assert "measured" in profile("smollm2-1core").source
    for name in ("estimate-h100-8b", "opt-13b-2xv100", "roofline:qwen2.5-7b:a100"):
        assert profile(name).is_estimate
        assert "estimate" in profile(name).source


def test_a_roofline_is_made_of_its_name() -> None:
    known = profile("roofline:llama-3-70b:h100:4")

    assert isinstance(known.cost, Roofline)
    assert known.num_devices == 4
    assert known.kv_token_bytes == 327_680
    assert known.cost.step_s(1, 0, 0, 0) > profile("roofline:llama-3-8b:h100").cost.step_s(
        1, 0, 0, 0
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h200", "there are smollm2-1core"),
        ("roofline:llama-3-8b", "write roofline:MODEL:GPU"),
        ("roofline:llama-3-8b:tpu", "no GPU 'tpu'"),
        ("roofline:gpt-5:h100", "no model 'gpt-5'"),
        ("roofline:llama-3-70b:v100", "too many for 1 v100-32g"),
        ("roofline:llama-3-8b:h100:5", "not to be cut into 5"),
        ("none.json", "No such file"),
    ],
)
def test_a_profile_that_is_not_there_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        profile(name)
    assert "\n" not in str(error.value)


# -- files ---------------------------------------------------------------------------------


def written(tmp_path: Path, **changes: object) -> str:
    values = asdict(linear(PROFILES["smollm2-1core"].cost))
    del values["confidence"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"version": 1, **values, **changes}))
    return str(path)


def test_a_profile_comes_from_a_file(tmp_path: Path) -> None:
    found = profile(written(tmp_path))

    assert found.cost == profile("smollm2-1core").cost
    assert (found.kv_tokens, found.kv_token_bytes, found.num_devices) == (None, None, 1)
    assert not found.is_estimate


def test_a_file_may_tell_of_kv_and_what_is_outside_the_engine(tmp_path: Path) -> None:
    found = profile(written(tmp_path, kv_tokens=1000, kv_token_bytes=23_040, front_s=0.5))

    assert (found.kv_tokens, found.kv_token_bytes, found.front_s) == (1000, 23_040, 0.5)


def limits(engine: EngineConfig) -> tuple[int, int, int]:
    return engine.most_tokens, engine.max_requests, engine.tile_tokens


def test_a_file_may_tell_the_limits_of_a_step(tmp_path: Path) -> None:
    name = written(tmp_path, most_tokens=64, max_requests=8, tile_tokens=32)

    assert limits(of_profile(EngineConfig(), profile(name))) == (64, 8, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "write an object of version, which is 1"),
        ({"more": 1}, "if you like front_s, kv_tokens, kv_token_bytes, most_tokens"),
        ({"base_s": -1}, "base_s is -1"),
        ({"base_s": "fast"}, "TypeError"),
        ({"prompt_s": float("nan")}, "prompt_s is nan"),
        ({"base_s": 0, "request_s": 0}, "no time"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"most_tokens": 0}, "most_tokens is 0"),
        ({"max_requests": -1}, "max_requests is -1"),
        ({"tile_tokens": 0.5}, "tile_tokens is 0.5"),
        ({"tile_tokens": "all"}, "TypeError"),
    ],
)
def test_a_wrong_file_is_one_clear_error(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        profile(written(tmp_path, **changes))
    assert "\n" not in str(error.value)
    assert "ConfigError" not in str(error.value)


# -- in the simulator ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-2cores", (2048, 256, 16)),
        ("opt-13b-2xv100", (2048, 256, 128)),
        ("roofline:llama-3-8b:a100@300", (2048, 256, 128)),
        ("estimate-h100-8b", (8192, 1024, 128)),
        ("roofline:llama-3-8b:h100@350", (8192, 1024, 128)),
        ("roofline:llama-3-8b:h200", (8192, 1024, 128)),
    ],
)
def test_steps_have_the_limits_of_vllm_on_the_device(
    name: str, expected: tuple[int, int, int]
) -> None:
    assert limits(of_profile(EngineConfig(), profile(name))) == expected


@pytest.mark.parametrize(("kind", "tokens"), [(Stock(), 8192), (Stock(2048), 2048)])
def test_stock_has_the_budget_of_its_device_if_none_is_given(kind: Stock, tokens: int) -> None:
    engine = replace(of_profile(EngineConfig(), profile("estimate-h100-8b")), kind=kind)
    one = ClusterConfig(make_instances(both=1, engine=engine), "least-in-flight")

    found = steps(one, [spec(0, 16_384, 1)])

    assert [each.prompts for each in found] == [[(0, tokens)]] * (16_384 // tokens)


def test_an_estimate_is_called_so_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--requests", "10"]

    assert cli.main(["sim", "--profile", "roofline:llama-3-8b:h100", *few]) == 0
    assert "an estimate from data sheets" in capsys.readouterr().out.replace("\n", " ")
    assert cli.main(["sim", *few]) == 0
    assert "estimate" not in capsys.readouterr().out


def test_the_pool_is_that_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--profile", written(tmp_path, kv_tokens=160), "--requests", "10"]

    assert cli.main(["sim", *small]) == 2
    assert "10 blocks of 16 tokens" in capsys.readouterr().err
    assert cli.main(["sim", *small, "--kv-blocks", "4096"]) == 0
