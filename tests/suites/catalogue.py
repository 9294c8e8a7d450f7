"""Which tests of other projects run, and what each suite is given."""

from __future__ import annotations

# Below tests/ of vLLM's source distribution; each file starts servers of its own. `make test-all`
# runs the first list, `make suites` both.
VLLM = (
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/serve/instrumentator/test_orca_metrics.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
)
VLLM_MORE = (
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/openai/test_openai_schema.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
)
# Their answers have no bound, and take minutes on a CPU.
TOO_LONG = (
    "entrypoints/openai/chat_completion/test_chat.py::test_structured_outputs_json_chat",
    "entrypoints/openai/chat_completion/test_chat.py::test_response_format_json_object",
    "entrypoints/openai/chat_completion/test_chat.py::test_response_format_json_schema",
)
# vLLM's own test of disaggregated prefill. It takes three ports from its environment.
NIXL = ("v1/kv_connector/nixl_integration/test_edge_cases.py",)
# Below tests/ of openai-python's source distribution.
OPENAI = (
    "api_resources/chat",
    "api_resources/test_completions.py",
    "api_resources/test_models.py",
    "api_resources/test_responses.py",
    "api_resources/responses",
)

# Each of openai-python's tests comes for several clients, of which the strict ones check every
# type. Those of path parameters ask no server.
OPENAI_CLIENTS = "strict and not path_params"

# The server of all suites but vLLM's own: under names that openai-python's tests ask for.
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "model")
SERVER = (
    "--served-model-name", *NAMES, "--max-model-len", "256", "--max-num-seqs", "64",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
VARIABLES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}

# One load of `vllm bench serve` per line; 0 requests may fail.
LOADS = {
    "random": "--dataset-name random --random-input-len 100 --random-output-len 16 "
    "--num-prompts 32 --request-rate 4",
    "sharegpt": "--dataset-name sharegpt --dataset-path {conversations} --num-prompts 24 "
    "--request-rate 3 --backend openai-chat --endpoint /v1/chat/completions",
    "prefix-repetition": "--dataset-name prefix_repetition --prefix-repetition-prefix-len 160 "
    "--prefix-repetition-suffix-len 32 --prefix-repetition-num-prefixes 4 "
    "--prefix-repetition-output-len 16 --num-prompts 32 --request-rate 4",
    "burst": "--dataset-name random --random-input-len 32 --random-output-len 8 "
    "--num-prompts 100 --request-rate inf",
}
AIPERF = {
    "chat": "--concurrency 4 --request-count 24 --synthetic-input-tokens-mean 100 "
    "--output-tokens-mean 16",
    # Sessions: 24 requests of conversations with four turns.
    "sessions": "--concurrency 3 --num-sessions 6 --session-turns-mean 4 --request-count 24 "
    "--synthetic-input-tokens-mean 20 --output-tokens-mean 12 --session-turn-delay-mean 100",
}
# vLLM's multi-turn benchmark: six conversations of three turns, three side by side.
MULTI_TURN = {
    "filetype": "generate_conversations",
    "num_conversations": 6,
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 6},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 32},
        "prefix_num_tokens": {"distribution": "constant", "value": 32},
        "num_tokens": {"distribution": "uniform", "min": 8, "max": 16},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 6, "max": 12}},
}
MULTI_TURN_ANSWERS = 15  # the last turn of a client's last conversation is not asked
MULTI_TURN_OPTIONS = "--num-clients 3 --max-active-conversations 6 --no-early-stop"

# On /openapi.json: valid requests to all routes, of which none may fail with a 5xx. Those of chats
# take minutes on a CPU (and vLLM's test_openai_schema.py, which stock fails in two routes, too).
SCHEMATHESIS = (
    "--phases fuzzing --mode positive --checks not_a_server_error --max-examples 25 --seed 1 "
    "--generation-allow-x00 false --suppress-health-check all --request-timeout 60 "
    "--exclude-path-regex chat/completions --continue-on-failure --no-color"
)

SUITES = (
    "vllm-server", "vllm-nixl", "openai-python", "schemathesis", "bench-serve", "aiperf",
    "multi-turn",
)  # fmt: skip


def files(more: bool) -> dict[str, tuple[str, ...]]:
    """Files or folders of tests, by suite; names of loads where a suite is no pytest."""
    vllm = VLLM + VLLM_MORE if more else VLLM
    loads = ("openapi",), tuple(LOADS), tuple(AIPERF), ("conversations",)
    return dict(zip(SUITES, (vllm, NIXL, OPENAI, *loads), strict=True))
