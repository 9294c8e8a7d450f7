"""Memory of a simulated instance for KV that arrives or waits."""

from __future__ import annotations

from collections import deque

from vllm_tetri.sim.request import SimRequest


class Arena:
    """Memory apart from the KV pool, in whole blocks."""

    def __init__(self, total_tokens: int, block_size: int) -> None:
        self.total_tokens = total_tokens
        self.used_tokens = 0
        self._block_size = block_size
        self._waiting: deque[SimRequest] = deque()

    def open(self, request: SimRequest) -> None:
        """Request memory for a transfer; it is granted now or later."""
        self._waiting.append(request)
        self.grant()

    def drop(self, request: SimRequest) -> None:
        """Withdraw a transfer."""
        if request.is_granted:
            self.give_back(request.spec.prompt_tokens)
        else:
            self._waiting.remove(request)

    def take(self, tokens: int) -> None:
        """Take memory for the KV of `tokens` tokens."""
        self.used_tokens += self._rounded(tokens)

    def give_back(self, tokens: int) -> None:
        """Free what `take` took."""
        self.used_tokens -= self._rounded(tokens)

    def grant(self) -> list[SimRequest]:
        """Grant waiting transfers in order, as far as there is memory. Returns those."""
        granted = []
        while self._waiting:
            tokens = self._waiting[0].spec.prompt_tokens
            if self.used_tokens and self.used_tokens + self._rounded(tokens) > self.total_tokens:
                break
            self.take(tokens)
            granted.append(self._waiting.popleft())
            granted[-1].is_granted = True
        return granted

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size
