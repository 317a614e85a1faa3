"""The file to which server 0 writes what it alone knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pserver.job_log import files
from pserver.job_log.files import WriteAheadLog


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Those that it begins with first; without a last one that is torn."""
    path = tmp_path / "below" / "log"
    log = WriteAheadLog(str(path))
    log.begin([["plan", "f"]])
    log.append(["said", "topic", "a\nb"])
    log.close()
    with path.open("ab") as file:
        file.write(b'["said","tor')

    assert list(files.read(str(path))) == [["plan", "f"], ["said", "topic", "a\nb"]]
    assert (path.stat().st_mode & 0o777) == 0o600


def test_it_begins_anew_where_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step: who reads it meanwhile reads the former one."""
    monkeypatch.setattr(files, "SHORT", 3)
    path = str(tmp_path / "log")
    log = WriteAheadLog(path)
    log.begin([["plan"]])
    for number in range(5):
        assert not log.is_long
        log.append(["said", number])
    assert log.is_long
    former = files.read(path)
    assert next(former) == ["plan"]
    log.begin([["plan"], ["log", 7]])

    assert not log.is_long
    assert [entry[1] for entry in former] == [0, 1, 2, 3, 4]
    log.append(["said", 8])
    assert list(files.read(path)) == [["plan"], ["log", 7], ["said", 8]]


@pytest.mark.parametrize("text", [b"hello\n", b"{}\n", b"[]\n", b"[1]\n"])
def test_another_file_is_refused(tmp_path: Path, text: bytes) -> None:
    """Not read as a log."""
    (tmp_path / "log").write_bytes(text)

    with pytest.raises(ValueError):
        list(files.read(str(tmp_path / "log")))
