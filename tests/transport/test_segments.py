"""Arenas without an owner are found and removed, others are left alone; how large one may be."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

from vllm_tetri.transport.segments import ArenaSize, abandoned_segments, arena_bounds, arena_size


def test_only_the_unlocked_segment_is_removed(tmp_path: Path) -> None:
    owned, abandoned = (tmp_path / f"tetri-{digit * 32}" for digit in "ab")
    foreign = [tmp_path / name for name in ("other", "tetri-cluster.secret", f"tetri-{'c' * 33}")]
    for path in (owned, abandoned, *foreign):
        path.touch()
    with owned.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)

        assert abandoned_segments(tmp_path) == [abandoned]
        assert abandoned_segments(tmp_path, remove=True) == [abandoned]

    assert owned.exists()
    assert all(path.exists() for path in foreign)
    assert not abandoned.exists()


@pytest.mark.parametrize(
    ("prompt_blocks", "bounds", "size"),
    [
        (10, {"disk": 10_000, "memory": 20_000}, ArenaSize(2000)),  # two prompts
        (2, {"disk": 10_000, "memory": 20_000}, ArenaSize(500)),  # the least, in whole blocks
        (10, {"disk": 2000, "memory": 20_000}, ArenaSize(2000)),
        (10, {"disk": 10_000, "memory": 1999}, ArenaSize(1900, "memory")),
        (10, {"disk": 100, "memory": 1999}, ArenaSize(100, "disk")),
        (10, {"disk": 99, "memory": 1999}, ArenaSize(0, "disk")),
        (10, {"disk": 0, "memory": 0}, ArenaSize(0, "disk")),
    ],
)
def test_an_arena_holds_two_prompts_where_there_is_room(
    prompt_blocks: int, bounds: dict[str, int], size: ArenaSize
) -> None:
    assert arena_size(100, prompt_blocks, 555, bounds) == size


def test_an_arena_leaves_room_for_others(tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("max\n")
    shared, memory = arena_bounds(8000, tmp_path, limit).values()
    assert 0 < shared <= shutil.disk_usage(tmp_path).total // 4
    assert memory == 1000
    limit.write_text("4000\n")
    assert list(arena_bounds(8000, tmp_path, limit).values())[1] == 500
    assert list(arena_bounds(8000, tmp_path / "missing", limit).values()) == [0, 500]
