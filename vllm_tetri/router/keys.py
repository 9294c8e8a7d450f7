"""Who may ask: API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping

from vllm_tetri.router.answers import Refusal

# Everything else needs a key. vLLM leaves more open: whatever does not begin with /v1, /v2,
# /inference or /cohere, as /tokenize, /score or /pooling.
OPEN = frozenset({"/", "/health", "/ping", "/metrics", "/version"})
ANYBODY = ""


class Keys:
    """The keys that clients may present, as `Authorization: Bearer KEY`.

    Only digests are kept. Without keys everybody is let in.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    @property
    def num_parties(self) -> int:
        """How many clients can be told apart."""
        return max(1, len(self._digests))

    def party_of(self, path: str, headers: Mapping[str, str]) -> str:
        """A name for whoever asks, which says nothing about the key.

        Raises:
            Refusal: 401, the path needs a key and there is none, or another one.
        """
        if not self._digests or path in OPEN:
            return ANYBODY
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        presented, party = _digest(key), ANYBODY
        for number, digest in enumerate(self._digests):
            if secrets.compare_digest(presented, digest):
                party = f"key-{number}"  # and go on: the time must not tell which
        if not party or scheme.lower() != "bearer":
            raise Refusal(
                401,
                "this API needs a key that is known here: send the header "
                "'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        return party


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
