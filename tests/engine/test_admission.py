"""What the router takes for "busy" is what vLLM says (`vllm.exceptions`)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm import exceptions
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from vllm_tetri.router.errors import is_at_limit, is_at_limit_event


def response(error: Exception) -> tuple[int, dict[str, Any]]:
    made = create_error_response(error)
    return made.error.code, made.model_dump()


@pytest.mark.parametrize("name", ["MaxQueuedTokensError", "QueueOverflowError"])
def test_a_bound_that_is_reached_is_busy(name: str) -> None:
    status, body = response(getattr(exceptions, name)())
    assert is_at_limit(status, json.dumps(body).encode())
    # As vLLM's serving classes write an error into a stream.
    assert is_at_limit_event(f"data: {json.dumps(body)}\n\n".encode())
    assert is_at_limit_event(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode())


@pytest.mark.parametrize(
    "error",
    [
        *(
            getattr(exceptions, name)()
            for name in ("RetryableRequestError", "GenerationError", "ProfilerAlreadyActiveError")
            if hasattr(exceptions, name)  # the first since 0.32
        ),
        RuntimeError("Service Unavailable"),
        ValueError("Service Unavailable"),
    ],
)
def test_every_other_error_is_not_busy(error: Exception) -> None:
    status, body = response(error)
    assert not is_at_limit(status, json.dumps(body).encode())
    assert not is_at_limit_event(f"data: {json.dumps(body)}\n\n".encode())
