"""What tests of the page share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.report.builders import ORDER, SATURATION, SVG, cells, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some results, one that cannot be read, one without what it should have."""
    made = tmp_path / "suite"
    put(made, "order", ORDER)
    (made / "order" / "order.svg").write_text(SVG)
    put(made, "saturation", SATURATION)
    (made / "saturation" / "saturation.svg").write_text("<svg")
    put(made, "dispatch", '{"instances": ')
    put(made, "admission", {"conditions": {}})
    cells(made)
    row = {"experiment": "e1", "group": "lpld, roce", "metric": "jct_mean_s", "values": [0.6]}
    put(made, "paper", {
        "conditions": {"profile": "<b>opt-13b</b>"},
        "rows": [{**row, "system": "tetri"}, {**row, "system": "vllm-2023", "values": [1.0]}],
    })  # fmt: skip
    return made
