"""The page of PaddlePaddle's names, and what to write for each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transpiler.names.index import names

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_page_of_names_is_the_generated_one() -> None:
    """``python docs/index_of_names.py`` has been run since the last change."""
    spec = importlib.util.spec_from_file_location("index_of_names", DOCS / "index_of_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (DOCS / "index_of_names.md").read_text(encoding="utf-8")

    assert text == module.page()
    assert [name for name in names() if f"\n| `{name}` |" not in text] == []
