"""Estimates from data sheets, and models by their architecture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.hardware import GPUS, MODELS, gpu, kv_tokens, model, roofline

LLAMA, OPT = MODELS["llama-3-8b"], MODELS["opt-13b"]
V100, H100, H200 = GPUS["v100-32g"], GPUS["h100-80g"], GPUS["h200"]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-13b", 13.02),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("mistral-7b", 7.25),
        ("opt-13b", 12.85),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-32b", 32.76),
        ("smollm2-135m", 0.1345),
    ],
)
def test_weights_are_as_many_as_published(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_more_bandwidth_helps_decodes_and_not_prompts() -> None:
    old, new = roofline(LLAMA, H100, 1), roofline(LLAMA, H200, 1)

    assert new.step_s(32, 32_000, 0, 0) < 0.85 * old.step_s(32, 32_000, 0, 0)
    assert new.step_s(0, 0, 2048, 1024) == pytest.approx(old.step_s(0, 0, 2048, 1024))


def test_the_pool_is_what_weights_leave() -> None:
    assert kv_tokens(LLAMA, H100, 2) > 2 * kv_tokens(LLAMA, H100, 1)
    left_bytes = 80 * 2**30 * 0.9 - LLAMA.parameters * 2
    assert kv_tokens(LLAMA, H100, 1) == pytest.approx(left_bytes / 131_072, abs=1)


def test_a_gpu_may_be_called_by_its_beginning() -> None:
    assert gpu("H100") is H100
    assert gpu("v100") is V100
    for name in ("", "h", "b200"):
        with pytest.raises(ConfigError, match="there are v100-32g, a100-80g, h100-80g, h200"):
            gpu(name)


def test_a_cap_of_power_slows_prompts_and_leaves_decodes() -> None:
    capped = gpu("h100@350")
    assert (capped.name, capped.watts) == ("h100-80g@350", 350)
    whole, slow = roofline(LLAMA, H100, 1), roofline(LLAMA, capped, 1)
    prompt, decodes = (0, 0, 2048, 1024), (16, 16 * 1024, 0, 0)
    assert slow.step_s(*prompt) == pytest.approx(whole.step_s(*prompt) * 2 ** (1 / 3), rel=0.05)
    assert slow.step_s(*decodes) == pytest.approx(whole.step_s(*decodes), rel=0.02)
    assert gpu("h100@700").flops == H100.flops


@pytest.mark.parametrize("cap", ["", "174", "701", "half", "-400", "1e3"])
def test_a_cap_beyond_the_device_is_refused_with_its_bounds(cap: str) -> None:
    with pytest.raises(ConfigError, match="whole number of watts, 175 to 700 of this one"):
        gpu(f"h100@{cap}")


# -- config.json -----------------------------------------------------------------------------


def folder(tmp_path: Path, **changes: Any) -> str:
    values = {name: value for name, value in {**CONFIG, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


def test_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    found = model(folder(tmp_path))

    assert replace(found, name="llama-3-8b") == LLAMA
    assert found.name == tmp_path.name
    assert model(f"{tmp_path}/config.json") == found


def test_opt_names_its_layers_differently(tmp_path: Path) -> None:
    config = {
        "model_type": "opt",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "vocab_size": 50272,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert replace(model(str(tmp_path)), name="opt-13b") == OPT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' or quantised"),
        ({"model_type": ...}, "None or quantised"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "big"}, "'big'"),
        ({"vocab_size": ...}, "vocab_size"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_an_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        model(folder(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are llama-2-13b"):
        model("gpt-5")
    with pytest.raises(ConfigError, match="folders with a"):
        model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="Expecting"):
        model(str(tmp_path))
