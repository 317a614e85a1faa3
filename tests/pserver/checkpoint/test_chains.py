"""Checkpoints in several places that continue one another are dictionaries, whatever is saved,
compacted or damaged meanwhile.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.checkpoint import Chunk, Saved
from pserver.checkpoint.manifest import MANIFEST, Manifest
from pserver.storage.place import Place, place_at

TABLES, PLACES = ("a", "b/c"), ("one", "two", "deep/three")
places = st.sampled_from(PLACES)
tables = st.sampled_from(TABLES)
ids = st.lists(st.integers(-20, 20) | st.just(2**62), max_size=8, unique=True)


@dataclass
class State:
    """The content of a checkpoint: by table and id, the mark of the save that a row, or a waiting
    id, is of.
    """

    mark: int
    rows: dict[str, dict[int, int]] = field(default_factory=dict)
    waiting: dict[str, dict[int, int]] = field(default_factory=dict)


def chunk(rows: Iterable[int], waiting: Iterable[int], removed: Iterable[int], mark: int) -> Chunk:
    """Rows whose values tell the id and the save."""
    own, waits = np.array([*rows], np.int64), np.array([*waiting], np.int64)
    made = {
        "ids": own,
        "values": np.stack([own + mark, own * mark], 1).astype(np.float32).reshape(-1, 2),
        "state.sum": np.full((len(own), 1), mark, np.float64),
        "waiting.ids": waits,
        "waiting.counts": np.full(len(waits), mark, np.int32),
    }
    return made | {"removed": np.array([*removed], np.int64)}


class Chains(RuleBasedStateMachine):
    """The files of each place, and the content of every checkpoint that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.scratch, self.root = pytest.MonkeyPatch(), tempfile.mkdtemp(), ""
        self.moves = 0
        self.states: dict[str, State] = {}  # by identity
        self.held: dict[str, Saved] = {}  # by place
        self.bases: list[Saved] = []
        self.mark = 0

    @initialize(url=st.booleans(), small=st.booleans())
    def begin(self, url: bool, small: bool) -> None:
        self.patch.setattr(os, "fsync", lambda file: None)  # for it see test_checkpoint_killed.py
        self.patch.setattr(checkpoint, "FILE_BYTES", 1000 if small else 2**32)
        self.root = f"memory://{uuid.uuid4().hex}" if url else f"{self.scratch}/first"

    def teardown(self) -> None:
        self.patch.undo()
        if "://" in self.root and fsspec.filesystem("memory").exists(self.root):
            fsspec.filesystem("memory").rm(self.root, recursive=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def links(self, name: str) -> list[Manifest]:
        """The checkpoint of a place and what it continues."""
        return list(manifest.chain(manifest.read(place_at(self.path(name)))))

    # ---- saves ----

    @rule(
        name=places,
        continues=st.integers(0, 3),
        written=st.lists(st.tuples(tables, ids, st.integers(0, 8), st.integers(0, 8)), max_size=5),
    )
    def save(
        self, name: str, continues: int, written: list[tuple[str, list[int], int, int]]
    ) -> None:
        """All, or what has changed since one of the last checkpoints; ids that the same save names
        twice are left out, and some that a chunk names wait, or have no row any more.
        """
        base = self.bases[-continues] if 0 < continues <= len(self.bases) else None
        reachable = {link.identity for each in self.held for link in self.links(each)}
        self.mark += 1
        state = State(self.mark)
        if base is not None:
            old = self.states[base.identity]
            state.rows = {table: dict(rows) for table, rows in old.rows.items()}
            state.waiting = {table: dict(waits) for table, waits in old.waiting.items()}
        chunks: dict[str, list[Chunk]] = {}
        named: set[tuple[str, int]] = set()
        for table, some, first, second in written:
            some = [each for each in some if (table, each) not in named]
            named.update((table, each) for each in some)
            rows, waits, gone = some[:first], some[first : first + second], some[first + second :]
            gone = gone if base is not None else []
            chunks.setdefault(table, []).append(chunk(rows, waits, gone, self.mark))
            for each in some:
                state.rows.setdefault(table, {}).pop(each, None)
                state.waiting.setdefault(table, {}).pop(each, None)
            state.rows.setdefault(table, {}).update(dict.fromkeys(rows, self.mark))
            state.waiting.setdefault(table, {}).update(dict.fromkeys(waits, self.mark))
        before = self.held.get(name)
        try:
            with checkpoint.writing(self.path(name), base) as writer:
                writer.tensors({"w": torch.full((3,), float(self.mark))})
                for table in TABLES:
                    writer.chunks(table, chunks.get(table, []))
                saved = writer.commit({"mark": self.mark})
        except ValueError as error:
            # only of a base that no place needed any more
            assert base is not None and base.identity not in reachable
            assert "is missing" in str(error) or "was replaced" in str(error)
            assert self.held.get(name) == before
            return
        self.states[saved.identity], self.held[name] = state, saved
        self.bases.append(saved)
        self.tidy(name)

    @precondition(lambda self: self.held)
    @rule(name=places, into=places)
    def compact(self, name: str, into: str) -> None:
        """The same state, which continues nothing."""
        if name not in self.held:
            with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
                checkpoint.compact(self.path(name), self.path(into))
            return
        state = self.states[self.held[name].identity]
        saved = checkpoint.compact(self.path(name), self.path(into))
        self.states[saved.identity], self.held[into] = state, saved
        self.bases.append(saved)
        assert len(self.links(into)) == 1
        self.tidy(into)

    def tidy(self, name: str) -> None:
        """Of this place's files those are left that some place's checkpoint needs."""
        there = place_at(self.path(name))
        needed = {MANIFEST}
        for each in self.held:
            for link in self.links(each):
                if link.place == there:
                    current = link.identity == self.held[name].identity
                    needed |= {*link.files}
                    needed |= set() if current else {f"checkpoint-{link.identity}.json"}
        left = {each for each in there.names() if each[:9] != "needed-by" and each[0] != "."}
        assert left == needed

    @precondition(lambda self: "://" not in self.root)
    @rule()
    def move(self) -> None:
        """All places together: they are named relative to one another."""
        self.moves += 1
        moved = f"{self.scratch}/moved-{self.moves}/all"
        os.makedirs(os.path.dirname(moved))
        os.makedirs(self.root, exist_ok=True)  # nothing may have been saved yet
        os.rename(self.root, moved)
        self.root, identities = moved, {name: each.identity for name, each in self.held.items()}
        self.held = {name: checkpoint.saved_in(self.path(name)) for name in self.held}
        assert {name: each.identity for name, each in self.held.items()} == identities
        self.bases = [*self.held.values()]

    # ---- what is held ----

    @precondition(lambda self: self.held)
    @rule(name=places, most=st.sampled_from([1, 5, 2**20]))
    def read(self, name: str, most: int) -> None:
        """In one pass or several."""
        if name not in self.held:
            with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
                checkpoint.reading(self.path(name))
            return
        saved, reader = self.held[name], checkpoint.reading(self.path(name))
        state = self.states[saved.identity]
        assert reader.saved == saved == checkpoint.saved_in(self.path(name))
        assert reader.meta == {"mark": state.mark} and reader.tables == [*TABLES]
        assert reader.tensors()["w"].tolist() == [float(state.mark)] * 3
        for table in TABLES:
            rows: dict[int, int] = {}
            waiting: dict[int, int] = {}
            for part in reader.chunks(table, most):
                marks = part["state.sum"][:, 0].astype(int)
                values = np.stack([part["ids"] + marks, part["ids"] * marks], 1)
                assert np.array_equal(part["values"], values.astype(np.float32))
                assert part.keys() >= {"waiting.ids"} and "removed" not in part
                found = dict(zip(part["ids"].tolist(), marks.tolist(), strict=True))
                assert not rows.keys() & found.keys()
                rows |= found
                waits = part["waiting.ids"].tolist()
                waiting |= dict(zip(waits, part["waiting.counts"].tolist(), strict=True))
            assert rows == state.rows.get(table, {}) and waiting == state.waiting.get(table, {})

    @precondition(lambda self: self.held)
    @rule(name=places, which=st.integers(0, 30), harm=st.integers(0, 3), data=st.data())
    def damage(self, name: str, which: int, harm: int, data: st.DataObject) -> None:
        """Any file of the chain: changed, cut, longer or gone; it is named before anything is given
        out, and the others are as they were.
        """
        if name not in self.held:
            return
        files = [
            (link.place, file)
            for link in self.links(name)
            for file in (self.manifest_of(link), *link.files)
        ]
        place, file = files[which % len(files)]
        content = place.read(file)
        at = data.draw(st.integers(0, len(content) - 1))
        flipped = bytes([content[at] ^ 1 << at % 8])
        changed = (content[:at] + flipped + content[at + 1 :], content[:at], content + b" ")
        write(place, file, None if harm == 3 else changed[harm])
        own = (place, file) == files[0]
        gone = FileNotFoundError if own and harm == 3 else ValueError
        with pytest.raises(gone) as caught:
            checkpoint.reading(self.path(name))
        write(place, file, content)
        assert str(place) in str(caught.value)
        assert own or file.endswith(".json") or file in str(caught.value)
        if not own:
            with pytest.raises(
                ValueError, match="torn|checksum|missing|replaced|not JSON|expected"
            ):
                raise caught.value
        self.read(name, 2**20)

    def manifest_of(self, link: Manifest) -> str:
        """The name that a manifest has now."""
        content = manifest.present(link.place)
        current = content is not None and manifest.identity_of(content) == link.identity
        return MANIFEST if current else f"checkpoint-{link.identity}.json"


def write(place: Place, file: str, content: bytes | None) -> None:
    """Writes a file as it is, or removes it, where nothing of ours would."""
    path: Any = f"{place}/{file}" if "://" in str(place) else Path(str(place)) / file
    if isinstance(path, Path):
        path.unlink() if content is None else path.write_bytes(content)
    elif content is None:
        fsspec.filesystem("memory").rm(path)
    else:
        fsspec.filesystem("memory").pipe(path, content)


test_chains_are_dictionaries = Chains.TestCase
