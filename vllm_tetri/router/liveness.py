"""Which instances live: probes of new ones, and the end of requests to those that fall silent."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import inf

import msgspec

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import INSTANCE_PATH
from vllm_tetri.messages import TransferLost
from vllm_tetri.policy.route import apart
from vllm_tetri.router.errors import JSON_ERRORS, Unreachable
from vllm_tetri.router.request import parts_of
from vllm_tetri.router.table import RequestTable
from vllm_tetri.router.upstream import Upstream, shared
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceState, is_loopback, server_name

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_LONG_S = 120.0  # after which an instance that does not answer is worth a line
_TIMEOUT_S = 5.0
IDLE_S = 10.0  # that an engine may have nothing to do while its server has requests
_CHECKS = 24  # liveness checks per `after_s`
# Missed checks after which resumable streams move to another instance.
_MIGRATION_CHECKS = _CHECKS // 2
_GOODBYE_S = 0.3  # by then the message of an instance that ended in good order has arrived
_REACH_S = 1.0
_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})

_APART_ADVICE = (
    "; give instances that shall share them the same checkpoint and options, others another "
    "--served-model-name"
)

_log = logging.getLogger(__name__)


async def repeat(
    what: str,
    look: Callable[[], None],
    period_s: float,
    *,
    is_on: bool = True,
    due: asyncio.Event | None = None,
) -> None:
    """Look at something each period, and at once when that is `due`. A look that fails changes
    nothing, and the next one comes."""
    due = due or asyncio.Event()
    while is_on:
        with suppress(TimeoutError):
            await asyncio.wait_for(due.wait(), period_s)
        due.clear()
        try:
            look()
        except Exception:
            _log.exception("a %s failed; the next one is in %g s", what, period_s)


class _Named(msgspec.Struct):
    id: str = ""


class Liveness:
    """Probes new instances until their HTTP servers respond, and fails the requests of
    instances that stop reporting. Owned by the event loop.

    After `after_s` seconds without a report all requests of an instance fail; after half of
    it resumable streams move, which costs one prefill each, and decode instances are told that its
    KV may be lost. Time is counted in checks, so that a router that was stopped itself fails no
    requests. It also says once which instances exchange no KV. A new instance is welcomed before
    it is used.
    """

    def __init__(
        self,
        monitor: Monitor,
        upstream: Upstream,
        table: RequestTable,
        welcome: Callable[[InstanceInfo], Coroutine[None, None, None]],
        *,
        after_s: float,
    ) -> None:
        self._monitor, self._upstream, self._table = monitor, upstream, table
        self._after_s, self._welcome = after_s, welcome
        self._roster, self._apart = 0, dict[InstanceId, str]()  # as compared last
        self._local = set[InstanceId]()  # as warned of last
        # Process and sequence number of the last report, and checks since then.
        self._reports: dict[InstanceId, tuple[tuple[int, int], int]] = {}
        # Tokens that an instance has computed, and since when that number stands.
        self._progress: dict[InstanceId, tuple[int, float]] = {}
        self._idle: dict[InstanceId, float] = {}  # since when its engine has none of its requests
        self._probes: dict[tuple[str, int, str], asyncio.Task[None]] = {}
        self._crashes: dict[tuple[InstanceId, int], asyncio.Task[bool]] = {}
        look = repeat("look at silent instances", self._look, after_s / _CHECKS)
        self._task = asyncio.get_running_loop().create_task(look, name="liveness")

    async def close(self) -> None:
        """Stop all checks and probes. Idempotent."""
        tasks = (self._task, *self._crashes.values(), *self._probes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def probe(self, info: InstanceInfo) -> None:
        """Probe an instance until it responds, is replaced or forgotten.

        A silent instance is probed on: it may be slow to start, or the router was stopped.
        """
        shared(self._probes, (info.id, info.pid, info.url), self._probe(info))

    def doubt(self, info: InstanceInfo) -> None:
        """Use an instance no more, though its engine reports, if its server does not answer; it is
        probed until it does."""
        if self._monitor.members.is_ready(info):
            shared(self._probes, (info.id, info.pid, info.url), self._doubt(info))

    async def _doubt(self, info: InstanceInfo) -> None:
        is_healthy = await self._upstream.is_healthy(info.url, _TIMEOUT_S)
        view = self._monitor.view_of(info.id)
        if not is_healthy and view is not None and view.state is InstanceState.READY:
            words = "%s reports its load, but %s/health does not answer: it gets no requests until"
            _log.warning(f"{words} that does.", info.id, info.url)
            self._monitor.members.mark_ready(info, is_ready=False)
        if not self._monitor.members.is_ready(info):  # also if it has joined anew meanwhile
            await self._probe(info)

    async def _probe(self, info: InstanceInfo) -> None:
        loop = asyncio.get_running_loop()
        wait_s, due_s = _FIRST_WAIT_S, loop.time() + _LONG_S
        while self._monitor.members.is_known(info):
            if not await self._upstream.is_healthy(info.url, _TIMEOUT_S):
                pass
            elif other := await self._other_at(info):
                level, due_s = logging.WARNING if due_s < inf else logging.DEBUG, inf
                words = "%s is not used: at %s answers %s; give it a --tetri-url of its own"
                _log.log(level, words, info.id, info.url, other)
            else:
                await self._welcome(info)
                self._monitor.members.mark_ready(info)
                _log.info("%s is ready", info.id)
                return
            if loop.time() >= due_s:
                due_s = inf
                _log.warning(
                    "%s reports its load, but %s/health has not answered for %.0f s. If it is not "
                    "starting any more, let this host reach that port, or give it --tetri-url.",
                    info.id, info.url, _LONG_S,
                )  # fmt: skip
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _other_at(self, info: InstanceInfo) -> str:
        """Return the name of another instance that answers where this one should; empty if none."""
        found = await self._upstream.ask(info.url, INSTANCE_PATH, _TIMEOUT_S)
        try:
            name = msgspec.json.decode(found[1], type=_Named).id if found is not None else ""
        except JSON_ERRORS:
            name = ""
        is_own = not name or server_name(InstanceId(name)) == server_name(info.id)
        return "" if is_own else name

    async def has_crashed(self, instance: InstanceInfo) -> bool:
        """Whether an instance that failed a request crashed or hangs.

        False if it responds, if it drains or has ended in good order, if it was silent and
        reports again (its machine had too much to do), and if not even its host responds: a
        broken network or machine is not the fault of a request.
        """
        process = (instance.id, instance.pid)
        check = self._check_crash(instance)
        return await asyncio.shield(shared(self._crashes, process, check))

    async def _check_crash(self, instance: InstanceInfo) -> bool:
        is_alive, has_host = await asyncio.gather(
            self._upstream.is_alive(instance), is_reachable(instance.url)
        )
        if is_alive or not has_host:
            return False
        report, missed = self._reports.get(instance.id, (None, 0))
        was_silent = missed >= _MIGRATION_CHECKS
        await asyncio.sleep(self._after_s if was_silent else _GOODBYE_S)
        one = self._monitor.view_of(instance.id)
        if one is None or one.state is InstanceState.DRAINING:
            return False
        is_same = one.info.pid == instance.pid
        if was_silent and is_same and report != (instance.pid, one.seq):
            return False  # it reports again
        _log.error("%s (process %d) crashed or hangs", instance.id, instance.pid)
        return True

    def _compare(self) -> None:
        if self._roster == self._monitor.members.roster:
            return
        self._roster, before = self._monitor.members.roster, self._apart
        infos = {each.info.id: each.info for each in self._monitor.view().instances}
        self._apart = apart(infos.values())
        for instance in self._apart.keys() - before.keys():
            advice = "" if infos[instance].alone else _APART_ADVICE
            _log.warning(
                "%s. Requests are served aggregated there%s.", self._apart[instance], advice
            )
        hosts = {
            name: each.kv_endpoint.rpartition(":")[0]
            for name, each in infos.items()
            if name not in self._apart
        }
        local = {name for name, host in hosts.items() if is_loopback(host.strip("[]"))}
        known, self._local = self._local, local if len(local) < len(hosts) else set()
        for instance in self._local - known:
            _log.warning(
                "%s receives KV at %s, which instances on other machines cannot reach; give it "
                "--tetri-host ADDRESS, unless all are on its own.",
                instance, infos[instance].kv_endpoint,
            )  # fmt: skip

    def _look(self) -> None:
        self._compare()
        known, self._reports = self._reports, {}
        progress, self._progress = self._progress, {}
        now, idle = asyncio.get_running_loop().time(), self._idle
        for name in idle.keys() - known.keys():
            del idle[name]
        for each in self._monitor.view().instances:
            name, report = each.info.id, (each.info.pid, each.seq)
            num_tokens = each.load.prompt_tokens_done + each.load.output_tokens_done
            before = progress.get(name, (0, 0.0))
            self._progress[name] = before if before[0] == num_tokens else (num_tokens, now)
            last, missed = known.get(name, (None, 0))
            missed = missed + 1 if report == last else 0
            self._reports[name] = report, missed
            if missed == _MIGRATION_CHECKS:
                for decode, transfer in self._table.handed_over_by(name):
                    self._monitor.send(decode, TransferLost(transfer))
            if missed >= _MIGRATION_CHECKS:  # also what generates nothing, and counts nowhere
                self._fail_requests(name, is_final=missed >= _CHECKS)
            if not self._table.workers[name] or each.load.running or each.load.waiting:
                idle.pop(name, None)
            elif now - idle.setdefault(name, now) > IDLE_S:
                idle[name] = now
                self.doubt(each.info)  # requests do not come through its server
        since = self._progress.items()
        self._upstream.http.progress_s = {name: since_s for name, (_, since_s) in since}

    def _fail_requests(self, name: InstanceId, *, is_final: bool) -> None:
        quiet_s = self._after_s if is_final else self._after_s * _MIGRATION_CHECKS / _CHECKS
        why = f"no report for {quiet_s:g} s"
        num_failed = self._upstream.http.fail_requests(
            name, why, quiet_s=quiet_s, only_migratable=not is_final
        )
        if num_failed:
            what = "requests are retried or fail" if is_final else "streams move elsewhere"
            _log.warning("%s: %s; %d %s", name, why, num_failed, what)


async def is_reachable(url: str, timeout_s: float = _REACH_S) -> bool:
    """Whether the host of a server responds, if only by refusing the connection.

    The host of a process that hangs does; one behind a broken network does not.
    """
    loop = asyncio.get_running_loop()
    try:
        parts, port = parts_of(url)
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                asyncio.Protocol, parts.hostname or "", port
            )
    except TimeoutError:  # ETIMEDOUT is one, too
        return False
    except OSError as error:
        return error.errno not in _NO_ROUTE
    except Unreachable:
        return True  # not an address
    transport.abort()
    return True
