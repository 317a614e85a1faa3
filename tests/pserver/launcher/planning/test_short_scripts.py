"""A probe of a script that ends too soon, or of a window in which nothing was sent, says so."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pserver.launcher.planning.cost import Measured
from pserver.launcher.planning.plan import ProbeFailed, _Run


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "the script is too short: .* then 2 s of them .--window.; let it train for longer"),
        (3, "its trainer ended with status 3 before enough steps: no such file"),
    ],
)
def test_a_probe_says_how_its_script_has_ended(tmp_path: Path, status: int, said: str) -> None:
    """One that came to its end is no failure of the script's: it is short."""
    run = _Run(cast(Any, None), tmp_path, time.monotonic() + 60.0)
    (tmp_path / "trainer 0").write_text("step 1\nno such file\n")
    run._processes["trainer 0"] = cast(Any, SimpleNamespace(poll=lambda: status, pid=1))

    with pytest.raises(ProbeFailed, match=said):
        run.measured(tmp_path / "measured.json", 2.0)


def test_a_window_without_a_message_is_no_figure(tmp_path: Path) -> None:
    """Of a k-step mode whose steps are long: an exchange would be left out."""
    run = _Run(cast(Any, None), tmp_path, time.monotonic() + 60.0)
    run._processes["trainer 0"] = cast(Any, SimpleNamespace(poll=lambda: None, pid=1))
    path = tmp_path / "measured.json"
    Measured(
        *(30, 0.2, 0.001, 0.2, 0.001, 0.0, 0.0, (0.0,), (0.0,), (0.0,), (0.0,)),
        begun=1.0,
        ended=7.0,
    ).write(str(path))

    with pytest.raises(ProbeFailed, match="no message was sent in 30 steps; a longer --window"):
        run.measured(path, 6.0)
