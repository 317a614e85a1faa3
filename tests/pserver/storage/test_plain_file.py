"""Files in folders that others may write to: no link is followed, nothing but a file is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.job_log import files
from pserver.job_log.files import WriteAheadLog
from pserver.job_log_pb2 import OwnEntry
from pserver.storage import plain_file
from pserver.storage.local import LocalPlace
from pserver.storage.plain_file import NotPlain

PRECIOUS = b"precious"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user's, elsewhere."""
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    return path


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def further(path: Path, victim: Path) -> None:
    os.link(victim, path)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def endless(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [linked, pipe, folder, endless])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, victim: Path, make: Callable[[Path, Path], None]
) -> None:
    """Neither a link, nor what would make us wait or read for ever."""
    make(tmp_path / "x", victim)
    with pytest.raises(NotPlain, match="expected an ordinary file"):
        plain_file.reading(tmp_path / "x")
    assert plain_file.size(tmp_path / "x") is None


@pytest.mark.parametrize("make", [linked, further, pipe, folder])
def test_what_is_no_file_of_ours_is_not_written(
    tmp_path: Path, victim: Path, make: Callable[[Path, Path], None]
) -> None:
    """Not what a link leads to, nor a file with a further name."""
    make(tmp_path / "x", victim)
    with pytest.raises(OSError):
        plain_file.descriptor(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError):
        plain_file.new(tmp_path / "x")
    assert victim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("make", [linked, further])
@pytest.mark.parametrize("name", [".lock", "checkpoint.json"])
def test_a_save_writes_over_nobodys_file(
    tmp_path: Path, victim: Path, name: str, make: Callable[[Path, Path], None]
) -> None:
    """Links with the names that a save uses: it is refused, or takes their place."""
    place = tmp_path / "saved"
    place.mkdir()
    make(place / name, victim)
    try:
        checkpoint.save(place, {"w": torch.ones(2)}, {"step": 1})
    except OSError as error:
        assert str(place / name) in str(error)
    else:
        assert torch.equal(checkpoint.load(place)[0]["w"], torch.ones(2))
    assert victim.read_bytes() == PRECIOUS


def test_a_checkpoint_whose_file_is_a_link_is_not_read(tmp_path: Path) -> None:
    """Whatever it leads to."""
    checkpoint.save(tmp_path / "saved", {"w": torch.ones(2)}, {})
    (file,) = (tmp_path / "saved").glob("tensors-*")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        checkpoint.load(tmp_path / "saved")


def test_a_file_that_is_replaced_is_whole(tmp_path: Path, victim: Path) -> None:
    """A link in its place goes, and not what it leads to."""
    place = LocalPlace(tmp_path / "place")
    place.write("x", b"1")
    assert place.replace("x", b"2") and place.read("x") == b"2"
    place.remove("x")
    (tmp_path / "place" / "x").symlink_to(victim)
    assert place.replace("x", b"3") and place.read("x") == b"3"
    assert place.names() == ["x"] and victim.read_bytes() == PRECIOUS


def test_a_coordinators_log_follows_no_link(tmp_path: Path, victim: Path) -> None:
    """Neither where it is written, nor where it is read."""
    (tmp_path / "log.new").symlink_to(victim)
    (tmp_path / "log").symlink_to(victim)
    log = WriteAheadLog(str(tmp_path / "log"))
    with pytest.raises(NotPlain):
        list(files.read(str(tmp_path / "log")))
    log.begin([OwnEntry(plan="p")])
    log.append(OwnEntry(plan="x"))
    log.close()
    assert list(files.read(str(tmp_path / "log"))) == [OwnEntry(plan="p"), OwnEntry(plan="x")]
    assert victim.read_bytes() == PRECIOUS
