"""The request table of the global scheduler (paper section 3.2)."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_tetri.handover import prefix_of
from vllm_tetri.messages import Dispatched
from vllm_tetri.policy.lifecycle import ENDED, Event, Phase, advance
from vllm_tetri.types import InstanceId, RequestId, TransferId


@dataclass(slots=True)
class Entry:
    """One request. `predicted` is where the predicted bucket of its answer's length begins,
    in tokens. `generated` counts streamed events, an early first token included; `reason`
    says why it went where it is; times are monotonic seconds."""

    id: RequestId
    arrival_s: float
    sla: str
    phase: Phase = Phase.ARRIVED
    prefill: str = ""
    decode: str = ""
    router: str = ""  # whose request it is
    transfer: TransferId | None = None
    dispatched: set[InstanceId] = field(default_factory=set)
    prompt_tokens: int | None = None
    predicted: int | None = None
    generated: int = 0
    reason: str = ""
    first_byte_s: float | None = None
    on_opening: Callable[[Dispatched], None] | None = None  # told when the last chunk begins
    party: str = ""  # who asks

    def on(self, event: Event) -> None:
        """Move to the next phase.

        Raises:
            ValueError: The event cannot happen now.
        """
        self.phase = advance(self.phase, event)

    @property
    def is_over(self) -> bool:
        """Whether it finished, failed or was cancelled."""
        return self.phase in ENDED

    @property
    def worker(self) -> str:
        """The instance that has the request now; empty before it is sent."""
        return self.prefill if self.phase is Phase.PREFILLING else self.decode

    def may_reach(self, instance: InstanceId) -> bool:
        """Whether an instance has the request, or its KV and with it maybe the rest."""
        is_handed_over = self.phase in (Phase.PREFILLING, Phase.HANDING_OVER)
        return instance == self.worker or (is_handed_over and instance in self.dispatched)

    def plain(self, now: float) -> dict[str, Any]:
        """The entry as the outside sees it."""
        return {
            "id": self.id,
            "phase": self.phase,
            "age_s": round(now - self.arrival_s, 3),
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "predicted": self.predicted,
            "generated": self.generated,
            "reason": self.reason,
        }


class RequestTable:
    """Every request of one router that is in flight, by id."""

    def __init__(self, router: str = "") -> None:
        self._router = router
        self._entries: dict[RequestId, Entry] = {}
        self._parties: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, wanted_id: str, *, now: float, sla: str, party: str = "") -> Entry:
        """Begin a request; it gets the id it wants unless that is taken or empty."""
        request = RequestId(wanted_id)
        if not request or request in self._entries:
            request = RequestId(uuid.uuid4().hex)
        entry = Entry(request, now, sla, router=self._router, party=party)
        self._entries[request] = entry
        self._parties[party] += 1
        return entry

    def leave(self, entry: Entry) -> None:
        """Forget a request. Idempotent."""
        if self._entries.pop(entry.id, None) is not None:
            self._parties[entry.party] -= 1

    def num_of(self, party: str) -> int:
        """How many requests of one client are in flight."""
        return self._parties[party]

    def workers(self, party: str | None = None) -> Counter[str]:
        """How many requests every instance has, of all or of one client."""
        return Counter(
            entry.worker
            for entry in self._entries.values()
            if party is None or entry.party == party
        )

    def parties_at(self, instance: InstanceId) -> Counter[str]:
        """How many requests an instance has of every client."""
        return Counter(entry.party for entry in self._entries.values() if entry.worker == instance)

    def num_reaching(self, instance: InstanceId) -> int:
        """How many requests an instance has or may still get the rest of."""
        return sum(entry.may_reach(instance) for entry in self._entries.values())

    def handed_over_by(self, prefill: InstanceId) -> list[tuple[InstanceId, TransferId]]:
        """Who is to go on with a prompt of an instance, and by which transfer; whether its
        KV has arrived is not known here."""
        return [
            (InstanceId(entry.decode), entry.transfer)
            for entry in self._entries.values()
            if entry.prefill == prefill
            and entry.transfer is not None
            and entry.decode not in ("", prefill)
            and entry.phase is not Phase.PREFILLING
        ]

    def note_dispatch(self, message: Dispatched) -> bool:
        """The prefill instance named a decode instance. False when nobody waits for that
        transfer here any more; those of other routers are not ours to judge."""
        entry = self._entries.get(message.request)
        if entry is None or entry.transfer != message.transfer:
            return not message.transfer.startswith(prefix_of(self._router))
        entry.decode = message.decode
        entry.dispatched.add(message.decode)
        if message.predicted is not None:
            entry.predicted = message.predicted.lower_tokens
        if message.opening is not None and entry.on_opening is not None:
            entry.on_opening(message)
        return True

    def plain(self, now: float) -> dict[str, Any]:
        """The whole table as the outside sees it."""
        requests = [entry.plain(now) for entry in self._entries.values()]
        return {"in_flight": len(requests), "requests": requests}
