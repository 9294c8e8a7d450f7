"""Errors in OpenAI's shape, how instances report that they failed or are full, and events."""

from __future__ import annotations

from typing import Any

import msgspec

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
# vLLM's response when a limit of its queue is reached (`GracefulHTTPError`: the type is the
# status in words; the types of its other errors end in "Error").
_AT_LIMIT_STATUS = 503
_AT_LIMIT_TYPE = "Service Unavailable"
_INTERNAL_STATUS = 500
NOT_OFFERED = b'{"detail":"Not Found"}'  # vLLM has no such route, or not for its model
# Beginning of an event that carries an error; cannot occur inside a JSON string.
ERROR_EVENT = b'data: {"error":'
# An engine that shuts down ends its outputs with this finish reason.
ABORTED = b'"finish_reason":"abort"'
DONE = b"data: [DONE]\n\n"


class SaidFunction(msgspec.Struct):
    """What an event says of a tool call's function."""

    name: str | None = None
    arguments: str | None = None


class SaidToolCall(msgspec.Struct):
    """What an event says of a tool call."""

    index: int = 0
    function: SaidFunction | None = None


class SaidDelta(msgspec.Struct):
    """What an event of a chat adds to a choice."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[SaidToolCall] | None = None


class SaidChoice(msgspec.Struct):
    """What an event says of a choice."""

    index: int = 0
    text: str | None = None
    delta: SaidDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class SaidEvent(msgspec.Struct):
    """An event of a stream, as far as it is read."""

    created: int
    choices: list[SaidChoice]
    prompt_token_ids: list[int] | None = None


decode_event = msgspec.json.Decoder(SaidEvent).decode


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
    """A request that ends with an error of the router; `Retry-After` goes with 429 and 503.

    As in vLLM's errors, `code` is the status; `kind` tells errors of one status apart; `allow` are
    the methods that a path has."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "",
        retry_after_s: int = 1,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind = status, param, kind
        self.retry_after_s, self.allow = retry_after_s, allow

    def body(self) -> bytes:
        """Encode the error as the JSON that the client reads."""
        # Text quoted from a request need not be valid Unicode.
        error = {
            "message": str(self).encode(errors="replace").decode(),
            "type": _TYPES.get(self.status, "Error"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Encode the error as a server-sent event, for a stream that has begun."""
        return b"data: %b\n\n" % self.body()

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status and the kind of error."""
        headers = {"x-tetri-error": self.kind} if self.kind else {}
        if self.status in (429, 503):
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow:
            headers["allow"] = self.allow
        return headers


class NoCapacity(Refusal):
    """All instances that could serve the request are at their limits."""


class InstanceFailed(Exception):
    """An instance did not respond properly; another one may. The client gets `status` if none
    does. `is_final`: a retry would only make it wait longer. `is_suspect`: the request may be why.
    `is_mute`: its server answered nothing. `internal`: its message with status 500."""

    def __init__(
        self,
        instance: InstanceId,
        reason: str,
        *,
        status: int = 502,
        is_final: bool = False,
        is_suspect: bool = True,
        is_mute: bool = False,
        internal: str = "",
    ) -> None:
        super().__init__(f"instance {instance}: {reason}")
        self.instance, self.status, self.internal = instance, status, internal
        self.is_final, self.is_suspect, self.is_mute = is_final, is_suspect, is_mute


class InstanceAtLimit(Exception):
    """An instance refused another prompt because its queue is at its limit; not a failure."""

    def __init__(self, instance: InstanceId) -> None:
        super().__init__(f"instance {instance} is at its limit")
        self.instance = instance


def is_failure(status: int) -> bool:
    """Whether a status says that an instance failed. 501 does not: the model cannot do it."""
    return 500 <= status != 501


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
    if not chunk.startswith(ERROR_EVENT):
        return False
    return is_at_limit(_AT_LIMIT_STATUS, chunk.partition(b"\n")[0].removeprefix(b"data: "))


def internal_error_in(status: int, body: bytes) -> str:
    """The message of vLLM's response of status 500; empty if it is something else."""
    message = _error_in(body).get("message") if status == _INTERNAL_STATUS else None
    return message if isinstance(message, str) else ""


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        error: Any = msgspec.json.decode(body)["error"]
    except (*JSON_ERRORS, LookupError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


class HttpError(Exception):
    """There is no response, or only a part of it."""


class Unreachable(HttpError):
    """No connection could be made; nothing was sent."""


class ConnectionLost(HttpError):
    """The connection ended, or carried something else than HTTP."""


class Silent(ConnectionLost):
    """No byte came for too long."""


class GivenUp(ConnectionLost):
    """The router ended the request, because its instance is gone."""
