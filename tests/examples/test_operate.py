"""What an operator gets: the dashboard is the one that is made, and alerts say what to do."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OPERATE = ROOT / "examples" / "operate"


def test_the_dashboard_is_the_one_that_is_made() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", OPERATE / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.FILE.read_text()
    assert written == module.text(), "run python examples/operate/dashboard.py"
    panels = json.loads(written)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(x + width <= 24 for x, _, width, _ in places)
    for panel in panels:
        assert panel["type"] == "row" or all(each["expr"] for each in panel["targets"])
    # Every router tells the numbers and flips of every instance.
    assert not re.search(r"sum by \([^)]*\) \(rate\(tetri_(instance|flips)_", written)


def test_every_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    (group,) = yaml.safe_load((OPERATE / "rules.yml").read_text())["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("\n### Alerts\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(Tetri\w+)`", section)) == alerts.keys()
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["annotations"]["runbook"] == "docs/operations.md#alerts", name
