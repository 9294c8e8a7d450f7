"""The lease that says which of several routers decides on roles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.fakes import until
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.flips import FileLease

HOLD = """
import sys, time
from vllm_tetri.router.flips import FileLease
lease = FileLease(sys.argv[1])
print(lease.hold(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return str(tmp_path / "lease")


def test_one_holds_it_until_it_is_closed(path: str) -> None:
    first, second = FileLease(path), FileLease(path)
    epoch = first.hold()
    assert epoch is not None
    assert [first.hold(), second.hold(), first.hold()] == [epoch, None, epoch]
    first.release()
    first.release()
    later = second.hold()
    assert later is not None
    assert later > epoch
    assert second.hold() == later
    second.release()


def test_it_comes_free_when_its_holder_is_killed(path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as holder:
        assert holder.stdout is not None
        epoch = int(holder.stdout.readline())
        lease = FileLease(path)
        assert lease.hold() is None
        holder.kill()
        holder.wait()
    later = until(lease.hold, "the lease came free")
    assert later > epoch
    lease.release()


@pytest.mark.parametrize("damage", ["removed", "replaced", "overwritten"])
def test_a_file_that_changes_makes_no_two_holders(path: str, damage: str) -> None:
    first, second = FileLease(path), FileLease(path)
    epoch = first.hold()
    assert epoch is not None
    if damage == "removed":
        Path(path).unlink()
    elif damage == "replaced":
        other = Path(path + ".new")
        other.write_text("7")
        other.replace(path)
    else:
        Path(path).write_text("not a number")
    taken = [second.hold(), first.hold()]
    assert sum(each is not None for each in taken) == 1
    if damage != "overwritten":
        assert taken[0] is not None
        assert taken[0] >= epoch  # by the clock, as the number is lost
    first.release()
    second.release()


def test_a_folder_that_others_may_write_to_is_refused(path: str) -> None:
    folder = Path(path).parent
    for mode in (0o770, 0o707, 0o1777):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match="mkdir -m 700"):
            FileLease(path)
    folder.chmod(0o755)  # others may look
    FileLease(path).release()
    with pytest.raises(ConfigError, match="--flip-lease"):
        FileLease(path + "/no/folder")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_lease_that_is_not_a_file_is_refused(path: str, tmp_path: Path, is_link: bool) -> None:
    Path(path).symlink_to(tmp_path) if is_link else Path(path).mkdir()
    with pytest.raises(ConfigError, match="--flip-lease"):
        FileLease(path)
