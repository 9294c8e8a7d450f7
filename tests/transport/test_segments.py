"""Arenas without an owner are found and removed, others are left alone."""

from __future__ import annotations

import fcntl
from pathlib import Path

from vllm_tetri.transport.segments import abandoned_segments, sweep_segments


def test_only_the_unlocked_segment_is_removed(tmp_path: Path) -> None:
    owned, abandoned, foreign = (tmp_path / name for name in ("tetri-a", "tetri-b", "other"))
    for path in (owned, abandoned, foreign):
        path.touch()
    with owned.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)

        assert abandoned_segments(tmp_path) == [abandoned]
        assert sweep_segments(tmp_path) == [abandoned]

    assert owned.exists()
    assert foreign.exists()
    assert not abandoned.exists()
