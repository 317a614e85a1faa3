"""Promises of a server's own files: its tables are in them, whole, beside its slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.manifest import WholeTensor
from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, Refused
from pserver.job import job_files
from pserver.storage.local import DiskFile
from tests.support.held_servers import MEMBERS, plan, read, server, train


@pytest.mark.parametrize("memory_bytes", [None, 20_000], ids=["in memory", "in two tiers"])
def test_tables_are_saved_and_loaded_with_the_slices(
    tmp_path: Path, memory_bytes: int | None
) -> None:
    """Rows, their states, what waits and the steps taken: a server that loads them goes on as the
    one that saved them.
    """
    of = plan(memory_bytes=memory_bytes)
    first, second = server(of, tmp_path / "a", 5.0), server(of, tmp_path / "b")
    train(first, 6)
    train(second, 3, seed=9)  # rows that are not in the file go
    path = job_files.save(tmp_path / "saved", first, MEMBERS)
    job_files.load(path, second, MEMBERS)

    assert torch.equal(read(first), read(second)) and torch.equal(
        second.slices.held["w.block0"], torch.full((2,), 5.0)
    )
    train(first, 3, seed=2)
    train(second, 3, seed=2)
    assert torch.equal(read(first), read(second))
    assert [held.counters() for held in first.tables.values()][1] == [
        held.counters() for held in second.tables.values()
    ][1]
    assert (first.tables["emb"].counters().get("cold", 0) > 200) == (memory_bytes is not None)


def test_a_torn_file_or_another_plan_changes_nothing(tmp_path: Path) -> None:
    """A table's file that was cut off, and a plan with another rate: refused before a row or a
    slice is replaced.
    """
    first, second = server(plan(), tmp_path), server(plan(0.2), tmp_path)
    train(first, 2)
    path = job_files.save(tmp_path / "saved", first, MEMBERS)
    before = read(second)
    with pytest.raises(FingerprintMismatch):
        job_files.load(path, second, MEMBERS)
    assert torch.equal(read(second), before)
    train(first, 1, seed=3)
    now = read(first)
    torn = max(path.glob("rows-*"), key=lambda file: file.stat().st_size)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(Refused, match="torn"):
        job_files.load(path, first, MEMBERS)

    assert torch.equal(read(first), now) and first.slices.held["w.block0"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("given", ["../x", "a/../../x", "/etc", "out", "s3://b/x", "a::b://c"])
def test_no_path_leads_out_of_the_data_directory(tmp_path: Path, given: str) -> None:
    """Neither by dots, nor as an absolute one, nor over a link, nor by a URL."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(Refused, match="expected a path"):
        job_files.directory(str(root), given, 0)


@pytest.mark.parametrize(
    "given", ["../x", "a/../../x", "/etc", "s3://b/x", "a::b", "simplecache::s3://b/x", "..\\x"]
)
def test_no_path_leads_out_of_the_store(given: str) -> None:
    """A chain of URLs would read another store, with the server's rights."""
    with pytest.raises(Refused, match="expected a path"):
        job_files.directory(None, given, 0, "memory://jobs")


def test_a_server_saves_below_its_store(tmp_path: Path) -> None:
    """In a folder of its own, for each path that a caller names; "" is the prefix itself."""
    first, second = server(plan(), tmp_path / "a", 5.0), server(plan(), tmp_path / "b")
    train(first, 2)
    path = job_files.directory(None, "run/1", 1, f"memory://{tmp_path.name}/")
    assert path == f"memory://{tmp_path.name}/run/1/server-1"
    assert job_files.directory(None, "", 1, "memory://x") == "memory://x/server-1"

    job_files.load(job_files.save(path, first, MEMBERS), second, MEMBERS)

    assert torch.equal(read(first), read(second))


def test_a_file_that_continues_another_is_not_loaded(tmp_path: Path) -> None:
    """The other may lie anywhere."""
    saved = checkpoint.save(tmp_path / "secret", {"w": torch.ones(1)}, {})
    with checkpoint.writing(tmp_path / "data", saved) as writer:
        writer.commit({})

    with pytest.raises(Refused, match="that continues none outside"):
        job_files.load(tmp_path / "data", server(plan(), tmp_path), MEMBERS)


@pytest.mark.parametrize("deep", [False, True])
def test_a_save_with_a_part_elsewhere_is_not_loaded(tmp_path: Path, deep: bool) -> None:
    """Nor one with a part that itself has a part elsewhere: whose data would that be."""
    root = tmp_path / "root"
    part = checkpoint.save(tmp_path / "secret", {"w": torch.ones(1)}, {})
    for name in ("between", "data") if deep else ("data",):
        with checkpoint.writing(root / name) as writer:
            writer.parts([part], {"w": WholeTensor((1,), ((0, "w"),))})
            part = writer.commit({})

    with pytest.raises(Refused, match="has no part there, got .*secret"):
        job_files.load(root / "data", server(plan(), tmp_path), MEMBERS, str(root))


@pytest.mark.parametrize(
    "url", ["simplecache::s3://b/x", "data", "s3://", "s3:/b", "s3://b/../c", "file:///tmp/x"]
)
def test_a_store_is_one_url(url: str) -> None:
    """The message names the setting."""
    with pytest.raises(ValueError, match="store: expected"):
        ServerConfig(store=url)


def test_a_full_disk_refuses_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails in the middle of a table says so; loading gives the save before it."""
    first = server(plan(), tmp_path)
    train(first, 2)
    before = read(first)
    path = job_files.save(tmp_path / "saved", first, MEMBERS)
    train(first, 2, seed=4)

    def full(self: DiskFile, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "write", full)
        with pytest.raises(Refused, match="cannot save to .*No space left"):
            job_files.save(path, first, MEMBERS)
    job_files.load(path, first, MEMBERS)

    assert torch.equal(read(first), before)


def test_a_store_may_be_a_directory(tmp_path: Path) -> None:
    """That trainers reach, too: it takes the place of the data directory, and nothing leads out."""
    store = str(tmp_path / "shared")
    ServerConfig(store=store)
    job_files.check_place(None, store)

    assert job_files.place_of("/data", store) == store and (tmp_path / "shared").is_dir()
    assert job_files.directory("/data", "step-1", 2, store) == f"{store}/step-1/server-2"
    with pytest.raises(Refused, match="below the data directory"):
        job_files.directory(None, "../step-1", 2, store)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="store: .*file"):
        job_files.check_place(None, str(tmp_path / "file" / "store"))


@pytest.mark.parametrize(
    ("data_dir", "store", "told"),
    [
        (None, None, ""),
        ("/data", None, "/data"),
        ("/data", "s3://key:secret@bucket/jobs", "s3://***@bucket/jobs"),
    ],
)
def test_trainers_are_told_where_a_server_keeps_files(
    data_dir: str | None, store: str | None, told: str
) -> None:
    """Without the store's login."""
    assert job_files.place_of(data_dir, store) == told
