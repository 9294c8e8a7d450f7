"""The table of models in the README is what the last results say."""

from __future__ import annotations

import json

from tests.models.run import BEGIN, END, README, RESULTS, table


def test_the_readme_has_the_table_of_the_results() -> None:
    _, written = README.read_text().split(BEGIN)
    written = written.partition(END)[0]
    results = json.loads(RESULTS.read_text())["models"]
    assert written == table(results)
    words = {verdict["verdict"] for found in results.values() for verdict in found.values()}
    assert words <= {"equal", "aggregated", "refused", "no cache", "not on CPU", "unstable"}
