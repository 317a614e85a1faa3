"""Transcripts of servers and trainers, command by command, held against
``tests/testdata/interaction/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interaction import interaction, ran
from tests.support.transcript import TESTDATA, compare

TRANSCRIPTS = sorted(path.stem for path in (TESTDATA / "interaction").glob("*.txt"))


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_an_interaction(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """Each command does and says what the transcript says."""
    text = (TESTDATA / "interaction" / f"{name}.txt").read_text(encoding="utf-8")
    with interaction(tmp_path) as made:
        found = ran(text, made.run)

    compare(request, f"interaction/{name}.txt", found)
