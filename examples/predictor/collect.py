"""Measure how long a model's outputs are: `python -m examples.predictor.collect PROMPTS ...`

Every prompt is sent to an OpenAI endpoint; the output's length goes into a file, its text does
not. The first Ctrl-C lets the outputs in flight end, a second one drops them. The same command
continues from there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import openai

from examples.predictor.model import Target
from examples.predictor.outputs import Output, append, open_outputs
from examples.predictor.prompts import Prompt, read_prompts
from vllm_tetri.errors import ConfigError

TIMEOUT_S = 3600.0  # an output may wait for many others on a slow target; this only ends a hang
CHAT, PLAIN = "chat/completions", "completions"
_PROBE = "prompt-goes-here"
_LINE_EVERY = 100  # outputs


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("prompts", type=Path, nargs="+", metavar="PROMPTS", help="files or folders of prompts")
    add("--url", default="http://127.0.0.1:8000", help="endpoint of the target (%(default)s)")
    add("--model", default="", help="name of the target model (the first one served)")
    add("--output", type=Path, default=Path("outputs.jsonl"), help="(%(default)s)")
    add("--temperature", type=float, default=0.7, help="(%(default)s)")
    add("--max-tokens", type=int, default=1024, help="where outputs are cut (%(default)s)")
    add("--samples", type=int, default=1, help="outputs per prompt (%(default)s)")
    add("--limit", type=int, help="only the first prompts of the random order")
    add("--per-source", type=int, help="most prompts of each file or folder")
    add("--seed", type=int, default=0, help="of the random order (%(default)s)")
    add("--concurrency", type=int, default=32, help="prompts in flight (%(default)s)")
    add("--plain", action="store_true", help="completions without the chat template")
    return parser.parse_args(words)


async def template_of(client: openai.AsyncOpenAI, root: str, model: str) -> tuple[str, str]:
    """Text of the chat template before and after a single user turn, as vLLM's endpoints tell;
    empty where there are none."""
    plain: Any = client.with_options(base_url=root)
    asked = {"model": model, "messages": [{"role": "user", "content": _PROBE}]}
    try:
        tokens = (await plain.post("/tokenize", cast_to=object, body=asked))["tokens"]
        known = {"model": model, "tokens": tokens}
        text = (await plain.post("/detokenize", cast_to=object, body=known))["prompt"]
    except (openai.OpenAIError, LookupError, TypeError):
        return "", ""
    before, found, after = str(text).partition(_PROBE)
    return (before, after) if found else ("", "")


class Collection:
    """Asks for all outputs that a file lacks."""

    def __init__(self, client: openai.AsyncOpenAI, target: Target, file: BinaryIO) -> None:
        self._client = client
        self._target = target
        self._file = file
        self.num_done = 0
        self.num_refused = 0
        self.is_stopped = False

    async def ask_all(self, todo: Iterator[tuple[Prompt, int]]) -> None:
        """Ask for one output after the other; several of these share `todo`."""
        for prompt, sample in todo:
            if self.is_stopped:
                return
            try:
                answer = await self._ask(prompt.text)
            except openai.BadRequestError as error:  # too long, for example; others may fit
                self.num_refused += 1
                print(f"refused: {prompt.text[:40]!r}: {error}")
                continue
            usage, finish = answer.usage, str(answer.choices[0].finish_reason)
            asked: dict[str, Any] = {
                "key": prompt.key,
                "source": prompt.source,
                "prompt": prompt.text,
            }
            lengths = {"prompt_tokens": usage.prompt_tokens, "tokens": usage.completion_tokens}
            append(self._file, Output(**asked, **lengths, sample=sample, finish=finish))
            self.num_done += 1
            if self.num_done % _LINE_EVERY == 0:
                print(f"{self.num_done} outputs", flush=True)

    async def _ask(self, prompt: str) -> Any:
        target = self._target
        how: dict[str, Any] = {"model": target.model, "temperature": target.temperature}
        how["max_tokens"] = target.max_tokens
        if target.route == PLAIN:
            return await self._client.completions.create(prompt=prompt, **how)
        messages = [{"role": "user", "content": prompt}]
        return await self._client.chat.completions.create(messages=messages, **how)


async def collect(options: argparse.Namespace) -> int:
    """Collect until everything is there; returns the exit status, 130 when interrupted."""
    prompts = read_prompts(options.prompts, per_source=options.per_source, seed=options.seed)
    root = options.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with openai.AsyncOpenAI(
        base_url=f"{root}/v1", api_key=key, timeout=TIMEOUT_S, max_retries=4
    ) as client:
        model = options.model or (await client.models.list()).data[0].id
        before, after = ("", "") if options.plain else await template_of(client, root, model)
        route = PLAIN if options.plain else CHAT
        how = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        target = Target(model=model, route=route, before=before, after=after, **how)
        file, done = open_outputs(options.output, target)
        todo = [
            (prompt, sample)
            for prompt in prompts[: options.limit]
            for sample in range(options.samples)
            if (prompt.key, sample) not in done
        ]
        print(f"{model}: {len(todo)} outputs to collect, {len(done)} there already")
        with file:
            return await _collect(Collection(client, target, file), todo, options.concurrency)


async def _collect(collection: Collection, todo: list[tuple[Prompt, int]], concurrency: int) -> int:
    rest = iter(todo)
    everything = asyncio.gather(*(collection.ask_all(rest) for _ in range(concurrency)))

    def stop() -> None:
        """Dropping the outputs in flight at once would favour short ones."""
        if collection.is_stopped:
            everything.cancel()
        collection.is_stopped = True
        print("finishing the outputs in flight; another Ctrl-C drops them", flush=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await everything
    print(f"{collection.num_done} outputs, {collection.num_refused} prompts refused")
    return 130 if collection.is_stopped else int(not collection.num_done and bool(todo))


def main() -> int:
    options = options_of()
    try:
        return asyncio.run(collect(options))
    except (ConfigError, openai.OpenAIError) as error:
        print(f"{options.url}: {error}; the same command continues from here")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
