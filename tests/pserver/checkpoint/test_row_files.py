"""Promises of the files that hold the rows of all tables: few, each chunk found by its place, no
byte of them trusted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.checkpoint import Chunk
from pserver.checkpoint.manifest import FileChunk, packed
from pserver.storage.place import place_at

TABLES, CHUNKS, ROWS = 26, 3, 5
NAMES = [f"t{number}" for number in range(TABLES)]
OLD = Path(__file__).parents[2] / "testdata" / "checkpoints" / "format_3"


def chunk(table: str, number: int, mark: float = 1.0, count: int = ROWS) -> Chunk:
    """Rows whose values tell the table, the id and the save."""
    ids = np.arange(number * ROWS, number * ROWS + count)
    value = int(table[1:]) * 1000 + ids
    return {"ids": ids, "values": np.stack([value, value * 0 + mark], 1).astype(np.float32)}


def save(path: Path, base: checkpoint.Saved | None = None, mark: float = 1.0) -> checkpoint.Saved:
    """All rows, or, of every table, one."""
    with checkpoint.writing(path, base) as writer:
        writer.tensors({"w": torch.arange(3.0)})
        for name in NAMES:
            full = (chunk(name, number, mark) for number in range(CHUNKS))
            writer.chunks(name, full if base is None else [chunk(name, 1, mark, 1)])
        return writer.commit({})


def marks(path: Path, table: str) -> dict[int, float]:
    """id -> the save that the row is of."""
    found: dict[int, float] = {}
    for each in checkpoint.reading(path).chunks(table):
        assert np.array_equal(each["values"][:, 0], int(table[1:]) * 1000 + each["ids"])
        found |= dict(zip(each["ids"].tolist(), each["values"][:, 1].tolist(), strict=True))
    return found


def rows_file(path: Path) -> Path:
    (found,) = path.glob("rows-*")
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A full checkpoint."""
    save(tmp_path / "full")
    return tmp_path / "full"


def test_many_tables_are_three_files(tmp_path: Path) -> None:
    """The manifest, the tensors and all rows; as many for what only changed."""
    full = save(tmp_path / "full")
    assert len(list((tmp_path / "full").iterdir())) == 3
    save(tmp_path / "delta", full, 2.0)
    assert len(list((tmp_path / "delta").iterdir())) == 3
    expected = dict.fromkeys(range(CHUNKS * ROWS), 1.0)
    for name in NAMES:
        assert marks(tmp_path / "full", name) == expected
        assert marks(tmp_path / "delta", name) == expected | {ROWS: 2.0}
    checkpoint.compact(tmp_path / "delta", tmp_path / "whole")

    assert len(list((tmp_path / "whole").iterdir())) == 3
    assert marks(tmp_path / "whole", "t25") == expected | {ROWS: 2.0}


def test_a_large_file_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has reached its size; no chunk is in two."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1000)
    save(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("rows-*")]
    one = max(piece.size for piece in manifest.read(place_at(tmp_path)).tables["t0"])

    assert sum(size < 1000 for size in sizes) <= 1 and all(size < 1000 + one for size in sizes)
    assert len(sizes) == -(-TABLES * CHUNKS // -(-1000 // one))
    assert marks(tmp_path, "t25") == dict.fromkeys(range(CHUNKS * ROWS), 1.0)


def pieces(path: Path) -> Iterator[FileChunk]:
    for each in manifest.read(place_at(path)).tables.values():
        yield from each


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "torn: expected .* bytes, got"),
        (lambda path: path.unlink(), "lists it, and it is missing"),
    ],
    ids=["a byte less", "missing"],
)
def test_a_file_that_is_not_as_long_as_it_was_is_refused(
    saved: Path, harm: Callable[[Path], Any], message: str
) -> None:
    """It is named, before a row is read."""
    path = rows_file(saved)
    harm(path)

    with pytest.raises(ValueError, match=f"{path.name}: .*{message}"):
        checkpoint.reading(saved)


def swapped(tables: dict[str, Any]) -> None:
    """Two chunks have one another's place: each is a whole one, and the wrong one."""
    for key in ("offset", "size"):
        one, other = tables["t0"][0], tables["t1"][0]
        one[key], other[key] = other[key], one[key]


@pytest.mark.parametrize(
    "harm",
    [
        lambda tables: tables.pop("t4"),
        lambda tables: tables["t0"].append(tables["t0"][0]),
    ],
    ids=["a gap", "twice"],
)
def test_chunks_that_do_not_fill_their_file_are_refused(
    saved: Path, harm: Callable[[dict[str, Any]], Any]
) -> None:
    """Whatever the manifest says: each byte of a file is in one chunk, which is checked."""
    found = json.loads((saved / "checkpoint.json").read_text())
    harm(found["tables"])
    (saved / "checkpoint.json").write_bytes(packed(found))

    with pytest.raises(ValueError, match="expected chunks of tables that follow one another"):
        checkpoint.reading(saved)


@pytest.mark.parametrize(
    "harm",
    [
        lambda tables: tables["t0"][0].pop("offset"),
        lambda tables: tables["t0"][0].update(file="rows-0.chunks"),
    ],
    ids=["no offset", "another file"],
)
def test_chunks_that_are_none_are_refused(
    saved: Path, harm: Callable[[dict[str, Any]], Any]
) -> None:
    """The message says what is expected."""
    found = json.loads((saved / "checkpoint.json").read_text())
    harm(found["tables"])
    (saved / "checkpoint.json").write_bytes(packed(found))

    with pytest.raises(ValueError, match="expected each table's chunks in files that are listed"):
        checkpoint.reading(saved)


def test_chunks_in_one_another_s_place_are_refused(saved: Path) -> None:
    """They are whole, and of other rows."""
    found = json.loads((saved / "checkpoint.json").read_text())
    swapped(found["tables"])
    (saved / "checkpoint.json").write_bytes(packed(found))

    with pytest.raises(ValueError, match="checksum"):
        checkpoint.reading(saved)


def test_a_chunk_that_changes_after_the_checkpoint_was_opened_is_refused(saved: Path) -> None:
    """Those before it were given out."""
    chunks = checkpoint.reading(saved).chunks("t7")
    next(chunks)
    path = rows_file(saved)
    second = manifest.read(place_at(saved)).tables["t7"][1]
    content = bytearray(path.read_bytes())
    content[second.offset + second.size - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        next(chunks)
    path.write_bytes(content[: second.offset + 9])
    with pytest.raises(ValueError, match="checksum"):
        checkpoint.read(place_at(saved), second)


def test_a_save_that_raises_leaves_no_file(tmp_path: Path) -> None:
    """A table that cannot be read to its end: what was written of it goes."""

    def breaks() -> Iterator[Chunk]:
        yield chunk("t0", 0)
        raise RuntimeError("the server is gone")

    with (
        pytest.raises(RuntimeError, match="the server is gone"),
        checkpoint.writing(tmp_path) as writer,
    ):
        writer.chunks("t0", breaks())

    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_the_format_before_are_read(tmp_path: Path) -> None:
    """Each chunk is a file there.  Full ones, deltas and parts."""
    expected = dict.fromkeys(range(2 * ROWS), 1.0)
    for name in ("t0", "t1"):
        assert marks(OLD / "full", name) == expected
        assert marks(OLD / "delta", name) == expected | {ROWS: 2.0}
        assert marks(OLD / "joint", name) == expected
    assert checkpoint.reading(OLD / "joint").tensors()["model/w"].tolist() == [0.0, 1.0, 2.0]

    assert len(list((OLD / "full").glob("rows-*"))) == 4


def test_a_delta_may_continue_one_of_the_format_before(tmp_path: Path) -> None:
    """In its place and elsewhere; then all of its files go that no chain needs."""
    shutil.copytree(OLD, tmp_path / "job")
    path = tmp_path / "job" / "delta"
    expected = dict.fromkeys(range(2 * ROWS), 1.0)
    with checkpoint.writing(path, checkpoint.saved_in(path)) as writer:
        writer.chunks("t1", [chunk("t1", 0, 3.0, 1)])
        continued = writer.commit({})
    assert marks(path, "t1") == expected | {0: 3.0, ROWS: 2.0}
    with checkpoint.writing(tmp_path / "other", continued) as writer:
        writer.chunks("t1", [chunk("t1", 0, 4.0, 2)])
        writer.commit({})
    assert marks(tmp_path / "other", "t1") == expected | {0: 4.0, 1: 4.0, ROWS: 2.0}
    checkpoint.compact(path, tmp_path / "other")
    checkpoint.compact(path, path)
    checkpoint.compact(path, path)

    for place in (path, tmp_path / "other"):
        assert marks(place, "t1") == expected | {0: 3.0, ROWS: 2.0}
        assert not list(place.glob("rows-*.safetensors"))


@pytest.mark.parametrize("harm", ["changed", "torn", "missing"])
def test_a_damaged_one_of_the_format_before_is_refused(tmp_path: Path, harm: str) -> None:
    """As it was."""
    shutil.copytree(OLD, tmp_path / "job")
    path = sorted((tmp_path / "job" / "full").glob("rows-*"))[-1]
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] + b"!" if harm == "changed" else content[:-1])

    with pytest.raises(ValueError, match=f"{path.name}: .*(checksum|torn|missing)"):
        checkpoint.reading(tmp_path / "job" / "delta")
