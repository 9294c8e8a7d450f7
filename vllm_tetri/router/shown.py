"""What the client of a stream has seen: a value that others are compared with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """The beginning of an answer.

    Attributes:
        is_chat: Which of the two APIs it belongs to.
        created: Time in its events, in seconds since 1970.
        text: All its text.
        token_ids: The tokens that it was made of.
        is_over: Whether it is all of the answer.
    """

    is_chat: bool
    created: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_over: bool = False
