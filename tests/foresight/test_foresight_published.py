"""Tests of the table of published measurements: every row is complete, its predicted interval equals the one that the
cost model computes, and its field `inside` correctly states whether the measurement falls inside this interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published
import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "data" / "published.yaml").read_text())


def test_every_published_figure_is_in_the_table_with_a_reason() -> None:
    assert {row["id"].rstrip("ab") for row in ROWS} == {f"V{number}" for number in range(1, 21)}
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["measured"][0] <= row["measured"][1], row["id"]
        assert all(len(str(row[key])) > 3 for key in ("source", "setting", "quantity", "why")), row["id"]
        assert ("interval" in row) == ("inside" in row) == (row["id"] in published.COMPUTED), row["id"]


@pytest.mark.parametrize("row", [row for row in ROWS if "interval" in row], ids=lambda row: row["id"])
def test_the_intervals_of_the_table_are_what_is_computed(row: dict[str, Any]) -> None:
    compute, arguments = published.COMPUTED[row["id"]]
    low, high = compute(*arguments)
    assert [f"{low:.3g}", f"{high:.3g}"] == row["interval"]
    assert row["inside"] == (low <= row["measured"][1] and row["measured"][0] <= high)


def test_the_page_says_how_many_are_inside() -> None:
    inside = [row["inside"] for row in ROWS if "inside" in row]
    assert f"{sum(inside)} of {len(inside)} lie inside" in (ROOT / "docs" / "foresight.md").read_text()
