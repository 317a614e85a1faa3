"""docs/notebook.md as a notebook: its cells in a kernel, one after the other."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT, fences

pytestmark = pytest.mark.processes
PAGE = ROOT / "docs" / "notebook.md"
SECONDS = 240  # for one cell


@pytest.mark.timeout(300)
def test_the_page_is_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of Python is a cell, which prints what the page shows, and nothing beside it."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    cells, shown = list[Any](), list[str]()
    for fence in fences(PAGE):
        if fence.language == "python":
            cells.append(nbformat.v4.new_code_cell(fence.text))
            shown.append("")
        elif fence.language == "output":
            shown[-1] = fence.text
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        resources={"metadata": {"path": str(tmp_path)}},
    )

    client.execute()

    for cell, expected in zip(notebook.cells, shown, strict=True):
        printed = "".join(each.text for each in cell.outputs if each.output_type == "stream")
        same = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
        assert same, f"expected\n{expected}\ngot\n{printed}"
        assert {each.get("name") for each in cell.outputs} <= {"stdout"}
