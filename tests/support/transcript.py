"""Transcripts: what must stay as it is, as text in ``tests/testdata/``.

``pytest --rewrite`` writes them anew.  Read the difference before it is committed: each line of it
has to be understood.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTDATA = Path(__file__).parents[1] / "testdata"


def compare(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """Holds ``text`` against the transcript ``tests/testdata/NAME``, or writes it there."""
    path = TESTDATA / name
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no transcript {name}: pytest --rewrite writes it"

    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()
