"""Files of bytes are read, or an error says why they have no sample: nothing reads as nothing."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import fleet
from trainer.data.arrow import CsvLines
from trainer.data.batches import Columns, Ragged, joined
from trainer.data.formats import CriteoLines, Format, format_of
from trainer.data.lines import LineFormat, WrongLine
from trainer.data.pieces import Piece, Slot, blocks_of, lines_before, pieces_of

ID = Slot("id")
CRITEO = "\t".join(["1", *["7"] * 13, *["ab"] * 26])
KINDS = [fleet.InMemoryDataset, fleet.QueueDataset]


def numbers(line: str) -> dict[str, int]:
    """A parser as a script writes it."""
    return {"id": int(line)}


def none(line: str) -> None:
    """A parser that leaves each line out."""


def table_csv() -> CsvLines:
    return CsvLines([Slot("id"), Slot("x", "float32")])


LINES: dict[str, tuple[Callable[[], LineFormat], list[str]]] = {
    "csv": (table_csv, ["id,x", *(f"{n},{n}.5" for n in range(9))]),
    "tsv": (
        lambda: CsvLines([ID], ["id", "word"], delimiter="\t"),
        [f"{n}\tw" for n in range(9)],
    ),
    "multislot": (lambda: format_of("multislot", [ID]), [f"1 {n}" for n in range(9)]),  # type: ignore[dict-item, return-value]
    "criteo": (CriteoLines, [CRITEO] * 9),
    "parser": (lambda: format_of(numbers, [ID]), [str(n) for n in range(9)]),  # type: ignore[return-value]
}


def read(form: Format, pieces: list[Piece]) -> Columns:
    return joined([block for piece in pieces for block in form.read(piece, False).blocks])


def same(one: Columns, other: Columns) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(column.values, other[name].values)  # type: ignore[union-attr]
        if isinstance(column, Ragged)
        else np.array_equal(column, other[name])  # type: ignore[arg-type]
        for name, column in one.items()
    )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("last", [False, True], ids=["open", "ended"])
@pytest.mark.parametrize("kind", LINES)
def test_the_end_of_a_line_is_of_three_kinds(
    kind: str, last: bool, packed: bool, tmp_path: Path
) -> None:
    """A line feed, both, or a carriage return alone, as old spreadsheets write it: the same
    samples, in whatever pieces.
    """
    make, lines = LINES[kind]
    form, found = make(), []
    for number, end in enumerate(("\n", "\r\n", "\r")):
        text = (end.join(lines) + end * last).encode()
        path = tmp_path / (f"{number}.gz" if packed else f"{number}")
        path.write_bytes(gzip.compress(text) if packed else text)
        found.append(read(form, form.pieces(str(path))))
        for most in (1, 7, 40, 10_000) if not packed else ():
            assert same(read(form, pieces_of(str(path), most)), found[-1])
    assert same(found[0], found[1]) and same(found[0], found[2])
    assert len(next(iter(found[2].values()))) == 9


def test_a_carriage_return_within_lines_is_none_of_their_ends(tmp_path: Path) -> None:
    """Where lines end with line feeds; also where a piece begins in a long line of them."""
    long = "a\rb" * 60_000
    text = f"first\n{long}\nlast\n".encode()
    path = tmp_path / "text"
    path.write_bytes(text)
    pieces = pieces_of(str(path), 50_000)
    assert b"".join(block for piece in pieces for block in blocks_of(piece)) == text
    assert lines_before(pieces[-1]) == 2


def test_a_wrong_line_between_carriage_returns_has_its_number(tmp_path: Path) -> None:
    """As in any other file."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,x\r1,2\r3,x\r")
    with pytest.raises(WrongLine, match=r"a\.csv, line 3: x: expected a number, got text"):
        read(table_csv(), table_csv().pieces(str(path)))


# ---- bytes, and no sample ----


def dataset(kind: Any, paths: list[Path], **settings: Any) -> list[Any]:
    """The batches of a dataset."""
    made = kind()
    made.init(**{"batch_size": 4, **settings})
    made.set_filelist([str(path) for path in paths])
    if kind is fleet.InMemoryDataset:
        made.load_into_memory()
    return list(made)


HEAD = "it has no line but the first, which names the columns"
SKIP = {"on_error": "skip"}
EMPTY: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "names of columns": ("a.csv", b"id,x\n", {"parser": table_csv()}, HEAD),
    "names without an end": ("a.csv", b"id,x", {"parser": table_csv()}, HEAD),
    "wrong csv": (
        *("a.csv", b"id,x\n1,y\n2,z\n", {"parser": table_csv(), **SKIP}),
        "no line is right; line 2: x: expected a number, got text",
    ),
    "wrong multislot": (
        *("a", b"2 7\n\n", {"use_var": [ID], **SKIP}),
        "no line is right; line 1: slot 'id': expected a count and 1 value",
    ),
    "wrong criteo": (
        *("a", b"\xef\xbb\xbf1,2\n", {"parser": "criteo", **SKIP}),
        "no line is right; line 1: expected 40 fields",
    ),
    "another encoding": (
        *("a", "1 7\n".encode("utf-16"), {"use_var": [ID], **SKIP}),
        "no line is right; line 1: slot 'id'",
    ),
    "nothing in gzip": (
        *("a.gz", gzip.compress(b""), {"use_var": [ID]}),
        "what is compressed there is empty",
    ),
    "names in gzip": ("a.csv.gz", gzip.compress(b"id,x\r\n"), {"parser": table_csv()}, HEAD),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", EMPTY)
def test_a_file_with_bytes_and_no_sample_is_an_error(what: str, kind: Any, tmp_path: Path) -> None:
    """It names the file, its bytes, and why; also beside another file that has samples."""
    name, content, settings, why = EMPTY[what]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match="bytes, and no sample: ") as raised:
        dataset(kind, [path], **settings)
    text = str(raised.value)
    assert text.startswith(f"{path}: {len(content)} bytes, and no sample: {why}")
    assert "set_filelist()" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [True, False])
def test_a_parquet_file_without_rows_is_an_error(kind: Any, groups: bool, tmp_path: Path) -> None:
    """Without a group of rows, or with one that is empty."""
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, table = tmp_path / "a.parquet", arrow.table({"id": arrow.array([], arrow.int64())})
    with parquet.ParquetWriter(path, table.schema) as writer:
        if groups:
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"a\.parquet: .*(expected rows|groups of rows are empty)"):
        dataset(kind, [path], parser="parquet", use_var=[ID])


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_may_be_empty_where_all_are(kind: Any, tmp_path: Path) -> None:
    """A file without a byte may lie beside others; a data set without a sample is an error, also
    where the script's own parser has left all lines out.
    """
    full, empty, left = tmp_path / "full", tmp_path / "empty", tmp_path / "left"
    full.write_text("1 1\n1 2\n")
    empty.touch()
    left.write_text("# a comment\n")
    assert len(dataset(kind, [full, empty], use_var=[ID])) == 1
    with pytest.raises(ValueError, match=r"expected samples in .*empty, got none"):
        dataset(kind, [empty], use_var=[ID])
    with pytest.raises(ValueError, match=r"expected samples in .*left, got none"):
        dataset(kind, [left], use_var=[ID], parser=none)


def test_counts_of_all_trainers_files_say_it_too(tmp_path: Path) -> None:
    """Where leases deal samples out, which are counted before the first is given."""
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    paths[0].write_text("id,x\n1,2\n")
    paths[1].write_text("id,x\n")
    made = fleet.QueueDataset()
    made.init(parser=table_csv())
    made.set_filelist([str(path) for path in paths])
    pieces = made.all_pieces()
    with pytest.raises(ValueError, match=r"b\.csv: 5 bytes, and no sample"):
        made.check_samples(pieces, list(made.counted(pieces)))
    made.check_samples(pieces, [1, 1])


# ---- what is said of wrong lines ----


def many(line: str) -> dict[str, list[int]]:
    """A parser that gives one number too few."""
    return {"ids": [2**62 + n for n in range(25)]}


def test_a_wrong_line_is_told_in_short_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By file, line and what is wrong, without what it holds; not at each pass again."""
    path = tmp_path / "a"
    path.write_text("x\ny\n")
    slots = [Slot("ids", width=26)]
    with pytest.raises(WrongLine) as raised:
        dataset(fleet.QueueDataset, [path], parser=many, use_var=slots)
    assert str(raised.value) == (f"{path}, line 1: slot 'ids': expected 26 values, got 25 values")

    path.write_text("1 1\n1 x\n")
    made = fleet.QueueDataset()
    made.init(use_var=[ID], on_error="skip")
    made.set_filelist([str(path)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert len(list(made)) == 1 and made.wrong_lines == 1
    assert [each.getMessage() for each in caplog.records] == [
        f"left out 1 wrong lines, the first: {path}, line 2: slot 'id': expected a count and "
        "1 value, each a whole number of 64 bits, got text"
    ]
