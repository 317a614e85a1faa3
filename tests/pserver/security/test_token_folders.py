"""Where a launch keeps its job's keys, whoever was there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pserver.security import tokens
from pserver.security.tokens import Role, Secret

PORT = 6174


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


def taken(temporary: Path, how: str) -> Path:
    """This user's folder there, as another user may have made it."""
    path = temporary / f"pserver-{os.geteuid()}"
    if how == "open to others":
        path.mkdir()
        path.chmod(0o777)
    elif how == "a file":
        path.write_text("")
    else:
        path.symlink_to(temporary / "elsewhere")
    return path


@pytest.mark.parametrize("how", ["open to others", "a file", "a link"])
def test_a_folder_of_another_user_s_stops_nothing(
    temporary: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one is made, which the next launch takes again, and in which commands look; nothing
    is written into the other's.
    """
    path = taken(temporary, how)
    own = tokens.folder({})
    held = tokens.LockedFiles(own)
    held.file(tokens.name_of(PORT), Secret.make())
    found = tokens.published(PORT, {})

    assert own != path and own.name.startswith(f"{path.name}-")
    assert own.stat().st_mode & 0o777 == 0o700 and tokens.folder({}) == own
    assert found == own / f"{PORT}.token"
    assert tokens.read(str(found)).role is Role.OPERATOR
    assert str(path) in caplog.text and (how != "open to others" or not list(path.iterdir()))
    held.remove()


def test_without_one_there_is_one_folder(temporary: Path) -> None:
    """Of the user's number."""
    assert tokens.folder({}) == temporary / f"pserver-{os.geteuid()}"
    assert [each.name for each in temporary.iterdir()] == [f"pserver-{os.geteuid()}"]
