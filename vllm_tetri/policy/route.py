"""Pick where a request goes first: the global scheduler's decision (paper section 3.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from vllm_tetri.types import ClusterView, InstanceId, InstanceState, InstanceView, Role

_LAST_RESORT = {Role.BOTH: 0, Role.DECODE: 1, Role.PREFILL: 2}


@dataclass(frozen=True, slots=True)
class Split:
    """`prefill` computes the prompt and names the decode instance itself: one of that role,
    or with `anywhere` any, itself included."""

    prefill: InstanceId
    reason: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """`instance` does everything."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class Full:
    """All `instances` that the request could go to have no room for it; `who` they are."""

    instances: tuple[InstanceId, ...]
    who: str


Route = Split | Whole


def choose_route(
    view: ClusterView,
    *,
    model: str,
    splittable: bool,
    own_tokens: Mapping[InstanceId, int],
    excluded: Collection[InstanceId] = (),
    full: Collection[InstanceId] = (),
    crowded: Collection[InstanceId] = (),
) -> Route | Full | None:
    """Least-loaded prefill instance if the request can be split, else one instance.

    An instance that is full still counts as there: overload never sends a request
    to instances of another kind, where it would disturb what they do.

    Args:
        view: The newest picture of the cluster.
        model: Name that the instance must serve.
        splittable: Whether two instances may share this request.
        own_tokens: Prompt tokens sent to an instance that its report does not show yet.
        excluded: Instances that already failed this request.
        full: Instances that just had no room for it.
        crowded: Instances that have as many requests in flight as they may.

    Returns:
        The choice; `Full` when there is nobody but full ones to choose from; None
        when no ready instance serves the model.
    """
    ready = _ready(view, model, excluded)
    if not ready:
        return None

    def tokens(each: InstanceView) -> int:
        return each.load.queued_prefill_tokens + own_tokens.get(each.info.id, 0)

    taken = {*full, *crowded}
    prefills = _prefills(ready) if splittable else []
    if prefills:
        able = [each for each in prefills if each.info.id not in taken]
        if not able:
            return Full(_ids(prefills), "prefill instances")
        if crowded:
            decodes = [each for each in ready if each.info.role is not Role.PREFILL]
            if all(each.info.id in crowded for each in decodes):
                return Full(_ids(decodes), "decode instances")
        best = min(able, key=lambda each: (tokens(each), _split_tie(each)))
        return _split(best, tokens(best), len(able))
    able = _last_resorts(ready)
    roomy = [each for each in able if each.info.id not in taken]
    if not roomy:
        return Full(_ids(able), "instances that could serve it whole")
    best = min(roomy, key=lambda each: (tokens(each), _whole_tie(each)))
    return _whole(best, tokens(best), splittable)


class Shortlist:
    """What `choose_route` says of one request after the other on the same view, in time that
    does not grow with the instances. For requests of one kind, while nobody is excluded, full
    or crowded. Owner: one thread.

    Args:
        view, model, splittable, own_tokens: As for `choose_route`.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        model: str,
        splittable: bool,
        own_tokens: Mapping[InstanceId, int],
    ) -> None:
        ready = _ready(view, model, ())
        prefills = _prefills(ready) if splittable else []
        self._is_split, self._splittable = bool(prefills), splittable
        self._able = prefills or _last_resorts(ready)
        self._places = {each.info.id: place for place, each in enumerate(self._able)}
        self._tokens = [
            each.load.queued_prefill_tokens + own_tokens.get(each.info.id, 0) for each in self._able
        ]
        tie = _split_tie if prefills else _whole_tie
        # The least comes first. Tokens only grow, so what is noted too low is put right when
        # it gets there.
        self._order = [
            (tokens, tie(each), place)
            for place, (tokens, each) in enumerate(zip(self._tokens, self._able, strict=True))
        ]
        heapify(self._order)

    def choose(self) -> Route | None:
        """Where the next request goes; None when no ready instance serves the model."""
        if not self._order:
            return None
        while (least := self._order[0])[0] < (tokens := self._tokens[least[2]]):
            heapreplace(self._order, (tokens, *least[1:]))
        best = self._able[least[2]]
        if self._is_split:
            return _split(best, tokens, len(self._able))
        return _whole(best, tokens, self._splittable)

    def sent(self, instance: InstanceId, num_tokens: int) -> None:
        """A prompt went to an instance."""
        place = self._places.get(instance)
        if place is not None:
            self._tokens[place] += num_tokens


def choose_keeper(
    view: ClusterView, *, model: str, excluded: Collection[InstanceId] = ()
) -> InstanceId | None:
    """The instance that keeps what clients may ask for again (vLLM's stored responses).

    Whoever asks gets the same one while it is ready, without anything to remember, and
    so from every router.

    Returns:
        None when no ready instance serves the model.
    """
    ready = [
        (_LAST_RESORT[each.info.role], each.info.id)
        for each in view.instances
        if each.state in (InstanceState.READY, InstanceState.FLIPPING)
        and model in each.info.models
        and each.info.id not in excluded
    ]
    return min(ready)[1] if ready else None


def _ready(view: ClusterView, model: str, excluded: Collection[InstanceId]) -> list[InstanceView]:
    return [
        each
        for each in view.instances
        if each.state is InstanceState.READY
        and model in each.info.models
        and each.info.id not in excluded
    ]


def _last_resorts(ready: list[InstanceView]) -> list[InstanceView]:
    """Those that serve a request whole."""
    first = min((_LAST_RESORT[each.info.role] for each in ready), default=0)
    return [each for each in ready if _LAST_RESORT[each.info.role] == first]


def _split_tie(each: InstanceView) -> int:
    return each.info.role is Role.BOTH


def _whole_tie(each: InstanceView) -> int:
    return each.load.running + each.load.waiting


def _split(best: InstanceView, tokens: int, num_able: int) -> Split:
    return Split(best.info.id, f"least of {num_able}: {tokens} tokens queued")


def _whole(best: InstanceView, tokens: int, splittable: bool) -> Whole:
    why = "no pair to split over" if splittable else "not split"
    return Whole(best.info.id, f"{why}: {best.info.role} with {tokens} tokens queued")


def _ids(instances: list[InstanceView]) -> tuple[InstanceId, ...]:
    return tuple(each.info.id for each in instances)


def _prefills(ready: list[InstanceView]) -> list[InstanceView]:
    """Those that can hand over to another one. A cluster has few identities, mostly one."""
    takers: list[tuple[dict[str, str], list[InstanceId]]] = []
    for each in ready:
        if each.info.role is not Role.PREFILL:
            ids = next((ids for key, ids in takers if key == each.info.identity), None)
            if ids is None:
                takers.append((each.info.identity, [each.info.id]))
            else:
                ids.append(each.info.id)
    return [
        each
        for each in ready
        if each.info.role is not Role.DECODE
        and any(
            identity == each.info.identity and (len(ids) > 1 or ids[0] != each.info.id)
            for identity, ids in takers
        )
    ]


class Submissions:
    """Prompt tokens sent to instances since their last report.

    A submission also counts for `grace_s` after it was sent even if a report
    came since, because the engine sees a request only some time after its bytes.
    """

    def __init__(self, grace_s: float = 0.05) -> None:
        self._grace_s = grace_s
        self._sent: dict[InstanceId, deque[tuple[float, int]]] = {}

    def add(self, instance: InstanceId, num_tokens: int, now: float) -> None:
        """Note a submission at time `now`; calls come in order of time."""
        self._sent.setdefault(instance, deque(maxlen=4096)).append((now, num_tokens))

    def unreported(self, view: ClusterView, now: float) -> dict[InstanceId, int]:
        """Tokens per instance that its load in `view` cannot show yet."""
        ages = {each.info.id: each.age_s for each in view.instances}
        for instance in list(self._sent):
            reported_s = now - ages.get(instance, 0.0) - self._grace_s
            sent = self._sent[instance]
            while sent and sent[0][0] < reported_s:
                sent.popleft()
            if not sent:
                del self._sent[instance]
        return {
            instance: sum(num_tokens for _, num_tokens in sent)
            for instance, sent in self._sent.items()
        }
