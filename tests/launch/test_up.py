"""`vllm-tetri up` as its user sees it, with fake instances."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.launch.fakes import FakeUp, is_alive, until
from vllm_tetri.secret import read_secret, write_secret


def test_ready_file_names_everything_that_runs(fake_up: FakeUp) -> None:
    fake_up.start("--prefill=2", "--decode=1", "--placement=shared")
    content = fake_up.ready()

    assert [row["id"] for row in content["instances"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert content["model"] == "fake-model"
    assert len({row["url"] for row in content["instances"]} | {content["url"]}) == 4


def test_several_routers_are_kept_and_share_a_lease_that_no_file_keeps(fake_up: FakeUp) -> None:
    fake_up.start("--routers=2")
    content = fake_up.ready()

    assert [row["id"] for row in content["routers"]] == ["router-0", "router-1"]
    assert content["url"] == content["routers"][0]["url"] != content["routers"][1]["url"]
    first, second = [start["argv"] for start in fake_up.starts("router")]
    lease = first[first.index("--flip-lease") + 1]
    assert lease == second[second.index("--flip-lease") + 1]
    assert Path(lease).exists()
    assert fake_up.process is not None
    fake_up.process.kill()
    fake_up.process.wait()
    assert not Path(lease).exists()
    fake_up.nothing_left()


def test_instances_get_role_name_control_and_the_users_options(fake_up: FakeUp) -> None:
    fake_up.start("--", "--max-model-len", "512")
    content = fake_up.ready()
    words = fake_up.starts("prefill-0")[0]["argv"]

    assert words[:4] == ["serve", "some/model", "--max-model-len", "512"]
    assert words[words.index("--role") + 1] == "prefill"
    assert words[words.index("--tetri-control") + 1] == content["control"]


def test_every_child_finds_the_same_secret_that_no_file_keeps(fake_up: FakeUp) -> None:
    fake_up.start()
    path = fake_up.ready()["secret_file"]

    assert read_secret(path) is not None
    for name in ("prefill-0", "decode-0", "router"):
        assert fake_up.starts(name)[0]["secret_file"] == path
        assert not any("secret" in word for word in fake_up.starts(name)[0]["argv"])
    assert fake_up.process is not None
    fake_up.process.kill()
    fake_up.process.wait()
    assert not Path(path).exists()
    fake_up.nothing_left()


def test_a_secret_that_others_may_read_is_refused(fake_up: FakeUp) -> None:
    path = fake_up.folder / "secret"
    write_secret(path)
    path.chmod(0o644)
    fake_up.start(f"--secret-file={path}")
    status, output = fake_up.end()

    assert (status, output.count("\n")) == (2, 1)
    assert "chmod 600" in output


def test_interrupt_ends_everything_with_status_0(fake_up: FakeUp) -> None:
    process = fake_up.start()
    fake_up.ready()

    process.send_signal(signal.SIGINT)
    status, output = fake_up.end()

    assert status == 0, output
    assert "ready in" in output
    fake_up.nothing_left()
    assert not fake_up.ready_file.exists()


def test_termination_before_ready_ends_everything(fake_up: FakeUp) -> None:
    process = fake_up.start()
    until(lambda: fake_up.starts("prefill-0"), "an instance was started")

    process.terminate()

    assert fake_up.end()[0] == 0
    fake_up.nothing_left()


def test_second_interrupt_kills_a_stubborn_instance(fake_up: FakeUp) -> None:
    (fake_up.folder / "decode-0.stubborn").touch()
    process = fake_up.start()
    fake_up.ready()

    process.send_signal(signal.SIGINT)
    until(lambda: not is_alive(fake_up.starts("prefill-0")[0]["pid"]), "the polite one ended")
    process.send_signal(signal.SIGINT)

    assert fake_up.end()[0] == 130
    fake_up.nothing_left()


def test_stubborn_instance_is_killed_after_its_grace(fake_up: FakeUp) -> None:
    (fake_up.folder / "decode-0.stubborn").touch()
    process = fake_up.start()
    fake_up.ready()

    process.terminate()

    assert fake_up.end()[0] == 0
    fake_up.nothing_left()


def test_killing_up_leaves_nothing(fake_up: FakeUp) -> None:
    process = fake_up.start()
    fake_up.ready()

    process.kill()
    process.wait()

    fake_up.nothing_left()


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_dead_child_is_restarted_and_its_tree_removed(fake_up: FakeUp, name: str) -> None:
    fake_up.start()
    fake_up.ready()
    below = [int(path.read_text()) for path in fake_up.folder.glob(f"{name}.below")]

    os.kill(fake_up.starts(name)[0]["pid"], signal.SIGKILL)

    until(lambda: len(fake_up.starts(name)) == 2, "it was started again")
    until(lambda: not any(map(is_alive, below)), "what it had started is gone")


def test_instance_that_left_in_good_order_is_not_started_again(fake_up: FakeUp) -> None:
    process = fake_up.start("--decode=2")
    fake_up.ready()
    below = int((fake_up.folder / "decode-1.below").read_text())

    (fake_up.folder / "decode-1.departed").touch()
    os.kill(fake_up.starts("decode-1")[0]["pid"], signal.SIGUSR1)
    until(lambda: not is_alive(below), "what it had started is gone")
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGUSR1)  # ended all by itself
    until(lambda: len(fake_up.starts("decode-0")) == 2, "the other one was started again")

    process.send_signal(signal.SIGINT)
    status, output = fake_up.end()
    assert (status, len(fake_up.starts("decode-1"))) == (0, 1)
    assert "decode-1  left" in output
    assert "decode-1  ended" not in output
    assert "decode-0  ended (exit status 0)" in output
    fake_up.nothing_left()


def test_a_crash_after_it_was_asked_to_leave_is_a_crash(fake_up: FakeUp) -> None:
    fake_up.start()
    fake_up.ready()

    (fake_up.folder / "decode-0.departed").touch()
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGKILL)

    until(lambda: len(fake_up.starts("decode-0")) == 2, "it was started again")


def test_instance_that_never_gets_ready_is_given_up_with_its_last_words(fake_up: FakeUp) -> None:
    (fake_up.folder / "prefill-0.dies").write_text("1")
    fake_up.start()

    status, output = fake_up.end()

    assert status == 1
    assert len(fake_up.starts("prefill-0")) == 3
    assert "prefill-0 ended 3 times before it was ready" in output
    assert "no such model" in output
    fake_up.nothing_left()


def test_refused_options_are_not_tried_again(fake_up: FakeUp) -> None:
    (fake_up.folder / "decode-0.dies").write_text("2")
    fake_up.start()

    status, output = fake_up.end()

    assert status == 1
    assert "decode-0 refused its options" in output
    assert len(fake_up.starts("decode-0")) == 1


def test_port_in_use_is_one_clear_line(fake_up: FakeUp) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fake_up.start(f"--port={port}")
        status, output = fake_up.end()

    assert status == 2
    assert output.strip() == (
        f"vllm-tetri: port {port} of 127.0.0.1 is in use; choose another with --port"
    )


def test_log_dir_gets_every_line(fake_up: FakeUp, tmp_path: Path) -> None:
    fake_up.start(f"--log-dir={tmp_path / 'logs'}")
    fake_up.ready()

    assert "Starting to load model" in (tmp_path / "logs" / "prefill-0.log").read_text()


needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two instances need two cores to choose"
)


def cores_of(fake_up: FakeUp, name: str) -> set[int]:
    return os.sched_getaffinity(fake_up.starts(name)[0]["pid"])


@needs_two_cores
def test_cores_are_shared_where_that_was_measured_to_be_better(fake_up: FakeUp) -> None:
    (fake_up.folder / "trial.shares").touch()
    process = fake_up.start()
    fake_up.ready()

    assert cores_of(fake_up, "prefill-0") == cores_of(fake_up, "decode-0")
    assert not any(map(is_alive, fake_up.trial_pids()))
    process.terminate()
    status, output = fake_up.end()
    assert status == 0
    assert "measuring how instances share cores ..." in output
    assert "cores: shared (measured)" in output


@needs_two_cores
def test_a_measurement_that_fails_stops_nobody(fake_up: FakeUp) -> None:
    (fake_up.folder / "trial.dies").touch()
    process = fake_up.start()
    fake_up.ready()

    assert not cores_of(fake_up, "prefill-0") & cores_of(fake_up, "decode-0")
    process.terminate()
    status, output = fake_up.end()
    assert status == 0
    assert "cores: split; measuring was not possible: no torch here" in output


@needs_two_cores
def test_interrupt_while_measuring_ends_everything(fake_up: FakeUp) -> None:
    (fake_up.folder / "trial.hangs").touch()
    process = fake_up.start()
    until(lambda: len(fake_up.trial_pids()) == 4, "the measurement runs")

    process.send_signal(signal.SIGINT)
    status, output = fake_up.end()

    assert status == 0, output
    assert "stopped" in output
    assert not fake_up.starts("prefill-0")
    fake_up.nothing_left()


@needs_two_cores
def test_killing_up_while_measuring_leaves_nothing(fake_up: FakeUp) -> None:
    (fake_up.folder / "trial.hangs").touch()
    process = fake_up.start()
    until(lambda: len(fake_up.trial_pids()) == 4, "the measurement runs")

    process.kill()
    process.wait()

    fake_up.nothing_left()


def test_a_placement_that_is_given_is_not_measured(fake_up: FakeUp) -> None:
    process = fake_up.start("--placement=shared", "--mode=adaptive", "--prefill=1", "--decode=1")
    fake_up.ready()
    words = fake_up.starts("router")[0]["argv"]

    assert words[words.index("--mode") + 1] == "adaptive"
    assert not fake_up.trial_pids()
    process.terminate()
    assert fake_up.end()[0] == 0
