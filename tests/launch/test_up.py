"""`vllm-tetri up` as its user sees it, with fake instances."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.fakes import FakeUp, is_alive, until
from vllm_tetri.security import read_secret, write_secret


def test_children_get_what_they_need_and_the_ready_file_names_them(
    fake_up: FakeUp, tmp_path: Path
) -> None:
    content = fake_up.ready(
        "--prefill=2", "--placement=shared-cores", f"--log-dir={tmp_path / 'logs'}",
        "--", "--max-model-len", "512",
    )  # fmt: skip
    assert [row["id"] for row in content["instances"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert content["model"] == "fake-model"
    assert len({row["url"] for row in content["instances"]} | {content["url"]}) == 4
    words = fake_up.starts("prefill-0")[0]["argv"]
    assert words[:4] == ["serve", "some/model", "--max-model-len", "512"]
    assert words[words.index("--role") + 1] == "prefill"
    assert words[words.index("--tetri-control") + 1] == content["control"]
    assert "Starting to load model" in (tmp_path / "logs" / "prefill-0.log").read_text()
    path = content["secret_file"]
    assert read_secret(path) is not None
    for name in ("prefill-0", "decode-0", "router"):
        (start,) = fake_up.starts(name)
        assert start["safe_path"]  # nothing is imported from the current directory
        assert start["secret_file"] == path
        assert not any("secret" in word for word in start["argv"])
    fake_up.end(signal.SIGKILL)
    assert not Path(path).exists()
    fake_up.nothing_left()


@pytest.mark.parametrize(("interrupts", "status"), [(0, 0), (2, 130)], ids=["grace", "interrupts"])
def test_a_stubborn_instance_is_killed(fake_up: FakeUp, interrupts: int, status: int) -> None:
    (fake_up.folder / "decode-0.stubborn").touch()
    process = fake_up.start()
    fake_up.ready()
    if interrupts:
        process.send_signal(signal.SIGINT)
        until(lambda: not is_alive(fake_up.starts("prefill-0")[0]["pid"]), "the polite one ended")
    assert fake_up.end(signal.SIGINT if interrupts else signal.SIGTERM)[0] == status
    fake_up.nothing_left()


@pytest.mark.parametrize("status", [0, 130])
def test_sigterm_lets_requests_end_before_instances_do(fake_up: FakeUp, status: int) -> None:
    busy = fake_up.folder / "router.busy"
    busy.touch()
    process = fake_up.start()
    fake_up.ready()
    process.send_signal(signal.SIGTERM)
    until((fake_up.folder / "router.told").exists, "the router was told")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert all(map(is_alive, fake_up.pids()))
    if status:
        process.send_signal(signal.SIGINT)
    else:
        busy.unlink()
    assert fake_up.end()[0] == status
    fake_up.nothing_left()


@pytest.mark.parametrize(
    ("exit_status", "num_starts", "words"),
    [
        ("1", 3, "decode-0 ended 3 times before it was ready"),
        ("2", 1, "decode-0 refused its options"),
    ],
)
def test_an_instance_that_never_gets_ready_is_given_up_with_its_last_words(
    fake_up: FakeUp, exit_status: str, num_starts: int, words: str
) -> None:
    (fake_up.folder / "decode-0.dies").write_text(exit_status)
    fake_up.start()
    status, output = fake_up.end()
    assert (status, len(fake_up.starts("decode-0"))) == (1, num_starts)
    assert words in output
    assert "no such model" in output
    fake_up.nothing_left()


def test_several_routers_are_kept_and_share_a_lease_that_no_file_keeps(fake_up: FakeUp) -> None:
    content = fake_up.ready("--routers=2")
    assert [row["id"] for row in content["routers"]] == ["router-0", "router-1"]
    assert content["url"] == content["routers"][0]["url"] != content["routers"][1]["url"]
    first, second = [start["argv"] for start in fake_up.starts("router")]
    lease = first[first.index("--flip-lease") + 1]
    assert lease == second[second.index("--flip-lease") + 1]
    assert Path(lease).exists()
    fake_up.end(signal.SIGKILL)
    assert not Path(lease).exists()
    fake_up.nothing_left()


def test_a_secret_that_others_may_read_is_refused(fake_up: FakeUp) -> None:
    path = fake_up.folder / "secret"
    write_secret(path)
    path.chmod(0o644)
    fake_up.start(f"--secret-file={path}")
    status, output = fake_up.end()
    assert (status, output.count("\n")) == (2, 1)
    assert "chmod 600" in output


def test_termination_before_ready_ends_everything(fake_up: FakeUp) -> None:
    fake_up.start()
    until(lambda: fake_up.starts("prefill-0"), "an instance was started")
    assert fake_up.end(signal.SIGTERM)[0] == 0
    fake_up.nothing_left()


@pytest.mark.parametrize(
    ("name", "was_drained"), [("decode-0", False), ("decode-0", True), ("router", False)]
)
def test_dead_child_is_restarted_and_its_tree_removed(
    fake_up: FakeUp, name: str, was_drained: bool
) -> None:
    fake_up.ready()
    if was_drained:  # a crash is a crash
        (fake_up.folder / f"{name}.departed").touch()
    below = [int(path.read_text()) for path in fake_up.folder.glob(f"{name}.below")]
    os.kill(fake_up.starts(name)[0]["pid"], signal.SIGKILL)
    until(lambda: len(fake_up.starts(name)) == 2, "it was started again")
    until(lambda: not any(map(is_alive, below)), "what it had started is gone")


def test_a_child_that_cannot_be_started_now_is_tried_again(fake_up: FakeUp) -> None:
    fake_up.ready()
    (fake_up.folder / "decode-0.refused").touch()
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGKILL)
    until(lambda: len(fake_up.starts("decode-0")) == 2, "it was started again")
    assert "decode-0: [Errno 11]" in fake_up.interrupt()


def test_the_ready_file_of_a_cluster_that_was_killed_is_not_believed(fake_up: FakeUp) -> None:
    fake_up.ready_file.write_text("of another cluster")
    fake_up.start()
    until(lambda: fake_up.starts("decode-0"), "it starts")
    assert not fake_up.ready_file.exists() or json.loads(fake_up.ready_file.read_text())
    fake_up.interrupt()


def test_a_drained_instance_is_not_started_again(fake_up: FakeUp) -> None:
    fake_up.ready("--decode=2")
    below = int((fake_up.folder / "decode-1.below").read_text())
    (fake_up.folder / "decode-1.departed").touch()
    os.kill(fake_up.starts("decode-1")[0]["pid"], signal.SIGUSR1)
    until(lambda: not is_alive(below), "what it had started is gone")
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGUSR1)  # ended all by itself
    until(lambda: len(fake_up.starts("decode-0")) == 2, "the other one was started again")
    output = fake_up.interrupt()
    assert not fake_up.ready_file.exists()
    assert len(fake_up.starts("decode-1")) == 1
    assert "ready in" in output
    assert "decode-1: drained" in output
    assert "decode-1: ended" not in output
    assert "decode-0: ended (exit status 0)" in output


def test_a_server_of_which_one_rank_was_drained_is_started_again(fake_up: FakeUp) -> None:
    fake_up.ready()
    (fake_up.folder / "decode-0-dp0.departed").touch()
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGUSR1)
    until(lambda: len(fake_up.starts("decode-0")) == 2, "it was started again")


@pytest.mark.parametrize(("placement", "is_shared"), [("own-cores", False), ("shared-cores", True)])
def test_instances_have_own_cores_or_share_all(
    fake_up: FakeUp, placement: str, is_shared: bool
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two instances with cores of their own need two cores")
    fake_up.ready(f"--placement={placement}")
    prefill, decode = (
        os.sched_getaffinity(fake_up.starts(name)[0]["pid"]) for name in ("prefill-0", "decode-0")
    )
    assert (prefill == decode) is is_shared
    assert is_shared or not prefill & decode


def ask(up: FakeUp, drained: str | None = None) -> None:
    """Let the router ask for a prefill instance more, or less, behind another model's."""
    path, usual = up.folder / "asked", {"role": "prefill", "reason": "so is the load"}
    other = {**usual, "model": "another", "drained": "by-hand"}
    path.write_text(json.dumps([other, {**usual, "model": "fake-model", "drained": drained}]))
    path.rename(up.folder / "change")


def test_instances_between_bounds_start_and_drain_as_the_watcher_asks(fake_up: FakeUp) -> None:
    content = fake_up.ready("--prefill=1:2", "--decode=1")
    assert [row["id"] for row in content["instances"]] == ["prefill-0", "decode-0"]
    words = fake_up.starts("router")[0]["argv"]
    assert words[words.index("--prefill") + 1] == "1:2"
    assert words[words.index("--decode") + 1] == "1"
    (fake_up.folder / "by-hand.starts").touch()  # an instance that joined this cluster
    ask(fake_up)
    until(lambda: fake_up.starts("prefill-1"), "one more was started")
    (fake_up.folder / "change").unlink()
    below = fake_up.folder / "prefill-1.below"
    until(below.exists, "all of it runs")
    ask(fake_up, drained="prefill-1")
    until(lambda: not is_alive(int(below.read_text())), "it was drained")
    ask(fake_up)
    until(lambda: len(fake_up.starts("prefill-1")) == 2, "it was started when asked for again")
    output = fake_up.interrupt()
    assert "prefill-1: starts: so is the load" in output
    assert "prefill-1: drained" in output
    assert len(fake_up.starts("prefill-0")) == len(fake_up.starts("decode-0")) == 1
    assert not (fake_up.folder / "by-hand.departed").exists()  # another model's is left alone


def test_an_instance_that_cannot_be_started_again_holds_up_no_other(fake_up: FakeUp) -> None:
    fake_up.ready("--prefill=1:2")
    (fake_up.folder / "prefill-0.dies").write_text("2")
    (fake_up.folder / "prefill-0.forgotten").touch()  # as after a minute
    os.kill(fake_up.starts("prefill-0")[0]["pid"], signal.SIGKILL)
    until(lambda: len(fake_up.starts("prefill-0")) >= 2, "it was tried again")
    ask(fake_up)
    until(lambda: fake_up.starts("prefill-1"), "the spare one was started")
    fake_up.interrupt()


def test_a_cluster_does_without_an_instance_more_that_cannot_be_started(fake_up: FakeUp) -> None:
    (fake_up.folder / "prefill-1.dies").write_text("2")
    fake_up.ready("--prefill=1:2")
    ask(fake_up)
    until(lambda: fake_up.starts("prefill-1"), "one more was started")
    (fake_up.folder / "change").unlink()
    os.kill(fake_up.starts("decode-0")[0]["pid"], signal.SIGKILL)
    until(lambda: len(fake_up.starts("decode-0")) == 2, "the others are kept")
    output = fake_up.interrupt()
    assert "prefill-1 refused its options" in output
    assert "not tried again for 60 s" in output
    assert len(fake_up.starts("prefill-1")) == 1


def test_a_second_one_that_cannot_start_leaves_the_firsts_ready_file(fake_up: FakeUp) -> None:
    fake_up.ready_file.write_text("of the first")
    fake_up.start("--host=203.0.113.7", "--port=8000")
    assert fake_up.end()[0] == 2
    assert fake_up.ready_file.read_text() == "of the first"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--prefill=1:2", "--mode=adaptive"), "needs --mode split and --flip balance"),
        (("--prefill=1:2", "--flip=off"), "needs --mode split and --flip balance"),
        (("--prefill=2:1",), "neither N nor MIN:MAX"),
        (("--prefill=1:2", "--", "-dp=2"), "give one number of instances"),
        (("--host=203.0.113.7", "--port=8000"), "203.0.113.7: that is no address"),
        (("--cpus-each=2",), "--cpus-each needs --on ray"),
        (("--on=ray", "--placement=own-cores"), "--placement needs --on local"),
        (("--on=ray", "--instance-port-base=9000"), "--instance-port-base needs --on local"),
    ],
)
def test_what_cannot_be_is_one_error(fake_up: FakeUp, words: tuple[str, ...], says: str) -> None:
    fake_up.start(*words)
    status, output = fake_up.end()
    assert status == 2
    assert says in output
    assert not fake_up.pids()
