"""A second leg that finds its way while the prompt is still computed.

HTTP, parsing and the way into the decode engine take milliseconds that nobody has to
wait for: the prefill instance says when the last chunk begins, the leg is opened then,
and the decode engine goes on as soon as the KV and the first token have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import msgspec

from vllm_tetri.handover import DecodeLeg, Prefilled
from vllm_tetri.messages import Dispatched, Opening
from vllm_tetri.router.call import Call
from vllm_tetri.router.wire import Answer
from vllm_tetri.types import InstanceId, InstanceInfo

Opened = asyncio.Task[Answer]


class EarlyLeg:
    """The second leg of one try. Owner: the job; close it.

    Args:
        call: What the client asked for.
        info: What an instance said of itself, if it is in use.
        post: Sends a body to an instance and returns the head of its answer.
    """

    def __init__(
        self,
        call: Call,
        info: Callable[[InstanceId], InstanceInfo | None],
        post: Callable[[InstanceInfo, bytes], Coroutine[None, None, Answer]],
    ) -> None:
        self._call = call
        self._info = info
        self._post = post
        self._opening: Opening | None = None
        self._decode = InstanceId("")
        self._answer: Opened | None = None

    def open(self, message: Dispatched) -> None:
        """The last chunk begins: send the leg, unless one is on its way."""
        opening, instance = message.opening, self._info(message.decode)
        if opening is None or instance is None or self._answer is not None:
            return
        self._opening, self._decode = opening, message.decode
        if not self._call.may_open_early:
            return
        leg = DecodeLeg(
            opening.transfer, opening.digest, predicted=message.predicted, is_early=True
        )
        body = self._call.decode_body(leg, opening.prompt_token_ids, instance)
        self._answer = asyncio.create_task(self._post(instance, body))

    def with_prompt(self, prefilled: Prefilled) -> Prefilled:
        """With the prompt's tokens, which leg 1 does not repeat after an opening."""
        opening = self._opening
        if prefilled.prompt_token_ids or opening is None or opening.digest != prefilled.digest:
            return prefilled
        return msgspec.structs.replace(prefilled, prompt_token_ids=opening.prompt_token_ids)

    def take(self, prefilled: Prefilled) -> Opened | None:
        """The answer to come, if the leg went where the KV is; it is the caller's then.
        Else the leg is left."""
        transfer = self._opening.transfer if self._opening is not None else ""
        if (transfer, self._decode) != (prefilled.transfer, prefilled.decode):
            self.close()
            return None
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Leave, so that the decode instance drops the request. Idempotent."""
        answer, self._answer = self._answer, None
        if answer is not None:
            leave(answer)


def leave(answer: Opened) -> None:
    """Nobody waits for it; also right when it has come already."""
    answer.cancel()
    answer.add_done_callback(_discard)


def _discard(answer: Opened) -> None:
    if not answer.cancelled() and answer.exception() is None:
        answer.result().close()
