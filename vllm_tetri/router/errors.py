"""Error responses in OpenAI's shape, and how instances report that they failed or are full."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from vllm_tetri.types import InstanceId

# Raised by msgspec for bytes that are not JSON: bad syntax, not UTF-8, or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TYPES = {
    **dict.fromkeys((400, 413, 414, 431), "BadRequestError"),
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeoutError",
    409: "ConflictError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_TOO_LONG_PARAMS = ("input_tokens", "input_text")
_TOO_LONG_TEXT = "maximum context length"
# vLLM's response when a limit of its queue is reached (`GracefulHTTPError`: the type is the
# status in words; the types of its other errors end in "Error").
_AT_LIMIT_STATUS = 503
_AT_LIMIT_TYPE = "Service Unavailable"
NOT_OFFERED = b'{"detail":"Not Found"}'  # vLLM has no such route, or not for its model
# Beginning of an event that carries an error; cannot occur inside a JSON string.
ERROR_EVENT = b'data: {"error":'
# An engine that shuts down ends its outputs with this finish reason.
ABORTED = b'"finish_reason":"abort"'
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """Encode a server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the numbers of tokens as OpenAI's API shows them."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


class Refusal(Exception):
    """A request that ends with an error of the router; `Retry-After` goes with 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Encode the error as the JSON that the client reads."""
        # Text quoted from a request need not be valid Unicode.
        error = {
            "message": str(self).encode(errors="replace").decode(),
            "type": _TYPES.get(self.status, "Error"),
            "param": self.param,
            "code": self.code or self.status,
        }
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Encode the error as a server-sent event, for a stream that has begun."""
        return b"data: %b\n\n" % self.body()

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Build the HTTP response."""
        return web.Response(
            body=self.body(),
            status=self.status,
            headers={**(headers or {}), **self.headers()},
            content_type="application/json",
        )


class NoCapacity(Refusal):
    """All instances that could serve the request are at their limits."""


class InstanceFailed(Exception):
    """An instance did not respond properly; another one may. The client gets `status` if none
    does. `is_final`: a retry would only make it wait longer. `had_it`: the instance may have begun
    with the request, and crashed because of it."""

    def __init__(
        self,
        instance: InstanceId,
        reason: str,
        *,
        status: int = 502,
        is_final: bool = False,
        had_it: bool = True,
    ) -> None:
        super().__init__(f"instance {instance}: {reason}")
        self.instance, self.status = instance, status
        self.is_final, self.had_it = is_final, had_it


class InstanceAtLimit(Exception):
    """An instance refused another prompt because its queue is at its limit; not a failure."""

    def __init__(self, instance: InstanceId) -> None:
        super().__init__(f"instance {instance} is at its limit")
        self.instance = instance


def is_at_limit(status: int, body: bytes) -> bool:
    """Whether a response of vLLM says that a limit of its queue is reached
    (`--max-num-queued-tokens`, `--max-num-queued-reqs`)."""
    if status != _AT_LIMIT_STATUS:
        return False
    error = _error_in(body)
    return (error.get("type"), error.get("code")) == (_AT_LIMIT_TYPE, _AT_LIMIT_STATUS)


def is_at_limit_event(chunk: bytes) -> bool:
    """Whether a stream of status 200 begins with the event that the queue is at its limit:
    vLLM checks it again after the stream of a request has begun."""
    first = chunk.partition(b"\n")[0].removeprefix(b"data: ")
    return chunk.startswith(ERROR_EVENT) and is_at_limit(_AT_LIMIT_STATUS, first)


def mark_too_long(status: int, body: bytes) -> tuple[int, bytes]:
    """Turn vLLM's 400 for a prompt that is too long (parameter `input_tokens` or
    `input_text`) into status 413."""
    error = _error_in(body) if status == 400 and len(body) <= 1 << 20 else {}
    if error.get("param") in _TOO_LONG_PARAMS or _TOO_LONG_TEXT in str(error.get("message")):
        return 413, msgspec.json.encode({"error": {**error, "code": 413}})
    return status, body


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        error: Any = msgspec.json.decode(body)["error"]
    except (*JSON_ERRORS, LookupError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
