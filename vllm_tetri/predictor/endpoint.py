"""Ask an OpenAI endpoint for an answer's length."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import aiohttp

from vllm_tetri.errors import ConfigError, TetriError
from vllm_tetri.predictor.answers import Target

# An answer may wait behind many others on a slow target; this only ends a hang.
_ANSWER_TIMEOUT_S = 3600.0
_QUICK_TIMEOUT_S = 10.0
_TRIES = 4
_BACKOFF_S = 2.0
_BUSY = {408, 409, 429}
_PROBE = "prompt-goes-here"
CHAT = "chat/completions"
PLAIN = "completions"


class Refused(TetriError):
    """The endpoint does not take this prompt; others it may."""


class EndpointGone(TetriError):
    """The endpoint no longer answers, after several tries."""


@dataclass(frozen=True, slots=True)
class Length:
    """What an endpoint says of one answer: tokens, and why it ended."""

    prompt_tokens: int
    tokens: int
    finish: str


class Endpoint:
    """An OpenAI endpoint; ``url`` is its base, with or without ``/v1``.

    The key is taken from the environment variable OPENAI_API_KEY, as OpenAI's own
    client does.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._root = url.rstrip("/").removesuffix("/v1")

    async def model(self) -> str:
        """The first model that it serves.

        Raises:
            ConfigError: It does not answer, or serves none.
        """
        try:
            said = await self._get("/v1/models")
            return str(said["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConfigError(f"--url {self._root}: no answer: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--url {self._root}: /v1/models names no model") from error

    async def template(self, model: str) -> tuple[str, str]:
        """What the chat template writes before and after a single user turn.

        Two empty texts where the endpoint has no way to tell; vLLM has.
        """
        asked = {"model": model, "messages": [{"role": "user", "content": _PROBE}]}
        try:
            tokens = (await self._post_once("/tokenize", asked, _QUICK_TIMEOUT_S))["tokens"]
            known = {"model": model, "tokens": tokens}
            text = (await self._post_once("/detokenize", known, _QUICK_TIMEOUT_S))["prompt"]
            before, found, after = str(text).partition(_PROBE)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            return "", ""
        return (before, after) if found else ("", "")

    async def length(self, prompt: str, target: Target) -> Length:
        """Have one prompt answered.

        Raises:
            Refused: With the endpoint's reason.
            EndpointGone: It failed several times in a row.
        """
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": target.max_tokens,
            "temperature": target.temperature,
        }
        if target.route == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        said = await self._post(f"/v1/{target.route}", body)
        try:
            usage, choice = said["usage"], said["choices"][0]
            return Length(
                int(usage["prompt_tokens"]),
                int(usage["completion_tokens"]),
                str(choice["finish_reason"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise EndpointGone(f"{self._root}: an answer without usage: {said}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        failure: Exception | None = None
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
            try:
                return await self._post_once(path, body, _ANSWER_TIMEOUT_S)
            except aiohttp.ClientResponseError as error:
                if 400 <= error.status < 500 and error.status not in _BUSY:
                    raise Refused(f"{error.status} {error.message}") from error
                failure = error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                failure = error
        raise EndpointGone(f"{self._root}: no answer in {_TRIES} tries: {failure}")

    async def _post_once(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        async with self._session.post(
            self._root + path,
            json=body,
            headers=_headers(),
            timeout=aiohttp.ClientTimeout(timeout_s),
        ) as response:
            return await _content(response)

    async def _get(self, path: str) -> Any:
        async with self._session.get(
            self._root + path, headers=_headers(), timeout=aiohttp.ClientTimeout(_QUICK_TIMEOUT_S)
        ) as response:
            return await _content(response)


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _content(response: aiohttp.ClientResponse) -> Any:
    if response.status == 200:
        return await response.json(content_type=None)
    raise aiohttp.ClientResponseError(
        response.request_info,
        response.history,
        status=response.status,
        message=(await response.text())[:300],
    )
