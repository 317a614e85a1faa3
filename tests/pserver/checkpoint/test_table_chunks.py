"""Promises of a checkpoint's tables: chunk by chunk, whole or refused.

For what chains of checkpoints add up to see test_chains.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Chunk, Saved
from pserver.checkpoint.manifest import FileChunk
from pserver.storage import plain_file
from pserver.storage.local import DiskFile
from pserver.storage.place import place_at
from pserver.undone import or_undone

DENSE = {"w": torch.arange(3.0)}


def chunk(ids: Iterable[int], mark: float) -> Chunk:
    """Rows whose values tell the id and the save that they are of."""
    own = np.array(list(ids), np.int64)
    values = np.stack([own + mark, own * mark], 1).astype(np.float32)
    return {"ids": own, "values": values, "state.sum": np.full((len(own), 1), mark, np.float32)}


def write(path: Path, chunks: Iterable[Chunk], base: Saved | None = None, step: int = 0) -> Saved:
    with checkpoint.writing(path, base) as writer:
        writer.tensors({"w": torch.full((3,), float(step))})
        writer.chunks("tables/emb", chunks)
        return writer.commit({"step": step})


def held(path: Path) -> dict[int, float]:
    """id -> the mark of the save that its row is of."""
    return {
        own: mark
        for part in checkpoint.reading(path).chunks("tables/emb")
        for own, mark in zip(part["ids"].tolist(), part["state.sum"][:, 0].tolist(), strict=True)
    }


def test_chunks_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Every column of every chunk, dtypes and shapes included, with the tensors and the metadata of
    the same checkpoint.
    """
    first = chunk([5, -3, 2**62], 1.0) | {
        "pushed": np.array([1.5, 2.5, 3.5]),
        "score": np.ones((3, 0), np.int32),
    }
    second = chunk([], 0.0) | {
        "waiting.ids": np.array([9, 8]),
        "waiting.counts": np.zeros(2, np.int32),
    }
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
