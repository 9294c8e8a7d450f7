"""Policies by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from vllm_tetri import plugins
from vllm_tetri.config import decode_config
from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import Kind, load_policy, policy_names
from vllm_tetri.policy.admission import Admission
from vllm_tetri.policy.order import Prompt
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances
from vllm_tetri.sim.workload import RequestSpec

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dispatch", ["power-of-two", "power-of-two-ratio"]),
        ("order", ["fcfs", "sjf", "ljf", "srtf", "mlfq"]),
        ("admission", ["greedy", "reserve-static", "reserve-dynamic"]),
    ],
)
def test_every_built_in_policy_has_a_name(kind: Kind, names: list[str]) -> None:
    assert policy_names(kind) == names
    assert all(load_policy(kind, name) is not None for name in names)


@pytest.mark.usefixtures("examples")
def test_the_example_policy_runs_by_its_dotted_path() -> None:
    cluster = make_instances(1, 2, engine=EngineConfig(kv_blocks=200))
    setting = ClusterConfig(cluster, dispatch="own_policy:most_free_blocks")
    served = simulate(setting, [RequestSpec(number, 0.5 * number, 100, 50) for number in range(6)])
    assert {each.decode for each in served} == {"decode-0", "decode-1"}


def test_an_installed_package_gives_a_policy_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:arrival", "vllm_tetri.order")

    def installed(*, group: str, name: str = "mine") -> list[EntryPoint]:
        return [entry] if (group, name) == (entry.group, entry.name) else []

    monkeypatch.setattr(plugins, "entry_points", installed)
    assert policy_names("order")[-1] == "mine"
    assert load_policy("order", "mine").key is arrival


def arrival(prompt: Prompt) -> tuple[float, ...]:
    """Sort key of an own order."""
    return (prompt.arrival,)


class Never:
    """Lets no request in beside others."""

    def fits(self, pool: Admission, tokens: int, remaining_tokens: int) -> bool:
        return np.bool_(0)  # type: ignore[return-value]

    def growth_blocks(self, pool: Admission) -> int:
        return np.int64(3)  # type: ignore[return-value]


def shortest(prompt: Prompt) -> int:
    """Sort key that is no tuple."""
    return prompt.remaining_tokens


def test_a_class_is_an_admission_policy_and_anything_that_sorts_a_key() -> None:
    engine = EngineConfig(
        kv_blocks=200, order=f"{__name__}:shortest", admission=f"{__name__}:Never"
    )
    setting = ClusterConfig(make_instances(1, 1, engine=engine))
    first, second = simulate(setting, [RequestSpec(number, 0.0, 100, 50) for number in range(2)])
    assert second.last_token_s > 1.8 * first.last_token_s  # one after the other
    pool = Admission(load_policy("admission", f"{__name__}:Never"), block_size=16, total_blocks=9)
    assert pool.reserved_blocks == 3


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("order", "sfj", "did you mean 'sjf'"),
        ("dispatch", "best", "there are power-of-two, power-of-two-ratio"),
        ("dispatch", "no_such_module:policy", "install the package"),
        ("dispatch", "vllm_tetri.policy.dispatch:no_such_policy", "no_such_policy"),
        ("admission", "vllm_tetri.policy.dispatch:power_of_two", "is no admission policy"),
    ],
)
def test_an_unknown_policy_is_refused_with_what_to_write(kind: Kind, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_policy(kind, name)


def test_a_configuration_names_the_option_of_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match=r"--tetri-prefill-policy.*did you mean 'sjf'"):
        decode_config({"role": "both", "prefill_policy": "sfj"})
