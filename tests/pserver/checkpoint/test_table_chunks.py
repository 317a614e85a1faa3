"""Promises of a checkpoint's tables: chunk by chunk, whole or refused; a chain reads as what it
adds up to.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.checkpoint import Chunk, Saved
from pserver.checkpoint.manifest import FileChunk, packed
from pserver.storage import plain_file
from pserver.storage.local import DiskFile
from pserver.storage.place import place_at
from pserver.undone import or_undone

DENSE = {"w": torch.arange(3.0)}


def chunk(
    ids: Iterable[int], mark: float, removed: Iterable[int] = (), waiting: Iterable[int] = ()
) -> Chunk:
    """Rows whose values tell the id and the save that they are of."""
    own = np.array(list(ids), np.int64)
    made: Chunk = {
        "ids": own,
        "values": np.stack([own + mark, own * mark], 1).astype(np.float32).reshape(-1, 2),
    }
    made["state.sum"] = np.full((len(own), 1), mark, np.float32)
    if list(waiting):
        made["waiting.ids"] = np.array(list(waiting), np.int64)
        made["waiting.counts"] = np.full(len(made["waiting.ids"]), int(mark), np.int32)
    if list(removed):
        made["removed"] = np.array(list(removed), np.int64)
    return made


def write(path: Path, chunks: Iterable[Chunk], base: Saved | None = None, step: int = 0) -> Saved:
    with checkpoint.writing(path, base) as writer:
        writer.tensors({"w": torch.full((3,), float(step))})
        writer.chunks("tables/emb", chunks)
        return writer.commit({"step": step})


def held(path: Path, most_ids: int = 1 << 20) -> dict[int, float]:
    """id -> the mark of the save that its row is of; every row's columns are checked on the way."""
    found: dict[int, float] = {}
    for part in checkpoint.reading(path).chunks("tables/emb", most_ids):
        for row, own in enumerate(part["ids"].tolist()):
            mark = part["state.sum"][row, 0]
            assert own not in found and np.array_equal(
                part["values"][row], np.float32([own + mark, own * mark])
            )
            found[own] = float(mark)
        assert "removed" not in part
    return found


def waiting(path: Path) -> dict[int, int]:
    parts = [
        part for part in checkpoint.reading(path).chunks("tables/emb") if "waiting.ids" in part
    ]
    return {
        own: count
        for part in parts
        for own, count in zip(part["waiting.ids"], part["waiting.counts"], strict=True)
    }


def test_chunks_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Every column of every chunk, dtypes and shapes included, with the tensors and the metadata of
    the same checkpoint.
    """
    first = chunk([5, -3, 2**62], 1.0) | {
        "pushed": np.array([1.5, 2.5, 3.5]),
        "score": np.ones((3, 0), np.int32),
    }
    second = chunk([], 0.0, waiting=[9, 8])
    with checkpoint.writing(tmp_path) as writer:
        writer.tensors(DENSE)
        assert writer.chunks("tables/emb", iter([first, second])) == 5
        assert writer.chunks("none", []) == 0
        saved = writer.commit({"step": 7})
    reader = checkpoint.reading(tmp_path)
    found = list(reader.chunks("tables/emb"))

    assert (
        reader.meta == {"step": 7}
        and reader.tables == ["tables/emb", "none"]
        and reader.saved == saved
    )
    assert torch.equal(reader.tensors()["w"], DENSE["w"]) and list(reader.tensors()) == ["w"]
    assert [set(part) for part in found] == [set(first), set(second)] and list(
        reader.chunks("none")
    ) == []
    for wrote, got in zip((first, second), found, strict=True):
        for name in wrote:
            assert got[name].dtype == wrote[name].dtype and np.array_equal(
                got[name], wrote[name]
            ), name
            assert got[name].flags.writeable
    with pytest.raises(KeyError, match="no table 'other'"):
        reader.chunks("other")


def test_memory_is_bounded_by_a_chunk(tmp_path: Path) -> None:
    """The next chunk is asked for when the one before was written, and read when the one before was
    given out.
    """
    sizes = []

    with checkpoint.writing(tmp_path) as writer:

        def chunks() -> Iterator[Chunk]:
            for begin in range(0, 30, 10):
                sizes.append(writer.size)
                yield chunk(range(begin, begin + 10), 1.0)

        writer.chunks("tables/emb", chunks())
        writer.commit({})
    reader = checkpoint.reading(tmp_path).chunks("tables/emb")
    next(reader)
    for path in tmp_path.glob("rows-*"):
        path.unlink()

    assert sizes[0] == 0 < sizes[1] == sizes[2] / 2
    with pytest.raises(ValueError, match="was there when the checkpoint was opened"):
        next(reader)


def test_a_chunk_whose_columns_differ_in_length_is_refused(tmp_path: Path) -> None:
    """A ValueError that names the column, and nothing of the checkpoint is left."""
    with pytest.raises(
        ValueError, match=r"values: expected 2 values, one for each id, got \[3, 2\]"
    ):
        write(
            tmp_path,
            [
                chunk([1], 1.0),
                chunk([1, 2, 3], 1.0) | {"ids": np.array([1, 2]), "state.sum": np.ones((2, 1))},
            ],
        )
    with pytest.raises(ValueError, match="expected int64"):
        write(tmp_path, [chunk([1, 2], 1.0) | {"ids": np.array([1, 2], np.int32)}])
    with pytest.raises(ValueError, match="each table once"), checkpoint.writing(tmp_path) as writer:
        writer.chunks("a", [])
        writer.chunks("a", [])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same", [True, False], ids=["in one directory", "in three"])
def test_a_chain_reads_as_what_it_adds_up_to(tmp_path: Path, same: bool) -> None:
    """The newest word about an id counts: a row, that it waits, or that it was removed; dense
    tensors are the newest ones.
    """
    paths = [tmp_path / ("job" if same else f"job-{index}") for index in range(3)]
    full = write(
        paths[0],
        [chunk(range(0, 6), 1.0, waiting=[20, 21]), chunk(range(6, 10), 1.0, waiting=[22])],
    )
    first = write(
        paths[1],
        [chunk([1, 2, 20], 2.0), chunk([11], 2.0, removed=[3, 4]), chunk([], 3.0, waiting=[21])],
        full,
        1,
    )
    assert held(paths[1]) == {0: 1, 1: 2, 2: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 11: 2, 20: 2}
    write(paths[2], [chunk([2, 3], 5.0, removed=[11, 9])], first, 2)
    reader = checkpoint.reading(paths[2])

    expected = {0: 1, 1: 2, 2: 5, 3: 5, 5: 1, 6: 1, 7: 1, 8: 1, 20: 2}
    assert held(paths[2]) == expected and waiting(paths[2]) == {21: 3, 22: 1}
    assert reader.meta == {"step": 2} and reader.tensors()["w"].tolist() == [2.0, 2.0, 2.0]
    assert held(paths[2], most_ids=2) == expected  # in several passes
    if not same:
        assert held(paths[0]) == dict.fromkeys(range(10), 1.0)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
def test_a_compacted_chain_continues_nothing(tmp_path: Path, in_place: bool) -> None:
    """It holds what the chain adds up to in one checkpoint, and the chain may go."""
    full = write(tmp_path / "full", [chunk(range(8), 1.0, waiting=[30])])
    write(tmp_path / "delta", [chunk([1, 9], 2.0, removed=[0])], full, 4)
    target = tmp_path / ("delta" if in_place else "whole")
    saved = checkpoint.compact(tmp_path / "delta", target)
    for path in (tmp_path / "full", tmp_path / "delta"):
        if path != target:
            for file in path.iterdir():
                file.unlink()

    assert held(target) == {1: 2, 9: 2} | dict.fromkeys(range(2, 8), 1.0) and waiting(target) == {
        30: 1
    }
    assert checkpoint.reading(target).meta == {"step": 4} and checkpoint.saved_in(target) == saved
    # manifest, tensors, rows
    assert manifest.read(place_at(target)).base is None and len(list(target.iterdir())) == 3


def test_a_base_that_is_gone_or_was_replaced_is_noticed(tmp_path: Path) -> None:
    """Loading or extending the delta raises and says which directory; before anything is
    written.
    """
    full = write(tmp_path / "full", [chunk([1, 2], 1.0)])
    delta = write(tmp_path / "delta", [chunk([1], 2.0)], full)
    os.rename(tmp_path / "full", tmp_path / "moved")
    with pytest.raises(
        ValueError, match="delta: it continues the checkpoint in .*full, and that is missing"
    ):
        checkpoint.reading(tmp_path / "delta")
    with pytest.raises(ValueError, match="and that is missing"):
        write(tmp_path / "second", [chunk([1], 3.0)], delta)
    other = write(tmp_path / "full", [chunk([7], 1.0)])
    with pytest.raises(
        ValueError, match=f"was replaced: expected identity {full.identity}, got {other.identity}"
    ):
        checkpoint.compact(tmp_path / "delta", tmp_path / "delta")
    with pytest.raises(ValueError, match="was replaced"):
        write(tmp_path / "second", [chunk([1], 3.0)], full)

    assert not (tmp_path / "second").exists() and checkpoint.saved_in(tmp_path / "delta") == delta


def test_a_base_whose_directory_is_saved_to_again_stays_for_its_deltas(tmp_path: Path) -> None:
    """While a delta continues it, from elsewhere or from the same directory; then the next save
    tidies it away.
    """
    full = write(tmp_path / "full", [chunk([1, 2], 1.0)])
    write(tmp_path / "delta", [chunk([1], 2.0)], full)
    for mark in (3.0, 4.0):
        write(tmp_path / "full", [chunk([5], mark)])

    assert held(tmp_path / "full") == {5: 4} and held(tmp_path / "delta") == {1: 2, 2: 1}
    write(tmp_path / "delta", [chunk([8], 6.0)])  # needs nobody any more
    write(tmp_path / "full", [chunk([5], 7.0)])
    assert held(tmp_path / "full") == {5: 7} and held(tmp_path / "delta") == {8: 6}
    assert (
        len(list((tmp_path / "full").iterdir())) == len(list((tmp_path / "delta").iterdir())) == 3
    )


def test_a_chain_in_one_directory_grows_and_ends_with_the_next_full_save(tmp_path: Path) -> None:
    """Each delta adds files and keeps those before it; a full save leaves three files."""
    saved = write(tmp_path, [chunk(range(4), 1.0)])
    for index in range(4):
        saved = write(tmp_path, [chunk([index], index + 2.0)], saved)
    assert held(tmp_path) == {0: 2, 1: 3, 2: 4, 3: 5}
    write(tmp_path, [chunk([1], 9.0)])

    assert held(tmp_path) == {1: 9} and len(list(tmp_path.iterdir())) == 3


def test_a_chain_may_be_moved_as_a_whole(tmp_path: Path) -> None:
    """Directories are named relative to one another."""
    full = write(tmp_path / "run" / "full", [chunk([1, 2], 1.0)])
    write(tmp_path / "run" / "deltas" / "a", [chunk([1], 2.0)], full)
    os.rename(tmp_path / "run", tmp_path / "kept")

    assert held(tmp_path / "kept" / "deltas" / "a") == {1: 2, 2: 1}


@pytest.mark.parametrize("of", ["full", "delta"])
@pytest.mark.parametrize("harm", ["torn", "changed", "missing", "manifest"])
def test_a_damaged_chain_is_refused_before_anything_is_given_out(
    tmp_path: Path, of: str, harm: str
) -> None:
    """A torn, changed or missing file of any checkpoint of the chain: a ValueError on opening."""
    full = write(tmp_path / "full", [chunk([1, 2], 1.0)])
    write(tmp_path / "delta", [chunk([1], 2.0)], full)
    (path,) = (tmp_path / of).glob("checkpoint.json" if harm == "manifest" else "rows-*")
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(
            content if harm == "changed" else content[:-4] if harm == "torn" else content[:40]
        )

    with pytest.raises(ValueError, match="torn|checksum|missing|replaced|not JSON"):
        checkpoint.reading(tmp_path / "delta")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tables", {"t": ["../x"]}, "each table's chunks in files that are listed"),
        ("tables", {"t": 3}, "each table's chunks in files that are listed"),
        ("base", {"path": "/etc", "identity": "ab"}, "a base's relative path"),
        ("base", {"path": "..", "identity": "../x"}, "a base's relative path"),
        ("base", "x", "a base's path and identity"),
    ],
)
def test_a_manifest_with_odd_tables_or_bases_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    """It raises and says what is wrong."""
    write(tmp_path, [chunk([1], 1.0)])
    found = json.loads((tmp_path / "checkpoint.json").read_text()) | {key: value}
    (tmp_path / "checkpoint.json").write_bytes(packed(found))

    with pytest.raises(ValueError, match=message):
        checkpoint.reading(tmp_path)


def test_many_layers_in_many_passes_equal_a_dictionary(tmp_path: Path) -> None:
    """Random histories of rows, waits and removals, merged in one pass and in several, against a
    dictionary.
    """
    random = np.random.default_rng(3)
    expected: dict[int, float] = {}
    saved = None
    for mark in range(1, 7):
        ids = random.choice(np.arange(-50, 50), 40, replace=False)
        rows, removed = ids[:25], ids[25:]
        expected = {own: m for own, m in expected.items() if own not in removed} | dict.fromkeys(
            rows.tolist(), float(mark)
        )
        saved = write(tmp_path, [chunk(rows[:10], mark), chunk(rows[10:], mark, removed)], saved)

    for most_ids in (1 << 20, 64, 7):
        assert held(tmp_path, most_ids) == expected


@pytest.mark.parametrize("call", [1, 2, 3, 7, 11])  # 2 pieces of tensors, 4 of a chunk
def test_a_full_disk_leaves_the_old_checkpoint_and_gives_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """An OSError while tensors, a chunk or the manifest are written: the old state is read, and no
    file of the new one is left.
    """
    full = write(tmp_path, [chunk([1, 2], 1.0)])
    before = sorted(path.name for path in tmp_path.iterdir())
    calls = 0

    def fails(write: Callable[[bytes], Any], content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            write(content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        write(content)

    grown, written = DiskFile.write, plain_file.write_bytes

    def write_bytes(path: Path, content: bytes) -> None:
        with or_undone(path.unlink):  # as the real one
            fails(partial(written, path), content)

    monkeypatch.setattr(plain_file, "write_bytes", write_bytes)
    monkeypatch.setattr(
        DiskFile, "write", lambda file, content: fails(partial(grown, file), content)
    )
    for base in (None, full):
        calls = 0
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, [chunk([1], 2.0), chunk([3], 2.0)], base)
        assert held(tmp_path) == {1: 1, 2: 1}
        assert [
            path.name
            for path in sorted(tmp_path.iterdir())
            if not path.name.startswith("checkpoint-")
        ] == before


def test_bytes_that_are_not_rows_are_refused(tmp_path: Path) -> None:
    """Bytes that pass the checksum and are no chunk raise a ValueError that names the file."""
    for content in (b"", b"what", b"\xff" * 64):
        (tmp_path / "rows").write_bytes(b"before" + content + b"behind")
        checksum = hashlib.blake2b(content, digest_size=16).hexdigest()

        with pytest.raises(ValueError, match="rows: expected a safetensors file"):
            checkpoint.read(place_at(tmp_path), FileChunk("rows", 6, len(content), checksum, 1))
