"""Keys and TLS of a cluster: who gets which, and who can see it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.certificates import CERTIFICATE, CERTIFICATE_KEY, write_certificate_with_key
from tests.launch.fakes import FakeUp
from tests.launch.planned import CPU, make_plan, options
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.plan import ChildSpec, LaunchPlan

TLS = (f"--ssl-certfile={CERTIFICATE}", f"--ssl-keyfile={CERTIFICATE_KEY}")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("TETRI_INSTANCE_API_KEY", raising=False)


def plan(*words: str, tail: tuple[str, ...] = ()) -> LaunchPlan:
    return make_plan(options(*words, tail=tail), CPU)


def words(found: LaunchPlan) -> str:
    """All that a list of processes, or a log of the plan, would show."""
    return " ".join(
        " ".join(spec.command(1)) for spec in (*found.instances, *found.routers)
    ) + repr(found)


def key_of(spec: ChildSpec) -> str:
    return dict(spec.environment).get("VLLM_API_KEY", "")


def test_keys_go_through_the_environment_and_instances_get_another_one() -> None:
    found = plan("--api-key", "k-mine-7", "k-yours-7")
    router = found.routers[-1]
    assert dict(router.environment)["VLLM_API_KEY"] == "k-mine-7\nk-yours-7"
    (own,) = {key_of(spec) for spec in found.instances}
    assert dict(router.environment)["TETRI_INSTANCE_API_KEY"] == own
    assert len(own) > 30
    assert own != key_of(plan("--api-key", "k-mine-7").instances[0])
    assert router.key == "k-mine-7"
    assert not any(key in words(found) for key in ("k-mine-7", "k-yours-7", own))


def test_without_keys_no_process_gets_any() -> None:
    assert [spec.environment for spec in (*plan().instances, *plan().routers)] == [()] * 3
    assert plan().routers[-1].key == ""


def test_a_key_for_vllm_serve_is_the_routers_as_well() -> None:
    for tail in (("--api-key", "a", "b", "--dtype", "half"), ("--api_key=a", "--api-key=b")):
        found = plan(tail=tail)
        router = dict(found.routers[-1].environment)
        assert router == {"VLLM_API_KEY": "a\nb", "TETRI_INSTANCE_API_KEY": "a"}
        assert found.instances[0].environment == ()
    found = plan("--api-key", "door", tail=("--api-key", "a"))
    router = dict(found.routers[-1].environment)
    assert router == {"VLLM_API_KEY": "door", "TETRI_INSTANCE_API_KEY": "a"}


def test_the_key_of_instances_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "door")
    monkeypatch.setenv("TETRI_INSTANCE_API_KEY", "own")
    assert {key_of(spec) for spec in plan().instances} == {"own"}


def test_tls_is_the_routers_only() -> None:
    found = plan(*TLS)
    assert found.routers[-1].command(1).count("--ssl-certfile") == 1
    assert not any("--ssl" in word for spec in found.instances for word in spec.command(1))
    assert found.routers[-1].certificate == str(CERTIFICATE)
    with pytest.raises(ConfigError, match="before the --"):
        plan(tail=("--ssl-keyfile", "x"))
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        plan("--ssl-keyfile=x")
    with pytest.raises(ConfigError, match="no certificate"):
        plan(f"--ssl-certfile={CERTIFICATE_KEY}")


def test_a_certificate_that_was_renewed_counts_from_the_next_start(
    fake_up: FakeUp, tmp_path: Path
) -> None:
    path = tmp_path / "certificate.pem"
    write_certificate_with_key(path)
    process = fake_up.start(f"--ssl-certfile={path}")
    fake_up.ready()
    write_certificate_with_key(path)
    os.kill(fake_up.starts("router")[0]["pid"], signal.SIGKILL)
    assert process.stdout is not None
    ready = (line for line in process.stdout if "router: ready" in line)
    assert next(ready)
    assert next(ready)  # with the new one
    fake_up.interrupt()


def test_up_speaks_to_its_router_with_key_and_https(fake_up: FakeUp) -> None:
    content = fake_up.ready("--api-key", "k-mine-7", "--verbose", *TLS)
    assert content["url"].startswith("https://127.0.0.1:")
    (router,) = fake_up.starts("router")
    (prefill,) = fake_up.starts("prefill-0")
    own = router["keys"]["TETRI_INSTANCE_API_KEY"]
    assert prefill["keys"]["VLLM_API_KEY"] == own
    assert "k-mine-7" not in " ".join(router["argv"] + prefill["argv"])
    output = fake_up.interrupt()
    assert '-H "authorization: Bearer $VLLM_API_KEY"' in output
    assert "curl -k https://" in output
    assert "k-mine-7" not in output
    assert own not in output
