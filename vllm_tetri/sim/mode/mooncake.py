"""Mooncake: refuse at once what would come late, and compute short prompts where they are
decoded.

The prompt goes where its first token is expected first, the answer where a token takes
least among those with room. A prompt stays with its answer if it fits into one chunk there
and that step keeps the time per token that was promised. What is expected to be late
(`policy.promise`), or what finds no room on any decode instance, is refused when it
arrives, before anything is computed for it.
"""

from __future__ import annotations

from vllm_tetri.policy.adaptive import Place
from vllm_tetri.policy.promise import Late, expected_late
from vllm_tetri.policy.route import Route
from vllm_tetri.policy.site import Site
from vllm_tetri.sim.mode.paired import PairedMode
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import Picture
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import Role

_RETRY_S = 1  # nobody comes again here


class MooncakeMode(PairedMode):
    """What Mooncake calls the Conductor, without its prefix caches."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._objective = setting.objective

    def route(self, picture: Picture, ask: Ask, now: float) -> Route | Late:
        priced = self.look(picture, ask)
        tokens = ask.prompt_tokens
        answers = [site for site in self.sites if site.role is not Role.PREFILL] or self.sites
        able = [site for site in answers if tokens <= site.free_tokens or not site.decodes]
        if not able:
            return Late("no decode instance has room for its KV", _RETRY_S)
        answer = min(able, key=lambda site: site.tpot_s(tokens))
        prompts = [site for site in self.sites if site.role is not Role.DECODE] or self.sites
        prompt = min(prompts, key=lambda site: site.ttft_s(tokens))
        if self._is_inline(answer, tokens):
            prompt = answer
        late = expected_late(_place(prompt, answer, tokens), self._objective, priced.answer_tokens)
        return late or self.send(prompt, answer, priced, ask, now)

    def _is_inline(self, site: Site, tokens: int) -> bool:
        """Whether a prompt disturbs the decodes there so little that it stays with them."""
        step_s = site.cost.base_s + site.decodes * site.request_s + tokens * site.token_s(tokens)
        is_one_chunk = site.queued_tokens + tokens <= site.chunk_tokens
        return is_one_chunk and step_s <= self._objective.tpot_s


def _place(prompt: Site, answer: Site, tokens: int) -> Place:
    return Place(
        prompt.id,
        answer.id,
        ttft_s=prompt.ttft_s(tokens),
        tpot_s=answer.tpot_s(tokens),
        cost_s=0.0,
        reason="",
        waits=prompt.queued_tokens > 0 or prompt.decodes > 0,
        shares=answer.decodes > 0 or answer.prompt_share > 0,
        confidence=min(prompt.cost.confidence, answer.cost.confidence),
    )
