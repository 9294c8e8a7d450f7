"""HTTP from the router to the instances: what may go wrong, and what that means."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary, WeakSet

from vllm_tetri.router.answers import ERROR_EVENT, LegBusy, LegFailed, is_busy, is_busy_event
from vllm_tetri.router.wire import Answer, Unreachable, WireError, Wires
from vllm_tetri.types import InstanceId, InstanceInfo

_TROUBLE_S = 5.0
_MAX_ERROR_BYTES = 4096
_AT_ONCE = 0.0
# Longest wait for an instance that failed a request to say that it is well.
_ALIVE_S = 1.0
_MANY_NAMES = 2048  # twice as many as there may be at a time
_AUTHORIZATION = "authorization"


Movable = Callable[[], bool]


def _never() -> bool:
    return False


class Upstream:
    """Connections to all instances. Build it on a running event loop and close it there.

    Args:
        first_byte_s: Longest wait for an instance's next byte, in seconds.
        authorization: Header for instances; empty for none, None for the client's own.
    """

    def __init__(self, first_byte_s: float, authorization: str | None = None) -> None:
        self._first_byte_s = first_byte_s
        self._authorization = authorization
        self._wires = Wires(first_byte_s)
        # And whether another instance can take their place by now.
        self._waiting: defaultdict[InstanceId, WeakKeyDictionary[asyncio.Timeout, Movable]]
        self._waiting = defaultdict(WeakKeyDictionary)
        self._answers: defaultdict[InstanceId, WeakSet[Answer]] = defaultdict(WeakSet)
        self._hung_up: dict[InstanceId, str] = {}  # why
        self._checks: dict[str, asyncio.Task[bool]] = {}

    async def post(
        self,
        instance: InstanceInfo,
        path: str,
        body: bytes,
        headers: dict[str, str],
        is_movable: Movable = _never,
    ) -> Answer:
        """Send a leg and wait for the head of its answer.

        Args:
            is_movable: Whether another instance can take this one's place by now.

        Raises:
            LegFailed: No answer, or one that says that the instance is in trouble.
            LegBusy: The instance has no room; it has not taken the request.
        """
        answer = await self.send(instance, "POST", path, body, headers, is_movable)
        if answer.status >= 500:
            raise await _trouble(instance, answer)
        return answer

    async def send(
        self,
        instance: InstanceInfo,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        is_movable: Movable = _never,
    ) -> Answer:
        """Send anything and wait for the head of the answer, whatever it says.

        The caller closes the answer.

        Raises:
            LegFailed: No answer.
        """
        headers = self._authorized(headers)
        limit = asyncio.timeout(self._first_byte_s)
        self._waiting[instance.id][limit] = is_movable
        try:
            async with limit:
                answer = await self._wires.send(instance.url, method, path, body, headers)
        except TimeoutError as error:
            if limit.when() == _AT_ONCE:
                raise LegFailed(instance.id, self._hung_up[instance.id], status=503) from error
            raise self._late(instance) from error
        except Unreachable as error:
            raise LegFailed(instance.id, str(error), status=503, had_it=False) from error
        except WireError as error:
            raise LegFailed(instance.id, f"connection lost: {error}") from error
        finally:
            self._waiting[instance.id].pop(limit, None)
            if len(self._answers) > _MANY_NAMES:
                self._forget()
        self._answers[instance.id].add(answer)
        return answer

    def hang_up(self, instance: InstanceId, why: str, *, quiet_s: float = 0.0) -> int:
        """Wait no longer for anything of an instance, but for what was heard of in the
        last `quiet_s` seconds; returns for how many answers.

        One that left before it had finished needs it, too: its server ends only when
        nobody is connected any more.
        """
        num_waiting = self._end_waiting(instance, why, lambda _: True)
        return num_waiting + self._close(self._quiet(instance, quiet_s), why)

    def move_away(self, instance: InstanceId, why: str, *, quiet_s: float) -> int:
        """The same, but only for streams that another instance can continue."""
        num_waiting = self._end_waiting(instance, why, lambda is_movable: is_movable())
        movable = [each for each in self._quiet(instance, quiet_s) if each.is_movable]
        return num_waiting + self._close(movable, why)

    def _end_waiting(self, instance: InstanceId, why: str, ends: Callable[[Movable], bool]) -> int:
        self._hung_up[instance] = why
        waiting = list(self._waiting.get(instance, {}).items())
        limits = [each for each, movable in waiting if not each.expired() and ends(movable)]
        for limit in limits:
            limit.reschedule(_AT_ONCE)
        return len(limits)

    def _quiet(self, instance: InstanceId, quiet_s: float) -> list[Answer]:
        since_s = asyncio.get_running_loop().time() - quiet_s
        return [each for each in self._answers.get(instance, ()) if each.is_quiet(since_s)]

    def _close(self, answers: list[Answer], why: str) -> int:
        for answer in answers:
            answer.close(why)
        return len(answers)

    def _forget(self) -> None:
        """Names of instances that nothing is known of any more."""
        for name in [name for name, answers in self._answers.items() if not answers]:
            if not self._waiting.get(name):
                self._waiting.pop(name, None)
                self._hung_up.pop(name, None)
                del self._answers[name]

    async def first_chunk(self, instance: InstanceInfo, answer: Answer) -> bytes:
        """The first bytes of a streamed answer; empty when it ends at once.

        Raises:
            LegFailed: The stream broke or stays silent for too long.
            LegBusy: All it says is that the instance has no room.
        """
        try:
            async with asyncio.timeout(self._first_byte_s):
                chunk = await answer.read_some()
                while chunk.startswith(b":") and chunk.count(b"\n\n") == 1:
                    chunk = await answer.read_some()  # it only keeps alive
        except TimeoutError as error:
            raise self._late(instance) from error
        except WireError as error:
            raise LegFailed(instance.id, f"connection lost: {error}") from error
        if is_busy_event(chunk):
            raise LegBusy(instance.id)
        if chunk.startswith(ERROR_EVENT) and not await self.is_alive(instance):
            raise LegFailed(instance.id, "its engine died")
        return chunk

    async def body(self, instance: InstanceInfo, answer: Answer) -> bytes:
        """All bytes of an answer.

        Raises:
            LegFailed: The answer broke off.
        """
        try:
            return await answer.read()
        except WireError as error:
            raise LegFailed(instance.id, f"answer broke off: {error}") from error

    async def is_alive(self, instance: InstanceInfo) -> bool:
        """Whether an instance that failed a request is well; asked once for all of them."""
        check = self._checks.get(instance.url)
        if check is None:
            check = asyncio.ensure_future(self.is_healthy(instance.url, _ALIVE_S))
            self._checks[instance.url] = check
            check.add_done_callback(lambda _: self._checks.pop(instance.url, None))
        return await asyncio.shield(check)

    async def is_reachable(self, instance: InstanceInfo) -> bool:
        """Whether its host answers, whatever its processes do."""
        return await self._wires.reaches(instance.url, _ALIVE_S)

    async def is_healthy(self, url: str, timeout_s: float) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._wires.send(url, "GET", "/health", b"", {})
        except (WireError, TimeoutError):
            return False
        answer.close()
        return answer.status == 200

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for check in list(self._checks.values()):
            check.cancel()
        self._wires.close()

    def _authorized(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._authorization is None:
            return headers
        kept = {name: value for name, value in headers.items() if name.lower() != _AUTHORIZATION}
        return {**kept, _AUTHORIZATION: self._authorization} if self._authorization else kept

    def _late(self, instance: InstanceInfo) -> LegFailed:
        reason = f"no answer within {self._first_byte_s:g} s"
        return LegFailed(instance.id, reason, status=504, is_final=True)


async def _trouble(instance: InstanceInfo, answer: Answer) -> LegFailed | LegBusy:
    text = bytearray()
    try:
        async with asyncio.timeout(_TROUBLE_S):
            while len(text) < _MAX_ERROR_BYTES and (chunk := await answer.read_some()):
                text += chunk
    except (WireError, TimeoutError):
        pass
    finally:
        answer.close()
    if is_busy(answer.status, bytes(text)):
        return LegBusy(instance.id)
    status = 503 if answer.status == 503 else 502
    words = text[:_MAX_ERROR_BYTES].decode(errors="replace")
    return LegFailed(instance.id, f"HTTP {answer.status} {words}".strip(), status=status)
