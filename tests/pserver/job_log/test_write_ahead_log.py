"""The file to which server 0 writes what it alone knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pserver.job_log import files
from pserver.job_log.files import Damaged, WriteAheadLog
from pserver.job_log_pb2 import KeptText, OwnEntry

PLAN = OwnEntry(plan="f")


def said(text: str) -> OwnEntry:
    return OwnEntry(text=KeptText(key="topic", trainer=1, text=text))


def entries(path: Path) -> list[OwnEntry]:
    return list(files.read(str(path)))


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Those that it begins with first; without a last one that is torn, wherever."""
    path = tmp_path / "below" / "log"
    log = WriteAheadLog(str(path))
    log.begin([PLAN])
    begins = path.stat().st_size
    log.append(said("a\nb"))
    log.close()
    whole = path.read_bytes()

    assert entries(path) == [PLAN, said("a\nb")]
    assert (path.stat().st_mode & 0o777) == 0o600
    for end in range(begins, len(whole)):
        path.write_bytes(whole[:end])
        assert entries(path) == [PLAN]


def test_a_changed_byte_is_damage(tmp_path: Path) -> None:
    """Nothing behind it is read, and it is an error."""
    path = tmp_path / "log"
    log = WriteAheadLog(str(path))
    log.begin([PLAN, said("a"), said("b")])
    log.close()
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"topic")] ^= 1
    path.write_bytes(bytes(whole))

    read = files.read(str(path))
    assert next(read) == PLAN
    with pytest.raises(Damaged, match="entry 2 at byte .* is damaged"):
        next(read)


def test_it_is_written_anew_where_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step: who reads it meanwhile reads the former one, and what is appended meanwhile
    stands in both.
    """
    monkeypatch.setattr(files, "SHORT", 3)
    path = tmp_path / "log"
    log = WriteAheadLog(str(path))
    log.begin([PLAN])
    for number in range(5):
        assert not log.is_long
        log.append(said(f"{number}"))
    assert log.is_long
    log.keep_tail()
    assert not log.is_long
    file = log.write_beside([PLAN, said("all")])
    log.append(said("meanwhile"))
    former = files.read(str(path))
    assert next(former) == PLAN
    log.put_in_place(file, 2)

    assert [each.text.text for each in former] == [*"01234", "meanwhile"]
    log.append(said("8"))
    assert entries(path) == [PLAN, said("all"), said("meanwhile"), said("8")]


def test_one_that_is_closed_while_it_is_written_anew_stays(tmp_path: Path) -> None:
    """The other file is gone."""
    path = tmp_path / "log"
    log = WriteAheadLog(str(path))
    log.begin([PLAN])
    log.keep_tail()
    file = log.write_beside([PLAN, said("all")])
    log.close()
    log.put_in_place(file, 2)

    assert entries(path) == [PLAN] and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_leaves_the_present_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of the file that is written anew alone."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    log = WriteAheadLog(str(tmp_path / "log"))
    log.begin([PLAN])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(files, "_write", full)
        log.write_beside([PLAN])

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    log.drop_tail()
    log.append(said("a"))
    assert entries(tmp_path / "log") == [PLAN, said("a")]


def test_the_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its entries have another form; the error says which one, and what reads it."""
    (tmp_path / "log").write_bytes(b"pserver own 1\n")

    with pytest.raises(Damaged, match=r"expected .*own 2.*got .*own 1.*has written it"):
        entries(tmp_path / "log")


@pytest.mark.parametrize("text", [b"hello\n", b"{}\n", files.MAGIC, b"[1]\n"])
def test_another_file_is_refused(tmp_path: Path, text: bytes) -> None:
    """Not read as a log."""
    (tmp_path / "log").write_bytes(text)

    with pytest.raises(Damaged, match="expected a write-ahead log"):
        entries(tmp_path / "log")
