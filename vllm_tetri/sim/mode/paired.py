"""What modes have in common that choose both instances when a request arrives."""

from __future__ import annotations

from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route, Split, Whole
from vllm_tetri.policy.site import Ask as PricedAsk
from vllm_tetri.policy.site import Site
from vllm_tetri.policy.sites import Sites
from vllm_tetri.sim.mode.dispatcher import Expected
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import MODEL, Picture
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId


class PairedMode:
    """Knows what instances reported, and what it sent to whom since.

    Attributes:
        sites: All instances, as of the newest picture.
    """

    def __init__(self, setting: Setting) -> None:
        self.sites: list[Site] = []
        self._known = Sites()
        self._expected = Expected()
        self._seen: Picture | None = None
        self._answers: dict[int, InstanceId] = {}  # of split requests

    def look(self, picture: Picture, ask: Ask) -> PricedAsk:
        """See the newest picture. Returns what is known of a request."""
        if picture is not self._seen:
            self._seen = picture
            self._known.renew(picture.view, picture.at_s)
            self._expected.look(picture)
            self.sites = self._known.by_model[MODEL]
        return PricedAsk(ask.prompt_tokens, self._expected.tokens(ask.predicted))

    def send(self, prompt: Site, answer: Site, priced: PricedAsk, ask: Ask, now: float) -> Route:
        """A request goes to these two, or to one that is both."""
        after_s = 0.0 if prompt is answer else prompt.ttft_s(ask.prompt_tokens)
        self._known.send(prompt.id, answer.id, priced, now, after_s=after_s)
        if prompt is answer:
            return Whole(prompt.id, "one for both")
        self._answers[ask.id] = answer.id
        return Split(prompt.id, "chosen with its decode instance")

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        """As it was decided at the arrival."""
        return Dispatch(self._answers[ask.id], "", "chosen at its arrival")

    def ended(self, ask: Ask, now: float) -> None:
        self._answers.pop(ask.id, None)
