"""Stream one response from a running cluster, with the stock OpenAI client.

python examples/chat.py "What is the capital of France?" [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import sys

from openai import APIConnectionError, OpenAI


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream one response.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    try:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": options.question}],
            max_tokens=options.max_tokens,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
    except APIConnectionError:
        print(
            f"no router at {options.url}; start `vllm-tetri up MODEL` or give --url",
            file=sys.stderr,
        )
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
