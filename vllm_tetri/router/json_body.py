"""Bodies as JSON objects, of which neither size nor depth is a surprise.

A body of a few megabytes can become gigabytes of Python objects, and one that nests deeply
could be read here but not written again for an instance.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from vllm_tetri.router.answers import NO_JSON, Refusal

MAX_DEPTH = 100
MAX_VALUES = 2 << 20  # a prompt of a million token ids fits
MAX_ENTRIES = 8192  # messages, prompts, documents
_NESTED = (list, dict)
_Order = TypeVar("_Order")


def decode_order(raw: bytes, kind: type[_Order], what: str) -> _Order:
    """Read the body of an operator's order, of a known shape.

    Raises:
        Refusal: 400, it has another one.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except NO_JSON as error:
        raise Refusal(400, f"the body is no {what}: {error}") from error


def decode_object(raw: bytes) -> dict[str, Any]:
    """Read a body.

    Raises:
        Refusal: 400, it is no JSON object, nests deeper than 100 levels, or a list in it
            is too long; 413, it has too many values.
    """
    num_opened = raw.count(b"[") + raw.count(b"{")
    # In texts they count, too: looking for those would take longer than reading it all.
    if num_opened + raw.count(b",") > MAX_VALUES:
        raise Refusal(413, f"the body has more than {MAX_VALUES} values")
    try:
        body: Any = msgspec.json.decode(raw)
    except NO_JSON as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, not {type(body).__name__}")
    if num_opened > MAX_DEPTH and _is_deeper(body, MAX_DEPTH):
        raise Refusal(400, f"the body nests deeper than {MAX_DEPTH} levels")
    for name, value in body.items():
        if isinstance(value, list) and len(value) > MAX_ENTRIES and not isinstance(value[0], int):
            raise Refusal(
                400,
                f"{name} has {len(value)} entries; at most {MAX_ENTRIES} are taken at a time",
                param=name,
            )
    return body


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, _NESTED)
        ]
        if not level:
            return False
    return True
