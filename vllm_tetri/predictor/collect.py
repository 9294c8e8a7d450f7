"""``vllm-tetri predictor collect``: how long a model's answers really are.

Every prompt is sent to an OpenAI endpoint; the answer's length goes into a file, its
text does not. Ctrl-C lets the answers under way end, a second one drops them; a kill
drops them too. The same command goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_tetri.errors import INTERRUPTED, ConfigError
from vllm_tetri.predictor.answers import Answer, AnswersFile, Target
from vllm_tetri.predictor.endpoint import CHAT, PLAIN, Endpoint, EndpointGone, Refused
from vllm_tetri.predictor.prompts import Prompt, mixed, read_source

_REFRESH_S = 0.5
_LINE_EVERY = 100  # answers, where the output is a file and shows no bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("prompts", type=Path, nargs="+", metavar="PROMPTS", help="files or folders of prompts")
    add("--url", default="http://127.0.0.1:8000", help="endpoint of the target model (%(default)s)")
    add("--model", default="", help="name of the target model (the first one served)")
    add("--output", type=Path, default=Path("answers.jsonl"), help="(%(default)s)")
    add("--temperature", type=float, default=0.7, help="of sampling (%(default)s)")
    add(
        "--max-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="where answers are cut (%(default)s)",
    )
    add(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="answers per prompt (%(default)s)",
    )
    add("--limit", type=int, metavar="N", help="only the first N prompts of the random order")
    add("--per-source", type=int, metavar="N", help="at most N prompts of each file or folder")
    add("--seed", type=int, default=0, metavar="N", help="of the random order (%(default)s)")
    add(
        "--concurrency",
        type=int,
        default=32,
        metavar="N",
        help="prompts under way at a time (%(default)s)",
    )
    add("--plain", action="store_true", help="no chat template: text completions of the prompts")


def run(options: argparse.Namespace) -> int:
    """Collect until everything is there; 130 when interrupted."""
    _check(options)
    prompts = _prompts(options)
    return asyncio.run(_collect(options, prompts))


def _check(options: argparse.Namespace) -> None:
    for name in ("max_tokens", "samples", "limit", "per_source", "concurrency"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not 0 <= options.temperature <= 2:
        raise ConfigError(f"--temperature {options.temperature}: must be within 0 and 2")
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no folder {options.output.parent}")


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    sources = [read_source(path) for path in options.prompts]
    for source in sources:
        empty = f", {source.num_empty} items without one" if source.num_empty else ""
        print(f"{source.name}: {len(source.texts)} prompts{empty}")
    return mixed(sources, per_source=options.per_source, seed=options.seed)[: options.limit]


async def _collect(options: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        endpoint = Endpoint(session, options.url)
        target = await _target(options, endpoint)
        with AnswersFile(options.output, target) as file:
            todo = [
                (prompt, sample)
                for prompt in prompts
                for sample in range(options.samples)
                if (prompt.key, sample) not in file.done
            ]
            total = len(prompts) * options.samples
            print(
                f"{target.model}: {total} answers wanted of {len(prompts)} prompts, "
                f"{total - len(todo)} there already"
            )
            collection = _Collection(endpoint, target, file, iter(todo))
            return await _with_progress(collection, total, total - len(todo), options.concurrency)


async def _target(options: argparse.Namespace, endpoint: Endpoint) -> Target:
    served = await endpoint.model()
    model = options.model or served
    before, after = ("", "") if options.plain else await endpoint.template(model)
    return Target(
        model=model,
        route=PLAIN if options.plain else CHAT,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        before=before,
        after=after,
    )


@dataclass(slots=True)
class _Collection:
    """What is left to ask, shared by all askers."""

    endpoint: Endpoint
    target: Target
    file: AnswersFile
    todo: Iterator[tuple[Prompt, int]]
    num_done: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    is_stopped: bool = False
    refused: list[str] = field(default_factory=list)

    async def ask_all(self) -> None:
        """One asker: one prompt after the other."""
        for prompt, sample in self.todo:
            if self.is_stopped:
                return
            try:
                length = await self.endpoint.length(prompt.text, self.target)
            except Refused as error:
                self.refused.append(str(error))
                continue
            self.file.add(
                Answer(
                    key=prompt.key,
                    source=prompt.source,
                    prompt=prompt.text,
                    prompt_tokens=length.prompt_tokens,
                    sample=sample,
                    tokens=length.tokens,
                    finish=length.finish,
                )
            )
            self.num_done += 1
            self.num_tokens += length.tokens
            self.num_cut += length.finish == "length"

    def summary(self) -> str:
        """One line about the answers of this run."""
        mean = self.num_tokens / max(self.num_done, 1)
        cut = f"{self.num_cut} cut at {self.target.max_tokens}"
        text = f"{self.num_done} answers, {mean:.0f} tokens each, {cut}"
        if self.refused:
            text += f"; {len(self.refused)} refused, the first with: {self.refused[0]}"
        return text

    def stopped(self) -> str:
        """The same, for a run that ended early."""
        return f"stopped after {self.summary()}; the same command goes on from here"


async def _with_progress(collection: _Collection, total: int, done: int, concurrency: int) -> int:
    askers = [asyncio.create_task(collection.ask_all()) for _ in range(concurrency)]
    everything = asyncio.gather(*askers)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, collection, everything)
    try:
        await _show(collection, everything, total, done)
        everything.result()
    except asyncio.CancelledError:
        collection.is_stopped = True
    except EndpointGone as error:
        raise EndpointGone(f"{error}; {collection.stopped()}") from error
    finally:
        everything.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
    print(collection.stopped() if collection.is_stopped else collection.summary())
    if collection.is_stopped:
        return INTERRUPTED
    return 0 if collection.num_done or not collection.refused else 1


def _stop(collection: _Collection, everything: asyncio.Future[list[None]]) -> None:
    """First time: nothing new. Dropping the answers under way would favour short ones."""
    if collection.is_stopped:
        everything.cancel()
        return
    collection.is_stopped = True
    print("finishing the answers under way; once more drops them", flush=True)


async def _show(
    collection: _Collection, everything: asyncio.Future[list[None]], total: int, done: int
) -> None:
    """A bar on a terminal, else a line now and then."""
    console = Console()
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    said = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=total, completed=done)
        while not everything.done():
            await asyncio.wait([everything], timeout=_REFRESH_S)
            bar.update(
                shown,
                completed=done + collection.num_done + len(collection.refused),
                description=f"{collection.num_tokens} tokens",
            )
            if not console.is_terminal and collection.num_done >= said + _LINE_EVERY:
                said = collection.num_done
                print(collection.summary(), flush=True)
