"""Promises of checkpoints behind URLs: whole or refused, one writer, as on a disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Claims
from pserver.storage.local import InUse
from pserver.storage.place import place_at
from pserver.storage.remote import RemotePlace

OLD = {"w": torch.arange(6.0).reshape(2, 3)}
NEW = {"w": torch.arange(6.0).reshape(2, 3) + 1, "b": torch.ones(2)}


def save(url: str, step: int, claims: Claims | None = None) -> None:
    with checkpoint.writing(url, claims=claims) as writer:
        writer.tensors(OLD if step == 1 else NEW)
        writer.commit({"step": step})


def test_a_delta_and_its_base_are_in_one_store(url: str, tmp_path: Path) -> None:
    """Otherwise the delta could not name it; nothing is written."""
    base = checkpoint.save(url, OLD, {})

    with (
        pytest.raises(ValueError, match="expected a place in the store of"),
        checkpoint.writing(tmp_path / "delta", base),
    ):
        raise AssertionError("it does not begin")
    assert not (tmp_path / "delta").exists()


class Stopped(BaseException):
    """Stands for a process that stops."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_save_that_stops_at_any_call_of_the_store_leaves_the_old_or_the_new_one(
    url: str, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """As a killed process would leave it; the next save leaves no trace of it."""
    real = RemotePlace._call
    left = 0

    def stops(place: RemotePlace, call: Any) -> Any:
        nonlocal left
        left -= 1
        result = real(place, call) if after or left != 0 else None
        if left == 0:
            raise Stopped
        return result

    for at in range(1, 40):
        path = f"{url}/{at}"
        save(path, 1)
        left = at
        with monkeypatch.context() as patch:
            patch.setattr(RemotePlace, "_call", stops)
            patch.setattr(RemotePlace, "remove", lambda self, name: None)
            try:
                save(path, 2)
            except Stopped:
                ended = False
            else:
                ended = True
        loaded, meta = checkpoint.load(path)
        expected = OLD if meta["step"] == 1 else NEW
        assert loaded.keys() == expected.keys()
        if ended:
            assert at > 4 and meta == {"step": 2}
            return
        save(path, 3)
        assert checkpoint.load(path)[1] == {"step": 3} and len(place_at(path).names()) == 2
    pytest.fail("expected a save to end")


def test_two_jobs_behind_one_url_are_noticed_and_both_are_named(url: str) -> None:
    """A job that finds another checkpoint than the one it has seen there writes nothing; one whose
    checkpoint is replaced while it writes, neither.
    """
    first, second = Claims(), Claims()
    save(url, 1, first)
    save(url, 2, second)
    with pytest.raises(InUse, match="two jobs .* process [0-9]+ on .*, and process [0-9]+ on"):
        save(url, 3, first)
    with (
        pytest.raises(InUse, match="which has replaced the checkpoint meanwhile"),
        checkpoint.writing(url) as writer,
    ):
        writer.tensors(OLD)
        save(url, 4)
        writer.commit({"step": 5})

    assert checkpoint.load(url)[1] == {"step": 4} and len(place_at(url).names()) == 2


def test_a_job_that_has_loaded_saves_over_what_it_loaded(url: str) -> None:
    """And not over what another has put there since."""
    save(url, 1)
    claims = Claims()
    claims.saw(checkpoint.saved_in(url))
    save(url, 2, claims)
    save(url, 3)

    with pytest.raises(InUse):
        save(url, 4, claims)


@pytest.mark.processes
def test_s3_replaces_a_manifest_only_if_it_is_still_the_one_that_was_read(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the comparison and the write nobody can slip in: If-Match, If-None-Match."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    place = place_at("s3://bucket/race")
    assert isinstance(place, RemotePlace)
    real = RemotePlace.read

    def races(self: RemotePlace, name: str) -> bytes:
        found = real(self, name)
        self.write(name, b"another's")
        return found

    place.write("a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(RemotePlace, "read", races)
        assert not place.replace("a", b"mine", b"old")
    assert place.read("a") == b"another's"
    assert not place.replace("a", b"mine", None)
    with pytest.raises(FileExistsError):
        place._store.pipe_file("bucket/race/a", b"mine", mode="create")
    assert place.replace("a", b"mine", b"another's") and place.read("a") == b"mine"


MISSING = """
import sys
sys.modules["s3fs"] = None
from pserver.checkpoint import checkpoint
checkpoint.load("s3://user:sesame@bucket/job")
"""


@pytest.mark.processes
def test_a_missing_driver_is_an_error_that_names_its_package(tmp_path: Path) -> None:
    """And its extra, and fsspec's own words; the URL is without its password."""
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    last = done.stderr.splitlines()[-1]

    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert last == (
        "ImportError: s3://***@bucket/job: it needs s3fs: pip install '.[s3]' in a checkout of "
        "pserver brings it (Install s3fs to access S3)"
    )


def test_an_unknown_protocol_is_an_error() -> None:
    """And no folder."""
    with pytest.raises(ValueError, match="nowhere://x: Protocol not known: nowhere"):
        checkpoint.save("nowhere://x", OLD, {})


def test_a_store_that_refuses_is_an_os_error_that_names_the_url(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever class the driver's error has; the old checkpoint stays."""
    save(url, 1)
    place = place_at(url)
    assert isinstance(place, RemotePlace)

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("quota")

    with monkeypatch.context() as patch:
        patch.setattr(place._store, "put_file", refuses)
        with pytest.raises(OSError, match=f"{url}: RuntimeError: quota"):
            save(url, 2)

    assert checkpoint.load(url)[1] == {"step": 1} and len(place.names()) == 2


def rows(count: int) -> Iterator[dict[str, np.ndarray]]:
    """Chunks of 1 MB."""
    for number in range(count):
        ids = np.arange(number * 2**15, (number + 1) * 2**15)
        yield {"ids": ids, "values": np.stack([ids * 2, ids * 3, ids], 1).astype(np.float64)}


def test_rows_are_uploaded_in_blocks_and_read_in_chunks(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has parts of several chunks, and a chunk parts of several blocks."""
    monkeypatch.setattr("pserver.storage.remote.BLOCK_BYTES", 5 * 2**20)
    with checkpoint.writing(url) as writer:
        writer.chunks("emb", rows(12))
        writer.chunks("other", rows(1))
        writer.commit({})
    found = checkpoint.reading(url)

    assert len(place_at(url).names()) == 2
    for name, count in (("emb", 12), ("other", 1)):
        for chunk, expected in zip(found.chunks(name), rows(count), strict=True):
            assert all(np.array_equal(chunk[key], expected[key]) for key in expected)


def test_an_upload_that_is_given_up_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an object nor, on S3, the blocks of one; the old checkpoint stays."""
    monkeypatch.setattr("pserver.storage.remote.BLOCK_BYTES", 5 * 2**20)
    save(url, 1)

    def breaks() -> Iterator[dict[str, np.ndarray]]:
        yield from rows(12)
        raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="is gone"), checkpoint.writing(url) as writer:
        writer.chunks("emb", breaks())
    place = place_at(url)
    assert isinstance(place, RemotePlace)

    assert checkpoint.load(url)[1] == {"step": 1} and len(place.names()) == 2
    if url.startswith("s3"):
        assert place._store.list_multipart_uploads("bucket") == []


@pytest.mark.parametrize("call", ["open", "write", "close"])
def test_a_store_that_refuses_rows_is_an_os_error_that_names_the_url(
    url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """When the upload begins, goes on or ends; the old checkpoint stays."""
    save(url, 1)
    place = place_at(url)
    assert isinstance(place, RemotePlace)
    opened = place._store.open

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("quota")

    def opens(*args: Any, **kwargs: Any) -> Any:
        file = opened(*args, **kwargs)
        monkeypatch.setattr(file, call, refuses)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(place._store, "open", refuses if call == "open" else opens)
        with (
            pytest.raises(OSError, match=f"{url}: RuntimeError: quota"),
            checkpoint.writing(url) as writer,
        ):
            writer.chunks("emb", rows(1))
            writer.commit({})

    assert checkpoint.load(url)[1] == {"step": 1} and len(place.names()) == 2
