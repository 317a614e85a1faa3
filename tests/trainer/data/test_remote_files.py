"""Datasets at URLs: fsspec's memory, and S3 as moto's server has it; what is missing is named."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from trainer import fleet
from trainer.data.pieces import files_at, size_of

KINDS = [fleet.InMemoryDataset, fleet.QueueDataset]
ID = fleet.Slot("id")


def csv_of(numbers: range) -> bytes:
    return "".join(["id,word\n", *(f"{number},w {number}\n" for number in numbers)]).encode()


def zst(text: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    found: bytes = arrow.compress(text, "zstd", asbytes=True)
    return found


def write(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def read(kind: Any, files: list[str], place: tuple[int, ...] = (), **settings: Any) -> list[int]:
    """The samples of a trainer, in their order."""
    dataset = kind()
    dataset.init(**{"batch_size": 4, "use_var": [ID], "parser": "csv", **settings})
    dataset.set_filelist(files, *place)
    if kind is fleet.InMemoryDataset:
        dataset.load_into_memory()
    return [number for batch in dataset for number in batch["id"].tolist()]


PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("ending", PACKED)
def test_files_at_a_url_are_those_on_a_disk(
    url: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pattern of folders and names, in several pieces, and divided by rows; a store is asked
    anew by the next ``set_filelist``.
    """
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (40,))
    for day in range(2):
        text = csv_of(range(day * 10, day * 10 + 10))
        write(f"{url}/day={day}/part {day}.csv{ending}", PACKED[ending](text))
    pattern = f"{url}/day=*/part ?.csv{ending}"

    for kind in KINDS:
        assert read(kind, [pattern]) == list(range(20))
        parts = [read(kind, [pattern], (trainer, 3)) for trainer in range(3)]
        assert parts == [list(range(6)), list(range(6, 13)), list(range(13, 20))]
    late = f"{url}/day=2/part 2.csv{ending}"
    write(late, PACKED[ending](csv_of(range(20, 23))))
    assert files_at([pattern])[-1] == late and size_of(late) > 0
    assert read(fleet.QueueDataset, [pattern]) == list(range(23))


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_at_a_url(url: str, kind: Any) -> None:
    """In groups of rows, which several trainers divide."""
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    with fsspec.open(f"{url}/a.parquet", "wb") as file:
        parquet.write_table(arrow.table({"id": list(range(10))}), file, row_group_size=3)

    found = [read(kind, [f"{url}/*.parquet"], (part, 2), parser="parquet") for part in range(2)]

    assert found == [list(range(5)), list(range(5, 10))]


@pytest.mark.parametrize("parser", ["csv", "parquet"])
def test_what_is_not_at_a_url_is_named(url: str, parser: str) -> None:
    """A missing file, a pattern that nothing matches, a folder."""
    write(f"{url}/folder/part", b"id\n1\n")
    for path, kind, why in (
        ("none", FileNotFoundError, "none: there is no such file: is its bucket or host there"),
        ("none-*", FileNotFoundError, r"none-\*: no file matches it"),
        ("folder", IsADirectoryError, "folder: expected a file, got a folder: .*folder/\\* names"),
    ):
        with pytest.raises(kind, match=why):
            read(fleet.QueueDataset, [f"{url}/{path}"], parser=parser)


@pytest.mark.processes
def test_what_s3_says_names_the_url(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a missing bucket, of a name that no bucket has, and where nobody answers: always an
    OSError, without the password that the driver quotes.
    """
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    for path in ("s3://nowhere/a.csv", "s3://nowhere/a.parquet", "s3://nowhere/a-*.csv"):
        # a driver of 2025 finds nothing in a bucket that is not there
        with pytest.raises(FileNotFoundError, match=r"^s3://nowhere/a.*(bucket|matches it)"):
            read(fleet.QueueDataset, [path], parser=path[-7:].rpartition(".")[2])
    with pytest.raises(OSError, match=r"^s3://\*\*\*@bucket/a: ParamValidation") as raised:
        read(fleet.QueueDataset, ["s3://ann:sesame@bucket/a"])
    assert "sesame" not in str(raised.value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_RETRY_MODE", "standard")
    with pytest.raises(OSError, match=r"^s3://bucket/a: EndpointConnectionError"):
        read(fleet.QueueDataset, ["s3://bucket/a"])
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.processes
def test_pieces_fetch_little_more_than_their_bytes(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of S3, whose driver would fetch 50 MB beyond each piece."""
    core = pytest.importorskip("s3fs.core")
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (2**18,))
    monkeypatch.setattr("trainer.data.pieces._FETCHED", 2**15)
    fetched, fetch = list[int](), core.S3File._fetch_range

    def counted(file: Any, start: int, end: int) -> Any:
        fetched.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(core.S3File, "_fetch_range", counted)
    url = "s3://bucket/large"
    write(url, "".join(f"1 {number}\n" for number in range(120_000)).encode())

    assert read(fleet.QueueDataset, [url], parser="multislot") == list(range(120_000))
    assert size_of(url) <= sum(fetched) < 1.6 * size_of(url)


class Hosted(LocalFileSystem):
    """A file system whose paths have no host, as those of HDFS and SFTP."""

    protocol = "hosted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hosted://ann@host"))


def test_a_pattern_keeps_protocol_user_and_host(tmp_path: Any) -> None:
    """As it was written; a URL within a URL has no pattern."""
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    for name in ("b", "a"):
        (tmp_path / name).write_text("id\n1\n")
    where = f"hosted://ann@host{tmp_path}"

    assert files_at([f"{where}/?"]) == [f"{where}/a", f"{where}/b"]
    assert read(fleet.QueueDataset, [f"{where}/?"]) == [1, 1]
    with pytest.raises(ValueError, match="got a URL within a URL: list its files"):
        files_at([f"simplecache::file://{tmp_path}/?"])


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("s3:/bucket/a", "expected a path, or a URL with two slashes, got 's3:/bucket/a'"),
        ("s3://", "expected a path, or a URL with a name behind its slashes"),
        ("", "expected a path"),
        ("nowhere://a/b", "nowhere://a/b: Protocol not known: nowhere"),
    ],
)
def test_what_is_no_url_is_said_at_once(path: str, why: str) -> None:
    """By ``set_filelist``, before anything is read."""
    with pytest.raises(ValueError, match=why):
        fleet.QueueDataset().set_filelist([path])
