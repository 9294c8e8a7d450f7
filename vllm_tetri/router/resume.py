"""Going on behind a stream that broke: where, and what that instance is asked."""

from __future__ import annotations

from vllm_tetri.handover import DecodeLeg, Given, unseen_logprobs
from vllm_tetri.router.call import CHAT, Call
from vllm_tetri.router.first_token import FirstToken
from vllm_tetri.router.shown import Shown
from vllm_tetri.types import InstanceInfo, TransferId


def is_parsed(call: Call, instance: InstanceInfo) -> bool:
    """Whether an instance's server takes a chat's answer apart."""
    return call.path == CHAT and instance.reasons


def goes_on_for_sure(call: Call, given: Given, instance: InstanceInfo) -> bool:
    """Whether the client may have a first token before the instance has gone on behind it."""
    is_sure = (
        instance.injects
        and (instance.injects_seeded or not call.is_seeded)
        and (bool(given.logprobs) or not call.wants_logprobs)
    )
    return is_sure and call.is_streamed and call.is_plain and not is_parsed(call, instance)


def may_go_on(
    call: Call, instance: InstanceInfo, writer: InstanceInfo | None, *, anywhere: bool
) -> bool:
    """Whether an instance goes on as the one that broke off would have done.

    Args:
        call: What the client asked for.
        instance: Who would go on.
        writer: Who wrote what the client has got, if that is known.
        anywhere: Whether it may be of another kind, so that the text may differ from
            there on.
    """
    if is_parsed(call, instance):
        return False  # what the client has is one text
    return anywhere or writer is None or instance.identity == writer.identity


def resume_body(
    call: Call,
    shown: Shown,
    first: FirstToken | None,
    prompt_token_ids: list[int],
    instance: InstanceInfo,
) -> bytes:
    """A leg without KV: the prompt, and as output what the client has got.

    An engine that cannot take the tokens as its own output computes all of it again; what
    the client has got is compared with either.

    Args:
        call: What the client asked for.
        shown: What it has got.
        first: What a prefill instance answered, if one did.
        prompt_token_ids: Of the prompt, as far as an instance told them.
        instance: Who goes on.
    """
    digest, predicted = "", None
    if first is not None:
        digest, predicted = first.prefilled.digest, first.prefilled.predicted
        prompt_token_ids = first.prefilled.prompt_token_ids or prompt_token_ids
    given = _given(call, list(shown.token_ids)) if shown.token_ids else None
    leg = DecodeLeg(TransferId(""), digest, given, predicted)
    return call.decode_body(leg, prompt_token_ids, instance)


def _given(call: Call, token_ids: list[int]) -> Given:
    return Given(token_ids, unseen_logprobs(token_ids) if call.wants_logprobs else "")
