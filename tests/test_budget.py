"""How large things may become. Raising a number here is a line of the change, with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tetri.cli import COMMANDS as ALL_COMMANDS
from vllm_tetri.config import options

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_tetri"

# Most lines of Python (and of stubs, C++ and headers) below a path. The folders' numbers leave room
# for what moves between them, the package's does not; when all that is planned is in, it may have
# 26,000. docs/adr/0012-one-road.md has the sizes that the review of November 2026 asked for: the
# package had 20,500. Serving all that stock vLLM serves added up to 1,700: identity by checkpoint,
# a sized arena, a range of vLLM versions, stock's routes, usage and metrics, several hosts.
# The models that people run added to the engine (groups of a KV cache, media, drafts) and to the
# tests (tiny checkpoints of many families, each compared with stock; quantised weights and KV;
# every difference of two identities). Instances of other tensor-parallel sizes added 130 lines to
# the transport (parts of slots, and what is read of them), adapters 250 to router and engine.
# Model runners and scheduling as on a GPU added 300 to the tests. Links that move KV of devices
# (DMA, CUDA IPC, NIXL), and the tests that a GPU host runs, add to the transport, the engine
# and the tests. Knowing what is cached where added 650: reports of instances, which blocks a
# prompt has, and prices of what is not cached. Sending only what the receiver lacks added 120, a
# third of it pins, and 480 of tests. NCCL added 450: both ends of a link to which both have to
# contribute; its fake, and tests of every state of it, 600. That a placement looks at few of many
# instances added 40 to the policies. Fetching prefixes added 450: the request to a holder, its
# price, and a prompt that waits for it; tests of what can go wrong in them, 720. Prefix caches of
# the simulator (a cache, names of blocks, what modes know of them) added 240, their tests and those
# of other routers' rules 530, and these rules, the benchmark and its table 400 to the benchmarks.
# A pool of blocks that leave the prefix cache added 540: its index, orders that copy, loads from
# it, and what routers and operators are told; 600 to the tests. With these the package is above
# the 26,000; the predictor's server, protocol and training are to leave it. Fetches of the
# simulator (modes that plan them, holders, prompts that wait) added 90, and 150 of tests. The
# cheapest instances, found as by sorting them whatever was sent, added 44 to the tests.
# Conversations counted in blocks, and of a second model, added 26 to the benchmarks. A claim on
# the default control port, for clusters that start at once, added 10, and 19 of tests. Tests of
# where a prompt goes whose prefix can be fetched added 30.
# The pool for layers with windows, and what lies in the prefix cache behind a hit, added 111 to the
# engine and 158 to its tests. That instances report of windows what vLLM has hits on added 38, and
# 54 of tests. That a process group is killed only once after its end added 4, and 46 of tests; that
# a forked engine lets go of its server's port, 18, and 11 of tests. The paper's classifier, its
# process and protocol left for examples/predictor, and the length head came, which reads hidden
# states: 191 to the engine, 2 in all, 161 and 16 to its evaluation, 322 of tests, 300 words. What a
# GPU showed added 7, and steps of `make gpu` 81 to the tests, 230 words of what ran there. An order
# in which requests enter the batch added 45 (an option of buckets left for it), 130 to what says
# what lengths are worth, 196 of tests with those of two more waits for events, 550 words. A
# prediction that is a distribution took the histograms of buckets with it; corrections, routes and
# maps that instances share added 154, rivals of the head 50, tests of them 110, 440 words. Outputs
# that move added 1,200: the side that an output leaves, the router's part, what a choice, a tool
# call or reasoning begins with, and which move; 60 to the simulator, 900 of tests, 200 to the
# benchmarks, 720 words. Copies of running outputs added 270 (their policy 74, the router's part
# 200), 230 of tests, 200 words. Explanations and traces of requests added 580 (what engines tell
# 80, history, parts and spans 430, the command 60), 350 of tests, 280 words. The page and `top`
# added 390 (HTML is not counted), 630 of tests; metrics that have all their series, and targets,
# 100, 490 of tests; names of several routers 125, the chart's tests 860, 700 words; the picker 444,
# 750 of tests; nodes of Ray 250, scaling between bounds 380, 500 of tests; progress 50, wheels,
# images and the site 360 of tests. Words of all these: 2,300. A reading of the whole package took
# 170 away. What a router's last requests would have cost otherwise added 210, 100 of benchmarks, a
# command; the table of papers 4,600 words, a page, 120 of tests; FastServe's queue 130; orders of
# moves at once 40, and 50 of tests. Events that go to a client's transport at once added 97. That a
# node with many instances may die under a request added 6, and 16 of tests. The transport's
# benchmark left with its command for the laboratory: 250. A
# SIGTERM to a process that ends added 3; kills of both sides of moves and of the router, 91 of
# tests; a verdict on pauses of moves 5, and 19 of tests. Cheaper placements (rows with slots,
# offers priced when asked for, no cachetools) added 30, and 19 of tests; times of steps 157 to the
# benchmarks, and 56 of tests of keys that are kept; words of these 90. What differs
# in an output added 10 to the tests; weights in two precisions 33, and 45 words. Sections of papers
# as rivals (rules of refusing, executors of attention, a ratio, ageing, pipelines) and the command
# that runs them added 767 to the benchmarks, a refusal after the prompt 15 to the simulator, 347 of
# tests, a table of 290 words. Plans with a profile of each role, nodes, and what is to be least
# added 171 to the simulator, stages of a pipeline 197 to the benchmarks, tests of both 182, their
# words and figures 392. Figures 3 to 5 on engines (300),
# classes of a data set (130), and thirteen experiments stated, simulated and measured (430) added
# 890 to the benchmarks, 280 of tests, and a table and its words (600). AMX that is asked for
# added 4, and 26 of tests.
FOLDERS = {
    "vllm_tetri": 31_218,
    "vllm_tetri/policy": 4_043,
    "vllm_tetri/control": 1_321,
    "vllm_tetri/transport": 2_208,
    "vllm_tetri/engine": 6_769,
    "vllm_tetri/router": 7_546,
    "vllm_tetri/predictor": 472,
    "vllm_tetri/launch": 2_008,
    "vllm_tetri/sim": 3_640,
    "examples/benchmarks": 9_020,
    "examples/predictor": 1_820,
    "csrc": 7_914,
    "tests": 49_658,
}
MODULES = {"vllm_tetri/router": 29, "vllm_tetri/engine": 27, "vllm_tetri/policy": 20}
FILE_LINES = 400
FUNCTION_LINES = 60
CONSTRUCTOR_PARAMETERS = 8
SERVE_OPTIONS = 26
COMMANDS = 16
COMMANDS_IN_HELP = 15
DOC_PAGES = 17

DOC_WORDS = 31_926  # tables of models, links, layers, caches and conversations have 900
ARCHITECTURE_WORDS = 900

SUFFIXES = {".py", ".pyi", ".cc", ".h"}


def sources(folder: str) -> list[Path]:
    """Source files below a folder, without caches."""
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_its_budget(folder: str) -> None:
    assert sum(map(lines_of, sources(folder))) <= FOLDERS[folder]


@pytest.mark.parametrize("folder", MODULES)
def test_a_folder_has_few_modules(folder: str) -> None:
    names = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(names) <= MODULES[folder], names


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines_of(path)
        for path in PACKAGE.rglob("*.py")
        if lines_of(path) > FILE_LINES
    }
    assert long == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(PACKAGE)}:{node.name}": size
        for path in PACKAGE.rglob("*.py")
        for node in functions_of(path)
        if (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_constructors_take_few_parameters() -> None:
    wide = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}": count
        for path in PACKAGE.rglob("*.py")
        for node in functions_of(path)
        if node.name == "__init__"
        and (count := len(node.args.args) + len(node.args.kwonlyargs) - 1) > CONSTRUCTOR_PARAMETERS
    }
    assert wide == {}


def test_docs_stay_readable() -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= DOC_PAGES
    words = sum(len(page.read_text().split()) for page in [*pages, ROOT / "README.md"])
    assert words <= DOC_WORDS


def test_the_architecture_fits_one_sitting() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().split()) <= ARCHITECTURE_WORDS


def test_every_module_that_the_docs_name_exists() -> None:
    named = {
        found
        for page in (ROOT / "docs").glob("*.md")
        for found in re.findall(
            r"`((?:vllm_tetri|csrc|examples|tests)/[\w./-]+)`", page.read_text()
        )
    }
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_command_line_stays_small() -> None:
    assert len(ALL_COMMANDS) <= COMMANDS
    assert sum(bool(command.group) for command in ALL_COMMANDS) <= COMMANDS_IN_HELP
    assert len(options()) + 1 <= SERVE_OPTIONS  # --tetri-config is no field
