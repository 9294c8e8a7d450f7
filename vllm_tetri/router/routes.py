"""Which function serves a method and a path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.replies import Reply

Handler = Callable[[ClientRequest], Awaitable[Reply]]
_VARIABLE = re.compile(r"\{(\w+)\}")
_ELSEWHERE = "; a route that concerns one instance is served there: "
_ELSEWHERE += "GET /tetri/v1/instances lists their addresses"


class Routes:
    """Handlers by method and path. A variable part of a path, as `{id}`, is a part of its own
    between slashes."""

    def __init__(self) -> None:
        self._handlers: dict[str, dict[str, Handler]] = {}  # by path, and method
        self._patterns: dict[str, re.Pattern[str]] = {}  # of the paths with variables

    def add(self, method: str, path: str, handler: Handler, *, has_head: bool = False) -> None:
        """Add a route, if wanted for HEAD as well."""
        methods = [method, "HEAD"] if has_head else [method]
        self._handlers.setdefault(path, {}).update(dict.fromkeys(methods, handler))
        if _VARIABLE.search(path):
            self._patterns[path] = re.compile(_VARIABLE.sub(r"(?P<\1>[^/{}]{1,256})", path))

    def named(self) -> set[tuple[str, str]]:
        """Return method and path of each route."""
        return {(method, path) for path, each in self._handlers.items() for method in each}

    def find(self, request: ClientRequest) -> Handler:
        """Return who serves a request, and set its `params`. Raises `Refusal` 404 or 405."""
        handlers = self._handlers.get(request.path)
        if handlers is None or request.path in self._patterns:
            handlers = None
            for path, pattern in self._patterns.items():
                if found := pattern.fullmatch(request.path):
                    handlers, request.params = self._handlers[path], found.groupdict()
                    break
        if handlers is None:
            words = f"{request.method} {request.path}: Not Found{_ELSEWHERE}"
            raise Refusal(404, words)
        if (handler := handlers.get(request.method)) is None:
            words = f"{request.method} {request.path}: Method Not Allowed"
            raise Refusal(405, words, allow=",".join(sorted(handlers)))
        return handler
