"""The promises of a place for files: a folder, an object store, a file system behind a URL.

A new place is one more of PLACES.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pserver.checkpoint import checkpoint
from pserver.storage.local import InUse, LocalPlace
from pserver.storage.place import Place, place_at, relative
from pserver.storage.remote import RemotePlace
from tests.support.stores import BUCKET


class Folder(LocalFileSystem):
    """A file system behind a URL, as HDFS is one: it has folders, and a rename."""

    protocol = "folder"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("folder://"))


fsspec.register_implementation("folder", Folder, clobber=True)
PLACES: dict[str, Callable[[Path, str], str]] = {
    "disk": lambda folder, name: str(folder / name),
    "memory": lambda folder, name: f"memory://{name}",
    "file system": lambda folder, name: f"folder://{folder / name}",
    "s3": lambda folder, name: f"s3://{BUCKET}/jobs/{name}",
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.processes) if kind == "s3" else kind for kind in PLACES
]
BODY = bytes(range(256)) * 5


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a place that is not there yet."""
    if request.param == "s3":
        for key, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(key, value)
    return PLACES[request.param](tmp_path, secrets.token_hex(4))


@pytest.fixture
def place(path: str) -> Place:
    """The place."""
    return place_at(path)


# ---- files ----


def test_a_place_that_is_not_there_is_empty(place: Place) -> None:
    """Of a file that is missing there is no size; it can be removed, and not be read."""
    assert place.names() == place.directories() == [] and place.size("x") is None
    place.remove("x")
    with pytest.raises(FileNotFoundError):
        place.read("x")
    with pytest.raises(FileNotFoundError):
        place.checksums("x", [1])
    place.write("y", b"")
    with pytest.raises(FileNotFoundError):
        place.read("x")
    place.remove("x")
    assert place.names() == ["y"] and place.size("x") is None


def test_what_was_written_is_read(place: Place) -> None:
    """Whole, and in parts, which may end with the file; checksums are of parts in a row."""
    place.write("x", BODY)
    place.write("empty", b"")

    assert place.read("x") == BODY and place.size("x") == len(BODY)
    assert place.read("x", 10, 300) == BODY[10:310]
    assert place.read("x", len(BODY) - 5, 300) == BODY[-5:]
    assert place.read("empty") == b"" and place.size("empty") == 0
    first, rest = place.checksums("x", [300, len(BODY) - 300])
    place.write("rest", BODY[300:])
    place.write("first", BODY[:300])
    assert [first] == place.checksums("first", [300])
    assert [rest] == place.checksums("rest", [len(BODY)])
    assert sorted(place.names()) == ["empty", "first", "rest", "x"]


def test_a_file_that_grows_is_there_when_it_is_whole(place: Place) -> None:
    """Of one that is given up nothing stays, once it is removed."""
    for name in ("whole", "given up"):
        file = place.create(name)
        for piece in (BODY, memoryview(BODY)[:7], b""):
            file.write(piece)
        if name == "whole":
            file.finish()
            continue
        file.give_up()
        place.remove(name)
    place.flush()

    assert place.names() == ["whole"] and place.read("whole") == BODY + BODY[:7]


def test_tensors_are_read_as_they_were_written(place: Place) -> None:
    """With their size and checksum; they are taken out on the way."""
    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "ids": torch.arange(5),
        "none": torch.zeros(0, 2, dtype=torch.bfloat16),
    }
    given = dict(tensors)
    size, checksum = place.write_tensors("t", given)

    assert not given and size == place.size("t")
    assert place.checksums("t", [size]) == [checksum]
    found = place.tensors("t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_file_is_replaced_in_one_moment(place: Place) -> None:
    """The first one too; nothing else of it stays."""
    assert place.replace("x", b"1")
    assert place.replace("x", b"22", b"1") and place.read("x") == b"22"
    place.tidy()
    assert place.names() == ["x"] and place.size("x") == 2


def test_a_second_writer_is_noticed(place: Place) -> None:
    """Before it begins, where there are locks; where it would replace what it has not seen, where
    there are none.
    """
    lock = place.lock()
    if lock is not None:
        with pytest.raises(InUse, match=f"process {os.getpid()} on .* writes checkpoints"):
            place.lock()
        lock.release()
        again = place.lock()
        assert again is not None
        again.release()
        assert place.names() == []
        return
    assert not place.replace("x", b"mine", b"theirs") and place.names() == []
    place.write("x", b"theirs")
    assert not place.replace("x", b"mine")
    assert not place.replace("x", b"mine", b"another's")
    assert place.read("x") == b"theirs"
    assert place.replace("x", b"mine", b"theirs") and place.read("x") == b"mine"


class Stopped(BaseException):
    """Stands for a process that stops."""


@pytest.mark.parametrize("error", [Stopped, RuntimeError])
def test_a_replacement_that_stops_leaves_the_old_file(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Also one that fails, whatever the driver raises: an error that names the place."""
    place.write("x", b"old")

    def stops(*args: Any, **kwargs: Any) -> None:
        raise error("quota")

    with monkeypatch.context() as patch:
        if isinstance(place, RemotePlace):
            for call in ("pipe_file", "mv"):
                patch.setattr(place._store, call, stops)
            expected: tuple[type[BaseException], ...] = (OSError, Stopped)
        else:
            patch.setattr("pserver.storage.local.os.replace", stops)
            expected = (error,)
        with pytest.raises(expected) as raised:
            place.replace("x", b"new", b"old")
    place.tidy()

    assert place.read("x") == b"old" and place.names() == ["x"]
    if isinstance(place, RemotePlace) and error is RuntimeError:
        assert f"{place}: RuntimeError: quota" in str(raised.value)


def test_places_are_found_from_one_another(place: Place, path: str, tmp_path: Path) -> None:
    """Below, beside and above; a folder with files is listed where it is."""
    below = place.at("a/b")
    below.write("x", b"1")
    place.write("y", b"2")

    assert place.names() == ["y"] and place.directories() == ["a"]
    assert place.at("a").directories() == ["b"] and place.at("a/b").names() == ["x"]
    assert relative(place, below) == "a/b" and below.at("../..") == place
    assert below.at("../c").path == place.at("a/c").path
    assert place_at(below.path).read("x") == b"1" and place.writable()
    other = place_at("memory://other") if isinstance(place, LocalPlace) else place_at(tmp_path)
    for one, another in ((place, other), (other, place)):
        with pytest.raises(ValueError, match="expected a place in the store of"):
            relative(one, another)


# ---- checkpoints ----


OLD = {"w": torch.arange(6.0).reshape(2, 3)}
NEW = {"w": torch.arange(6.0).reshape(2, 3) + 1, "b": torch.ones(2)}


def test_what_was_saved_is_what_is_loaded(path: str) -> None:
    """A second save replaces the first, and leaves nothing of it."""
    checkpoint.save(path, OLD, {"step": 1})
    checkpoint.save(path, NEW, {"step": 2})
    loaded, meta = checkpoint.load(path)

    assert meta == {"step": 2} and loaded.keys() == NEW.keys()
    assert all(torch.equal(loaded[name], NEW[name]) for name in NEW)
    assert len(place_at(path).names()) == 2


def test_a_chain_is_read_and_compacted(path: str) -> None:
    """A delta names its base relative to itself; both stay readable while they are needed."""
    ids = np.arange(4)

    def rows(value: float, count: int) -> list[dict[str, np.ndarray]]:
        return [{"ids": ids[:count], "values": np.full((count, 2), value, np.float32)}]

    with checkpoint.writing(f"{path}/full") as writer:
        writer.tensors(OLD)
        writer.chunks("emb", rows(1.0, 4))
        full = writer.commit({"step": 1})
    with checkpoint.writing(f"{path}/delta", full) as writer:
        writer.tensors(NEW)
        writer.chunks("emb", rows(2.0, 1))
        writer.commit({"step": 2})
    checkpoint.save(f"{path}/full", OLD, {"step": 1})  # the delta's base keeps its files
    checkpoint.compact(f"{path}/delta", f"{path}/whole")

    for name in ("delta", "whole"):
        chunks = list(checkpoint.reading(f"{path}/{name}").chunks("emb"))
        found = {
            own: value
            for chunk in chunks
            for own, value in zip(chunk["ids"], chunk["values"][:, 0], strict=True)
        }
        assert found == {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0}


def test_a_path_that_leads_nowhere_is_an_error(path: str) -> None:
    """It names the path."""
    with pytest.raises(OSError) as raised:
        checkpoint.load(path)
    assert path.rpartition("/")[2] in str(raised.value)
