"""Hook of mkdocs (mkdocs.yml): pages that are generated, and man pages.

README.md becomes the first page, CHANGELOG.md the last, and the parsers of the command line become
a page of reference and, in build/man, a man page per command.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from argparse_manpage.manpage import Manpage
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from vllm_tetri import __version__, cli
from vllm_tetri.engine.plugin import add_options

ROOT = Path(__file__).parent.parent
COLUMNS = "100"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    readme = (ROOT / "README.md").read_text()
    generated = {
        "index.md": readme.replace("](docs/", "]("),
        "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("),
        "commands.md": commands_page(),
    }
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name files of the repository that are no pages, where a page links to them."""
    return re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the man pages beside the site."""
    folder = Path(config.site_dir).parent / "man"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in man_pages().items():
        (folder / f"{name}.1").write_text(page)


def commands_page() -> str:
    """Return the reference of all commands and of our options of `vllm serve`, in Markdown."""
    os.environ["COLUMNS"] = COLUMNS
    serve = argparse.ArgumentParser(prog="vllm serve", usage=argparse.SUPPRESS, add_help=False)
    add_options(serve)
    parts = ["# Commands", "", "Generated from what `--help` prints.", ""]
    for command in cli.COMMANDS:
        parser, _ = cli.parser_of(command)
        parts += [f"## {parser.prog}", "", "```text", parser.format_help().strip(), "```", ""]
    parts += ["## vllm serve --role", "", "```text", serve.format_help().strip(), "```", ""]
    return "\n".join(parts)


def man_pages() -> dict[str, str]:
    """Return the man pages of section 1 by name: the overview and one per command."""
    root = argparse.ArgumentParser(
        prog=cli.PROGRAM,
        usage=f"{cli.PROGRAM} COMMAND [OPTIONS]",
        description=cli.overview().partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    summary = "disaggregated prefill and decode on vLLM"
    pages = {cli.PROGRAM: _man_page(root, cli.PROGRAM, summary)}
    for command in cli.COMMANDS:
        name = "-".join([cli.PROGRAM, *command.name.split()])
        pages[name] = _man_page(cli.parser_of(command)[0], name, command.summary)
    return pages


def _man_page(parser: argparse.ArgumentParser, name: str, summary: str) -> str:
    facts = {"project_name": cli.PROGRAM, "version": __version__, "manual_title": "vllm-tetri"}
    page = Manpage(parser, facts | {"description": summary})
    page.prog = name  # a page's name has no spaces
    return str(page)
