"""What stock vLLM passes must pass through us: the comparison, and its table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Row:
    """One suite: tests that stock passes, and those of them that do not pass through us."""

    suite: str
    stock: int
    ours: int
    explained: tuple[str, ...]
    unexplained: tuple[str, ...]


def passed(outcomes: Mapping[str, str]) -> list[str]:
    """Tests that passed."""
    return [test for test, outcome in outcomes.items() if outcome == PASSED]


def is_in(test: str, files: Iterable[str]) -> bool:
    """Whether a test is in one of these files or folders."""
    return any(test == each or test.startswith((f"{each}::", f"{each}/")) for each in files)


def compare(
    expected: Mapping[str, Collection[str]],
    ours: Mapping[str, Mapping[str, str]],
    allowed: Mapping[str, str],
) -> list[Row]:
    """One row per suite of `expected`, which has the tests that stock passes. A test that did not
    run differs; `allowed` has a reason for each test that may."""
    rows = []
    for suite, tests in expected.items():
        outcomes = ours.get(suite, {})
        failing = [test for test in tests if outcomes.get(test) != PASSED]
        rows.append(
            Row(
                suite,
                len(tests),
                len(tests) - len(failing),
                tuple(test for test in failing if test in allowed),
                tuple(test for test in failing if test not in allowed),
            )
        )
    return rows


def table(rows: Iterable[Row]) -> str:
    """The rows for people to read, with every difference by name."""
    lines = [f"{'suite':<16} {'passed by stock':>15} {'passed by us':>13} {'differences':>12}"]
    for row in rows:
        differences = len(row.explained) + len(row.unexplained)
        lines.append(f"{row.suite:<16} {row.stock:>15} {row.ours:>13} {differences:>12}")
    for row in rows:
        lines += [f"  allowed: {test}" for test in row.explained]
        lines += [f"  FAILED:  {test}" for test in row.unexplained]
    return "\n".join(lines)


def read_allowed(text: str) -> dict[str, str]:
    """Lines `TEST  # REASON`; ValueError for a line without a reason."""
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        test, mark, reason = line.partition("  # ")
        if not mark or not reason.strip():
            raise ValueError(f"a difference without a reason: {line}")
        found[test.strip()] = reason.strip()
    return found
