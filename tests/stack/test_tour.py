"""Tests that the notebook in examples/ runs from its first to its last cell."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOUR = Path(__file__).parent.parent.parent / "examples" / "tour.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
def test_the_tour_routes_trains_audits_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(TOUR.parent.parent / "src"))
    notebook = nbformat.read(TOUR, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "output head" in text
    assert "most loaded rank" in text
    assert "nothing found: this step was Muon's" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
