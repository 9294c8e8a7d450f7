"""An engine with this package: ordered prompts in chunks, KV that arrives, admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import starmap

from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.admission import ENTRY_ORDERS, DecodeGate
from vllm_tetri.policy.lengths import Lengths, OutputLengths
from vllm_tetri.policy.queue import PromptQueue
from vllm_tetri.policy.step_cost import context_sum
from vllm_tetri.sim.config import InstanceConfig
from vllm_tetri.sim.cost.step_cost import linear
from vllm_tetri.sim.engine.instance import Cluster, Instance, Share
from vllm_tetri.sim.request import MAX_TOKENS, SimRequest
from vllm_tetri.sim.workload import NAME_TOKENS
from vllm_tetri.types import InstanceId, InstanceLoad, Prediction


class TetriInstance(Instance):
    """A simulated `vllm serve --role ...`."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        engine = self.engine
        self._sizes = engine.step_sizes
        order = load_policy("order", engine.order)
        self.queue: PromptQueue[SimRequest] = PromptQueue(
            order, engine.sched_batch, engine.block_size, self._uncached_tokens
        )
        self.lengths = Lengths()
        self.arena_tokens = 0  # in use, in whole blocks, by KV that arrives or waits
        self._opened: deque[SimRequest] = deque()  # transfers that wait for memory there
        self.held: deque[SimRequest] = deque()  # waiting for the batch, with all KV here or lost
        self.coming: dict[SimRequest, None] = {}  # KV of computed prompts, on its way here
        self.fetching: dict[SimRequest, int] = {}  # prompts that wait for KV of so many tokens
        self._asked: deque[SimRequest] = deque()  # for prefixes, by other instances
        self._predicted: dict[str, Prediction | None] = {}
        self.gate = DecodeGate(
            load_policy("admission", engine.admission),
            engine.end,
            lengths=OutputLengths(self.lengths, self._predicted.get, MAX_TOKENS),
            block_size=engine.block_size,
            total_blocks=engine.kv_blocks,
            entry_weight=ENTRY_ORDERS[engine.decode_order],
        )
        self._is_stuck = False
        self._leaving: dict[SimRequest, InstanceId] = {}  # to which instance, after this step
        self._news: deque[Callable[[], object]] = deque()  # for the next step
        # Of the newest step: requests that it admitted, with tokens loaded from the arena, and
        # prompts that it began.
        self._admitted: list[tuple[SimRequest, int]] = []
        self._begun: list[SimRequest] = []

    # -- work that comes -------------------------------------------------------------

    def submit(self, request: SimRequest, now: float) -> None:
        self.fetching.pop(request, None)
        self._predicted[request.request_id] = request.spec.predicted
        self._news.append(partial(self.queue.add, request))
        self.wake(now)

    def open(self, request: SimRequest, now: float) -> None:
        """Request arena memory for the KV of a split request; it is granted now or later."""
        self.has_changed = True
        self._opened.append(request)
        self._grant(now)

    def expect(self, request: SimRequest, now: float) -> None:
        """The prompt is computed, and all its KV on its way. What was not sent is evicted last."""
        self.cache.touch(request.spec.names[: request.held_tokens // NAME_TOKENS])
        self._news.append(partial(self.coming.setdefault, request))
        self.wake(now)

    def receive(self, request: SimRequest, now: float) -> None:
        """All KV has arrived. That of a prefix takes no room of the arena."""
        waiting, names = request.waiting, request.spec.names
        if waiting is None:
            self._news.append(partial(self._hold, request))
            self.wake(now)
        elif waiting in self.fetching:  # else it comes too late
            waiting.fetched_tokens = request.moved_tokens
            self.cache.use(names)
            self.cache.let_go(names)
            self.submit(waiting, now)

    def ask(self, request: SimRequest, now: float) -> None:
        """Take a request for the KV of a prefix, of which the last block is computed."""
        self._news.append(partial(self._asked.append, request))
        self.wake(now)

    def _hold(self, request: SimRequest) -> None:
        del self.coming[request]
        request.arrived_tokens = request.moved_tokens
        self._predicted[request.request_id] = request.spec.predicted
        self.gate.join(self.held, request)

    def _uncached_tokens(self, request: SimRequest) -> int:
        """Return what a waiting request has to compute; 0 if all its KV has arrived."""
        missing = request.missing_tokens
        return missing and missing - self.find(request)[0] * NAME_TOKENS

    def drop(self, request: SimRequest, now: float) -> None:
        """Give up a transfer: the first token was the last one."""
        self.has_changed = True
        if request.is_granted:
            self.arena_tokens -= self.whole_blocks(request.moved_tokens)
        else:
            self._opened.remove(request)
        self._grant(now)

    def put_back(self, request: SimRequest) -> None:
        request.num_computed_tokens = 0
        if request.request_id in self.queue:
            self.queue.put_back(request, is_lost=True)
        else:
            request.target_tokens = request.num_tokens
            self.gate.rejoin(self.held, request, was_running=True)

    def on_end(self, request: SimRequest) -> None:
        self.gate.record_output(request)
        self.gate.forget(request.request_id)
        self.lengths.observe(request.spec.predicted, request.num_output_tokens)

    def release(self, request: SimRequest, now: float) -> None:
        self.gate.forget(request.request_id)
        super().release(request, now)

    def check_end(self) -> None:
        super().check_end()
        queue = self.queue
        left = self.arena_tokens, queue.unfinished_tokens, queue.unfinished_context
        assert not any(left), f"{self.config.id} keeps KV or prompts: {left}"

    def let_go(self, request: SimRequest, target: InstanceId, now: float) -> None:
        """Move a request that is decoded here to another instance, after the next step."""
        self._leaving[request] = target
        self.wake(now)

    def take_over(self, request: SimRequest, now: float) -> None:
        """Take a request whose KV has come from another instance, which decoded it before, or was
        lost."""
        request.target_tokens = request.num_computed_tokens or request.num_tokens
        request.here_s = now
        self._predicted[request.request_id] = request.spec.predicted
        self._news.append(partial(self.gate.join, self.held, request))
        self.wake(now)

    # -- a step ------------------------------------------------------------------------

    def compose(self, now: float) -> list[Share]:
        self.settle(now)
        chunk_tokens = self.begin_step(now)
        if not (self.held or self.started or self.queue or self._asked):
            self._is_stuck = False
            self.grow(now)
            return []
        parts = self._share_out(chunk_tokens) if self.queue.order.is_preemptive else None
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self.go_on(chunk_tokens, shares, now, parts)
        # vLLM admits no request in a step with a preemption.
        if self.preemptions == preemptions:
            self._start_asked(shares, now)
            num_ready = sum(not request.missing_tokens for request in self.held)
            self.start(self.admit(left + num_ready, shares), shares)
        # The KV that split prompts have so far can be sent now, in order of arrival.
        prompts = [share for share in shares if share[0].request_id in self.queue]
        for request, _ in sorted(prompts, key=lambda share: share[0].spec.arrival_s):
            if request.is_split and request.num_computed_tokens > request.reused_tokens:
                self.cluster.computed(request, now)
        for request, tokens in prompts:
            remaining_tokens = request.missing_tokens - tokens
            if not remaining_tokens:
                request.hidden_tokens = request.num_computed_tokens if request.is_granted else 0
            self.queue.computed(request.request_id, tokens, remaining_tokens)
        # Started prompts must go on, even if the next prompt could not start.
        self._is_stuck = not prompts and bool(self.queue.started)
        return shares

    def settle(self, now: float) -> None:
        """Between two steps, take what has arrived and clean up after the last step."""
        while self._news:
            self._news.popleft()()
        while self._leaving:
            request, target = self._leaving.popitem()
            if request in self.batch:  # else it has ended, or was preempted
                self.batch.leave(request, now - self._paused_s)
                self._give_back(request, request.num_computed_tokens)
                self.gate.forget(request.request_id)
                self.cluster.moving(request, target, now)
        if not self._admitted:
            return
        # As in vLLM: requests whose prompts ended in the step come first, then admitted ones.
        for request in (*(request for request, _ in self._admitted), *self._begun):
            self.batch.put_last(request)
        for _, tokens in self._admitted:
            self.arena_tokens -= self.whole_blocks(tokens)
        self._admitted.clear()
        self._grant(now)

    def _grant(self, now: float) -> None:
        """Grant memory to opened transfers in order, as far as there is some."""
        while self._opened:
            tokens = self.whole_blocks(self._opened[0].moved_tokens)
            if self.arena_tokens and self.arena_tokens + tokens > self.engine.arena_tokens:
                break
            self.arena_tokens += tokens
            request = self._opened.popleft()
            request.is_granted = True
            self.cluster.granted(request, now)

    def whole_blocks(self, tokens: int) -> int:
        """Tokens of the whole blocks that hold so many."""
        return self.blocks(tokens) * self.engine.block_size

    def begin_step(self, now: float) -> int:
        """Call it before anything is allocated. Returns the most prompt tokens of the step."""
        cost, num_decodes = linear(self.engine.cost), len(self.batch)
        num_prompts = len(self.queue) + len(self.started)
        self._begun.clear()
        if num_decodes and num_prompts:
            chunk_tokens = -num_decodes + self._sizes.beside(
                cost,
                num_decodes=num_decodes,
                decode_tokens=num_decodes,
                decode_context=self.batch.context_tokens,
                num_prompts=num_prompts,
                prompt_context=self.started[0].num_computed_tokens if self.started else 0,
                first_tokens=self.queue.first_tokens(has_place=self.has_place()),
            )
        else:
            chunk_tokens = self._sizes.alone(cost)
        self.gate.begin_step(
            self.growing_requests,
            now,
            free_blocks=self.free_blocks,
            tokens_per_step=chunk_tokens + num_decodes,
        )
        return chunk_tokens

    def growing_requests(self) -> list[SimRequest]:
        """List all requests that hold blocks, as they are when a step begins."""
        self.batch.settle()
        return [*self.batch, *self.started]

    def admit(self, left_tokens: int, shares: list[Share]) -> int:
        """Admit held requests, in their order: to the batch, a token of the step each, or
        where KV was lost, to compute it again. Returns the tokens that are left of the step; 0
        if a request must wait."""
        while self.held:
            request = self.held[0]
            if left_tokens <= 0 or not self.has_place():
                return 0
            found, shared_blocks = self.find(request)
            if request.held_tokens > found * NAME_TOKENS:  # evicted since: compute it again
                request.held_tokens = request.num_computed_tokens = 0
                request.target_tokens = request.num_tokens
            lost_tokens = request.missing_tokens and request.missing_tokens - found * NAME_TOKENS
            if not self.gate.admit(request, max(0, lost_tokens - 1)):
                return 0
            tokens = request.target_tokens if lost_tokens else request.num_computed_tokens + 1
            if self.blocks(tokens) - shared_blocks > self.free_blocks:
                return 0
            self.held.popleft()
            self._admitted.append((request, request.arrived_tokens))
            request.arrived_tokens = request.held_tokens = 0
            self.reuse(request, found)
            if lost_tokens:
                self.started.append(request)
                tokens = self.take_blocks(request, min(lost_tokens, left_tokens))
                shares.append((request, tokens))
                left_tokens -= tokens
            else:
                self.free_blocks -= self.blocks(tokens) - self.blocks(found * NAME_TOKENS)
                self.remember(request)
                self.batch.join(request)
                left_tokens -= 1
        return left_tokens

    def start(self, left_tokens: int, shares: list[Share]) -> None:
        """Start prompts with the tokens that are left of a step."""
        while left_tokens > 0 and self.queue.may_start() and self.has_place():
            request = self.queue.head()
            found, shared_blocks = self.find(request)
            if not self.gate.admit(request, request.missing_tokens - found * NAME_TOKENS - 1):
                return
            if self.blocks(request.target_tokens) - shared_blocks > self.free_blocks:
                return
            self.queue.start()
            self.reuse(request, found)
            self.started.append(request)
            self._begun.append(request)
            tokens = self.take_blocks(request, min(request.missing_tokens, left_tokens))
            shares.append((request, tokens))
            left_tokens -= tokens

    def _start_asked(self, shares: list[Share], now: float) -> None:
        """Start requests for prefixes. They take tokens on top of the chunk, and end with the
        step."""
        while self._asked and self.has_place():
            request = self._asked[0]
            found, shared_blocks = self.find(request)
            if found < len(request.spec.names):
                self.cluster.refused(self._asked.popleft(), now)
                continue
            if self.blocks(request.target_tokens) - shared_blocks > self.free_blocks:
                return
            self.reuse(request, found)
            self.started.append(self._asked.popleft())
            shares.append((request, self.take_blocks(request, request.missing_tokens)))

    def _share_out(self, chunk_tokens: int) -> dict[str, int] | None:
        """Share out a step under a preemptive order; None: started prompts get what they can
        take."""
        if self._is_stuck:
            self.queue.free_blocks = 0
            return None
        return self.queue.share_out(
            chunk_tokens,
            free_blocks=self.free_blocks if self.has_place() else 0,
            was_refused=self.gate.was_shut,
        )

    # -- what is reported ----------------------------------------------------------------

    def load(self) -> InstanceLoad:
        self.batch.settle()
        rows, context_tokens = [], 0
        lanes = self.batch, self.held, self.coming, self.queue, self.started, self.fetching
        for requests in lanes:
            for request in requests:
                if not (request.is_split and request.prefill == self.config.id):
                    # The first token comes with the KV.
                    produced = 0 if requests is self.coming else request.num_output_tokens
                    rows.append((request, produced))
                    context_tokens += max(request.num_computed_tokens, request.num_tokens)
        outlooks = [self.lengths.outlook(each.spec.predicted, produced) for each, produced in rows]
        heavy = sum(part for _, part in outlooks)
        under_way = dict(self._shares)
        again = [  # of requests whose KV was lost
            (
                max(0, each.num_prompt_tokens - each.num_computed_tokens - under_way.get(each, 0)),
                each.num_prompt_tokens,
            )
            for each in (*self.held, *self.started)
            if each.missing_tokens and each.num_output_tokens
        ]
        again += [
            (each.num_prompt_tokens - num, each.num_prompt_tokens)
            for each, num in self.fetching.items()
        ]
        running = len(self.batch) + len(self.started)
        cost = linear(self.engine.cost)
        config, token_bytes = self.cluster.config, self.engine.kv_token_bytes or 0
        token_s = config.handover_token_s if config.link is None else token_bytes / config.link
        return InstanceLoad(
            running=running,
            waiting=len(self.held) + len(self.coming) + len(self.queue) + len(self.fetching),
            queued_prefill_tokens=self.queue.unfinished_tokens + sum(new for new, _ in again),
            queued_context=self.queue.unfinished_context + sum(starmap(context_sum, again)),
            blocks_used=self.engine.kv_blocks - self.free_blocks,
            blocks_total=self.engine.kv_blocks,
            arena_used_bytes=self.arena_tokens,
            arena_total_bytes=self.engine.arena_tokens,
            heavy=heavy,
            light=len(rows) - heavy,
            remaining_tokens=sum(total for total, _ in outlooks) - sum(each for _, each in rows),
            reserved_blocks=self.gate.admission.reserved_blocks if running else 0,
            prompt_tokens_done=self.prompt_tokens_done,
            cost=cost,
            context_tokens=context_tokens,
            chunk_tokens=self._sizes.alone(cost),
            next_chunk_tokens=self._sizes.next_chunk(
                cost,
                num_decodes=len(self.batch),
                decode_context=self.batch.context_tokens,
                num_prompts=len(self.queue) + len(self.started),
            ),
            handover_s=config.handover_base_s,
            handover_token_s=token_s,
            usual_tokens=self.lengths.usual_tokens(),
        )
