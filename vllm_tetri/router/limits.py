"""What a client may send, how much of it, and how slowly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the port for clients. Beyond them a request is refused, not cut.

    Attributes:
        connections: At a time; the next one is answered with 503 and closed.
        body_bytes: Of one request, unpacked; 413.
        bodies_bytes: Of all requests that are in the router; 503.
        url_bytes: Path and query; 414.
        headers: Of one request; 431.
        header_bytes: Of the name of a header, or its value; 431.
        head_s: From a request's first byte until its head is there; 408.
        body_s: From there until the body is there; 408. More for large ones:
        least_bytes_per_s: how fast they must come, and answers be read.
        idle_s: How long a connection may rest between requests.
        stalled_s: How long a client may leave what it was sent unread, or read it more slowly.
    """

    connections: int = 8192
    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30
    url_bytes: int = 4096
    headers: int = 100
    header_bytes: int = 8192
    head_s: float = 10.0
    body_s: float = 30.0
    least_bytes_per_s: int = 16 << 10
    idle_s: float = 75.0
    stalled_s: float = 60.0

    def __post_init__(self) -> None:
        # The parser says which of the two was exceeded by its number only.
        assert self.url_bytes != self.header_bytes
