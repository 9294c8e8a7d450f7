"""How fast one engine is, from the steps that it takes. Pure."""

from __future__ import annotations

# Weight of what came before, at each step: a few seconds of decoding, a few prompts.
_KEPT_DECODES = 0.995
_KEPT_PROMPTS = 0.95
# Steps whose numbers of decodes deviate by less than this tell no slope.
_LEAST_DEVIATION = 0.5


class StepSpeeds:
    """Learns seconds of a step as base + requests that decode · each + prompt tokens / speed.

    The newest steps count most. Owner: the engine thread; any thread may read.

    Attributes:
        prompt_tokens_done: Prompt tokens computed so far.
        answer_tokens_done: Decodes computed so far.
        prefill_tokens_per_s: Of steps with prompts, less what decodes beside them take;
            0 before the first.
        decode_base_s: Of a step that decodes; 0 before the first.
        decode_request_s: What each request adds to that.
    """

    def __init__(self) -> None:
        self.prompt_tokens_done = self.answer_tokens_done = 0
        self.prefill_tokens_per_s = 0.0
        self.decode_base_s = self.decode_request_s = 0.0
        self._prompt_tokens = self._prompt_s = 0.0
        # Weighted sums over steps that only decode: 1, n, n*n, s, n*s.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def learn(self, num_decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step that computed so much took so long."""
        self.prompt_tokens_done += prompt_tokens
        self.answer_tokens_done += num_decodes
        if prompt_tokens:
            self._learn_prompt(num_decodes, prompt_tokens, seconds)
        elif num_decodes:
            self._learn_decode(num_decodes, seconds)

    def _learn_prompt(self, num_decodes: int, tokens: int, seconds: float) -> None:
        # A step has its base once, whether decodes or prompts share it.
        seconds -= num_decodes * self.decode_request_s
        if seconds <= 0:
            return
        self._prompt_tokens = _KEPT_PROMPTS * self._prompt_tokens + tokens
        self._prompt_s = _KEPT_PROMPTS * self._prompt_s + seconds
        self.prefill_tokens_per_s = self._prompt_tokens / self._prompt_s

    def _learn_decode(self, count: int, seconds: float) -> None:
        new = (1.0, count, count * count, seconds, count * seconds)
        self._sums = total, n, nn, s, ns = tuple(  # type: ignore[assignment]
            _KEPT_DECODES * old + value for old, value in zip(self._sums, new, strict=True)
        )
        mean_n, mean_s = n / total, s / total
        variance = nn / total - mean_n * mean_n
        if variance >= _LEAST_DEVIATION**2:
            slope = (ns / total - mean_n * mean_s) / variance
            self.decode_request_s = min(max(0.0, slope), mean_s / mean_n)
        self.decode_base_s = max(0.0, mean_s - mean_n * self.decode_request_s)
