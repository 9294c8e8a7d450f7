"""What the router and the instances know of all instances: reports of a period ago."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from vllm_tetri.policy.cluster import ClusterTable, TableMaker
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.overload import Late
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import ClusterView, InstanceId

MODEL = "model"


@dataclass(frozen=True)
class SimSnapshot:
    """A view of the cluster at a time; the same object until there is a newer one."""

    view: ClusterView
    at_s: float
    tables: TableMaker

    @cached_property
    def table(self) -> ClusterTable:
        """The view as policies read it."""
        return self.tables.make(self.view, self.at_s)


class SimRouter(Protocol):
    """What a mode decides. It may look at no request's `output_tokens`."""

    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route | Late:
        """Choose the instance of a new request, or refuse it with `Late`. The snapshot is at
        most a report period old."""

    def dispatch(
        self,
        prefill: InstanceId,
        snapshot: SimSnapshot,
        spec: RequestSpec,
        now: float,
        *,
        may_wait: bool,
    ) -> Dispatch | None:
        """Choose the decode instance of a split request, by the snapshot that its prefill instance
        has, which is up to two report periods old.

        Returns:
            The decode instance (`prefill` keeps the request); None to be asked again after the
            next chunk, if there is one (`may_wait`), and else to keep it too.
        """

    def ended(self, spec: RequestSpec, now: float) -> None:
        """A request that was not refused has its last token."""
