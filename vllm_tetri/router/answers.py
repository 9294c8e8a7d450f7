"""OpenAI-shaped answers: every error that a client can get is built here."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from vllm_tetri.types import InstanceId

# What bytes that are no JSON raise: beside bad syntax, no UTF-8, or no end of nesting.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "BadRequestError",
    414: "BadRequestError",
    431: "BadRequestError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_TOO_LONG_PARAMS = {"input_tokens", "input_text"}
_TOO_LONG_TEXT = "maximum context length"
# How vLLM answers when a bound on its queue is reached (`GracefulHTTPError`: the type
# is the status in words; errors of its other classes end in "Error").
_BUSY_STATUS = 503
_BUSY_TYPE = "Service Unavailable"
# How an event begins that says an error; nothing inside of a JSON string looks like it.
ERROR_EVENT = b'data: {"error":'

# How an answer ends that its engine has not finished, most often because it shuts down.
GIVEN_UP = b'"finish_reason":"abort"'


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


class Refusal(Exception):
    """A request that ends in an error made by the router.

    Attributes:
        retry_after_s: When the client may try again, in whole seconds; sent with
            the statuses that invite it to.
    """

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
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON that the client reads."""
        return msgspec.json.encode(self._plain())

    def event(self) -> bytes:
        """The same as a server-sent event, for an answer that has begun."""
        return event(self._plain())

    def _plain(self) -> dict[str, Any]:
        # What it quotes of a request need not be Unicode.
        error = {
            "message": str(self).encode(errors="replace").decode(),
            "type": _TYPES.get(self.status, "Error"),
            "param": self.param,
            "code": self.code or self.status,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """The same as a whole answer."""
        return web.Response(
            body=self.body(),
            status=self.status,
            headers={**(headers or {}), **self.headers()},
            content_type="application/json",
        )


class NoRoom(Refusal):
    """Every instance that could begin with the request is full."""

    def __init__(self, who: str, num_full: int, retry_after_s: int) -> None:
        super().__init__(
            503,
            f"all {who} ({num_full}) are full; try again in {retry_after_s} s",
            code="queue_full",
            retry_after_s=retry_after_s,
        )


class LegFailed(Exception):
    """An instance did not answer properly; another one may.

    Attributes:
        status: What the client gets when nobody else helps.
        is_final: Trying elsewhere would only make the client wait longer.
        had_it: Whether the instance may have begun with the request, and died of it.
    """

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
        self.instance = instance
        self.reason = reason
        self.status = status
        self.is_final = is_final
        self.had_it = had_it


class LegBusy(Exception):
    """An instance has no room for another prompt. Not a fault: it never took the request."""

    def __init__(self, instance: InstanceId) -> None:
        super().__init__(f"instance {instance} is full")
        self.instance = instance


def is_busy(status: int, body: bytes) -> bool:
    """Whether an instance's answer says that a bound on its queue is reached.

    vLLM: `--max-num-queued-tokens`, `--max-num-queued-reqs`.
    """
    return status == _BUSY_STATUS and _says_busy(body)


def is_busy_event(chunk: bytes) -> bool:
    """The same for the first bytes of a stream that began with status 200.

    vLLM checks its bound twice, and the second time the stream has begun: that
    happens to requests which arrive together.
    """
    if not chunk.startswith(ERROR_EVENT):
        return False
    return _says_busy(chunk.partition(b"\n")[0].removeprefix(b"data: "))


def _says_busy(body: bytes) -> bool:
    try:
        error: Any = msgspec.json.decode(body)["error"]
        return bool(error["type"] == _BUSY_TYPE and error["code"] == _BUSY_STATUS)
    except (*NO_JSON, LookupError, TypeError):
        return False


def mark_too_long(status: int, body: bytes) -> tuple[int, bytes]:
    """Turn an instance's answer about an oversize prompt into status 413.

    vLLM answers 400 and names `input_tokens` or `input_text` as the parameter.
    """
    if status != 400 or len(body) > 1 << 20:
        return status, body
    try:
        answer: Any = msgspec.json.decode(body)
        error = answer["error"]
        is_too_long = error["param"] in _TOO_LONG_PARAMS or _TOO_LONG_TEXT in error["message"]
    except (*NO_JSON, LookupError, TypeError):
        return status, body
    if not is_too_long:
        return status, body
    error["code"] = 413
    return 413, msgspec.json.encode(answer)
