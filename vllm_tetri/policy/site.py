"""What a request costs on one instance, priced by the instance's own steps. Pure.

Everything is counted in seconds that somebody waits, the request itself or another one:

- A prompt at a site waits for what is queued there and is computed in chunks, each beside a
  step of the site's decodes. Those wait for it in turn.
- An answer at a site takes one step per token, longer the more decodes and prompts there
  are. The others' steps become longer by what it adds.
- Sites on one device (cores or a GPU that several instances share) slow each other down:
  whoever waits on one waits on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tetri.types import InstanceId, InstanceView, Role, StepCoefficients

_DEFAULT_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be placed.

    Attributes:
        prompt_tokens: To be computed, at least 1.
        answer_tokens: Expected to be written, at least 1.
    """

    prompt_tokens: int
    answer_tokens: float


class Site:
    """One instance. Numbers change as requests are sent there; see `Sites`.

    Attributes:
        role: What it prefers.
        key: Equal where KV may travel; a small number.
        decodes: Requests that write answers there, or will.
        others: The same on other sites of its device.
        left_tokens: What an answer there has left, in the mean.
        prompt_share: Part of its time that prompts take.
        free_tokens: KV that its pool has room for.
        window_tokens: Longest prompt and answer together.
    """

    __slots__ = (
        "busy_others",
        "chunk_tokens",
        "cost",
        "decodes",
        "device",
        "free_tokens",
        "handover_s",
        "handover_token_s",
        "id",
        "key",
        "left_tokens",
        "others",
        "prompt_share",
        "queued_tokens",
        "request_s",
        "role",
        "window_tokens",
    )

    def __init__(self, one: InstanceView, cost: StepCoefficients, key: int, share: float) -> None:
        load, info = one.load, one.info
        self.id: InstanceId = info.id
        self.role: Role = info.role
        self.device = info.device
        self.key = key
        self.cost = cost
        self.chunk_tokens = load.chunk_tokens or _DEFAULT_CHUNK_TOKENS
        self.queued_tokens: float = load.queued_prefill_tokens
        self.decodes: float = load.heavy + load.light
        self.left_tokens = load.remaining_tokens / max(1.0, self.decodes)
        context = load.context_tokens / max(1.0, self.decodes)
        self.request_s = cost.request_s + context * cost.token_s  # a decode of usual context
        self.prompt_share = share
        self.window_tokens = info.max_model_len
        self.free_tokens: float = info.block_size * (
            load.blocks_total - load.blocks_used - load.reserved_blocks
        )
        self.handover_s = load.handover_s
        self.handover_token_s = load.handover_token_s
        self.others = self.busy_others = 0.0

    def add_answer(self, ask: Ask) -> None:
        """One more answer is to be written here, behind its prompt's KV."""
        total_tokens = self.left_tokens * self.decodes + ask.answer_tokens
        self.decodes += 1
        self.left_tokens = total_tokens / self.decodes
        self.free_tokens -= ask.prompt_tokens + ask.answer_tokens

    # -- a prompt here ----------------------------------------------------------------

    def token_s(self, prompt_tokens: float) -> float:
        """Each token of a prompt of so many, decodes and the step's base aside."""
        return self.cost.prompt_s + prompt_tokens / 2 * self.cost.context_s

    def ttft_s(self, prompt_tokens: float) -> float:
        """Until the first token of a prompt that comes now."""
        tokens = self.queued_tokens + prompt_tokens
        beside_s = self.cost.base_s + self.decodes * self.request_s
        steps = -(-tokens // self.chunk_tokens)
        if self.decodes:
            steps += 0.5  # what is left of the one that runs
        alone_s = tokens * self.token_s(prompt_tokens) + steps * beside_s
        return alone_s * (1 + self.busy_others)

    def prompt_harm_s(self, prompt_tokens: float) -> float:
        """What those who decode here and beside it wait for a prompt, all together."""
        if not (self.decodes or self.others):
            return 0.0
        steps = prompt_tokens / self.chunk_tokens
        present = min(1.0, self.left_tokens / max(1.0, steps)) if self.decodes else 1.0
        waiting = self.decodes * present + self.others
        return waiting * prompt_tokens * self.token_s(prompt_tokens)

    # -- an answer here ---------------------------------------------------------------

    def tpot_s(self, context_tokens: float) -> float:
        """Of one more answer behind so many tokens, prompts beside it counted in."""
        own_s = self.cost.request_s + context_tokens * self.cost.token_s
        step_s = self.cost.base_s + self.decodes * self.request_s + own_s
        return step_s * (1 + self.busy_others) / (1 - self.prompt_share)

    def answer_harm_s(self, ask: Ask) -> float:
        """What those who decode here and beside it wait for one more answer."""
        if not (self.decodes or self.others):
            return 0.0
        context = ask.prompt_tokens + ask.answer_tokens / 2
        own_s = self.cost.request_s + context * self.cost.token_s
        harm_s = 0.0
        if self.decodes:
            harm_s = self.decodes * min(ask.answer_tokens, self.left_tokens) * own_s
        if self.others:
            own_s += 0.0 if self.decodes else self.cost.base_s
            harm_s += self.others * ask.answer_tokens * own_s
        return harm_s / (1 - self.prompt_share)

    def hand_over_s(self, prompt_tokens: float) -> float:
        """Until a prompt that is done here goes on somewhere else."""
        return self.handover_s + self.transfer_s(prompt_tokens)

    def transfer_s(self, prompt_tokens: float) -> float:
        """What of that its KV takes."""
        last_tokens = min(prompt_tokens, self.chunk_tokens)  # the rest left before
        return last_tokens * self.handover_token_s
