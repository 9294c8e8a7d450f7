"""Example of an own dispatch policy: of all decode instances take the one with most free KV.

Start prefill instances with `--tetri-dispatch-policy own_policy:most_free_blocks` and this folder
on PYTHONPATH, or compare it without a GPU:
`vllm-tetri sim --dispatch-policy own_policy:most_free_blocks`.
"""

from __future__ import annotations

from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.dispatch import DecodeCandidates


def most_free_blocks(candidates: DecodeCandidates, need: Need) -> InstanceRow | None:
    """Choose the candidate that has most KV blocks left; None if none has capacity."""

    def free_blocks(row: InstanceRow) -> int:
        return row.free_blocks

    return max(candidates.with_capacity(), key=free_blocks, default=None)
