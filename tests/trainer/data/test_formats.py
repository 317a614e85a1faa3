"""Promises about formats: bytes become the numbers that Python reads in them, in every cut."""

from __future__ import annotations

import gzip
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from trainer.data.batches import Columns, Ragged, joined, samples_of
from trainer.data.formats import CriteoLines, CsvLines, Format, MultiSlotLines, format_of
from trainer.data.lines import WrongLine
from trainer.data.pieces import Piece, Slot, blocks_of, pieces_of

FLOATS = ["0", "-0.0", "1.5", ".25", "3.", "+7", "1e-3", "2.5E+10", "nan", "-inf", "1e400"]
FLOATS += ["0.1", "123456789.123456789", "9007199254740993", "3.14159265358979323846"]
FLOATS += ["1e23", "8.5e-24", "0.000000000000000000000000000001", "1" * 30, "0" * 30 + ".5"]


def criteo_line(rng: random.Random) -> str:
    """A line in which fields are missing."""
    numbers = [rng.choice(["", str(rng.randint(-9, 10**6))]) for _ in range(13)]
    categories = [rng.choice(["", f"{rng.getrandbits(32):08x}"]) for _ in range(26)]
    return "\t".join([rng.choice("01"), *numbers, *categories])


def criteo_by_hand(line: str) -> tuple[float, list[float], list[int]]:
    """The same fields, read by Python."""
    label, *fields = line.split("\t")
    ids = [int(field, 16) if field else 2**32 for field in fields[13:]]
    numbers = [float(field or 0) for field in fields[:13]]
    return float(label), numbers, [one + (place << 33) for place, one in enumerate(ids)]


def read(form: Format, path: Path | str, skip: bool = False) -> Columns:
    """All samples of a file."""
    return joined([b for piece in form.pieces(str(path)) for b in form.read(piece, skip).blocks])


def test_criteo_is_read_as_python_reads_it(tmp_path: Path) -> None:
    """Labels, numbers and ids are those of the fields, with either end of a line, and gzipped."""
    rng = random.Random(0)
    lines = [criteo_line(rng) for _ in range(200)]
    expected = [criteo_by_hand(line) for line in lines]
    plain, gzipped = tmp_path / "day_0", tmp_path / "day_0.gz"
    plain.write_bytes("\r\n".join(lines).encode())
    gzipped.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))

    for path in (plain, gzipped):
        found = read(CriteoLines(), path)

        assert found["label"].tolist() == [label for label, _, _ in expected]
        assert found["numbers"].tolist() == [numbers for _, numbers, _ in expected]
        assert found["ids"].tolist() == [ids for _, _, ids in expected]
        assert {c.dtype.name for c in found.values()} == {"float32", "int64"}


@pytest.mark.parametrize("most", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_every_line_is_in_one_piece(tmp_path: Path, most: int, end: str) -> None:
    """However a text is cut, the pieces' lines are the text's, in their order."""
    text = ("one\n\nthree is longer\n4\n5" + end).encode()
    path = tmp_path / "text"
    path.write_bytes(text)

    found = b"".join(block for piece in pieces_of(str(path), most) for block in blocks_of(piece, 3))

    assert found == text.removesuffix(b"\n") + b"\n"


def test_floats_are_exact(tmp_path: Path) -> None:
    """A float is what Python's float makes of its text, to the bit."""
    rng = random.Random(1)
    texts = FLOATS + [repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-320, 300)) for _ in range(500)]
    csv, slots = tmp_path / "a.csv", tmp_path / "a.txt"
    csv.write_text("x\n" + "\n".join(texts))
    slots.write_text("\n".join(f"2 {text} 0.5" for text in texts))
    expected = np.array([float(text) for text in texts])

    one = read(CsvLines([Slot("x", "float64")]), csv)["x"]
    two = read(MultiSlotLines([Slot("x", "float64", 2)]), slots)["x"]

    assert isinstance(one, np.ndarray) and isinstance(two, np.ndarray)
    assert one.tobytes() == expected.tobytes() == np.ascontiguousarray(two[:, 0]).tobytes()


def test_csv_takes_columns_by_name(tmp_path: Path) -> None:
    """A slot is the column of its name, or a group of columns; the others may hold anything."""
    path = tmp_path / "a.csv"
    path.write_text('a,note,b,"id"\n1.5,"x,""y"",z",2,-3\n,,4,18446744073709551615\n')
    slots = [Slot("id"), Slot("ab", "float32", 2)]

    found = read(CsvLines(slots, groups={"ab": ["a", "b"]}, fill=0), path)

    assert found["id"].tolist() == [-3, -1]
    assert found["ab"].tolist() == [[1.5, 2], [0, 4]]


def test_multislot_is_ragged(tmp_path: Path) -> None:
    """Each slot has as many values as its count says; a slot may be empty."""
    path = tmp_path / "part-0"
    path.write_text("2 7 8 1 0.5 1 1\n0  1 -2 1 0 \n3 1 2 3\t1 1e1 1 1\n")
    slots = [Slot("ids", width=None), Slot("weight", "float32", 1), Slot("label")]

    found = read(MultiSlotLines(slots), path)

    ids = found["ids"]
    assert isinstance(ids, Ragged)
    assert (ids.values.tolist(), ids.bounds.tolist()) == ([7, 8, 1, 2, 3], [0, 2, 2, 5])
    assert found["weight"].tolist() == [[0.5], [-2.0], [10.0]]
    assert found["label"].tolist() == [1, 0, 1]


def pairs(line: str) -> Mapping[str, Any] | None:
    """A parser as a script writes it; a line with # is a comment."""
    if line.startswith("#"):
        return None
    label, *ids = line.split()
    return {"label": float(label), "ids": [int(one) for one in ids]}


def uneven(line: str) -> Any:
    """A parser that gives no dict for a word, and another slot for an empty line."""
    if line.isalpha():
        return [line]
    return {"x": 1} if line else {"y": 1}


PAIRS = (Slot("label", "float32"), Slot("ids", width=None))


def test_a_parser_of_the_scripts_own(tmp_path: Path) -> None:
    """A function from a line to its slots' values is a format, too."""
    path = tmp_path / "a"
    path.write_text("1 5 6\n# no sample\n0\n")

    found = read(format_of(pairs, PAIRS), path)

    ids = found["ids"]
    assert isinstance(ids, Ragged) and found["label"].tolist() == [1, 0]
    assert (ids.values.tolist(), ids.bounds.tolist()) == ([5, 6], [0, 2, 2])


def test_parquet_has_lists(tmp_path: Path) -> None:
    """Columns by name, lists as ragged or dense slots; each group of rows is a piece."""
    arrow = pytest.importorskip("pyarrow", reason="pserver[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, slots = tmp_path / "a.parquet", [Slot("ids", width=None), Slot("x", "float32", 2)]
    table = arrow.table({"ids": [[1, 2], [], [3]], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]})
    parquet.write_table(table, path, row_group_size=2)

    form = format_of("parquet", slots)
    found = read(form, path)

    ids = found["ids"]
    assert isinstance(ids, Ragged) and len(form.pieces(str(path))) == 2
    assert (ids.values.tolist(), ids.bounds.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    assert found["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [form.count(piece, False) for piece in form.pieces(str(path))] == [2, 1]
    with pytest.raises(ValueError, match="row group 0, column 'ids': expected whole .* 1 value"):
        read(format_of("parquet", [Slot("ids")]), path)


def even(line: str) -> dict[str, int] | None:
    """A parser that leaves lines out."""
    return {"n": int(line)} if int(line) % 2 == 0 else None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("parser", "text", "skip", "samples"),
    [
        ("multislot", "1 5\n1 6\n1 7", False, 3),
        ("multislot", "1 5\n\n1 x\n1 7\n", True, 2),
        ("csv", "n,other\n5,a\n6,b\n", False, 2),
        ("csv", "n\n", False, 0),
        (even, "1\n2\n3\n4\n", False, 2),
    ],
)
def test_samples_are_counted_as_they_are_read(
    parser: Any, text: str, skip: bool, samples: int, packed: bool, tmp_path: Path
) -> None:
    """Piece by piece, with heads, wrong lines, and lines that a parser leaves out."""
    path, form = tmp_path / ("a.gz" if packed else "a"), format_of(parser, [Slot("n")])
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    pieces = [Piece(str(path))] if packed else pieces_of(str(path), 4)
    counts = [form.count(piece, skip) for piece in pieces]

    assert sum(counts) == samples
    assert counts == [form.read(piece, skip).samples for piece in pieces]


def test_parquet_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the error says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ImportError, match=r"pip install '.\[parquet\]'"):
        format_of("parquet", [Slot("ids")])


RIGHT = criteo_line(random.Random(2))
WRONG = [
    ("criteo", (), RIGHT, RIGHT.replace(RIGHT[0], "2", 1), "label: expected 0 or 1, got '2'"),
    ("criteo", (), RIGHT, RIGHT + "\t1", "expected 40 fields with tabs between them, got 41"),
    ("criteo", (), RIGHT, "", "expected 40 fields with tabs between them, got 1"),
    ("csv", (Slot("x"),), "1", "1.5", "x: expected a whole number of 64 bits, got '1.5'"),
    ("csv", (Slot("x"),), "1", "", "x: expected a whole number of 64 bits, got ''"),
    ("csv", (Slot("x"),), "1", "1,2", "expected 1 fields with commas between them, got 2"),
    ("csv", (Slot("x", "float32"),), "1", "1.2.3", "x: expected a number, got '1.2.3'"),
    ("multislot", (Slot("x", width=None),), "1 5", "2 5", "slot 'x': .*any number.*, got '2 5'"),
    ("multislot", (Slot("x"), Slot("y")), "1 5 1 6", "1 5 1 x", "slot 'y': .*got '1 x'"),
    ("multislot", (Slot("x"),), "1 5", "1 5 1 6", "expected 1 slots, got 2 words after them"),
    ("multislot", (Slot("x"),), "1 5", "1 99999999999999999999", "slot 'x': .* 64 bits"),
    ("multislot", (Slot("x", "float32"),), "1 .5", "1.5", "slot 'x': .*, got '1.5'"),
    (pairs, PAIRS, "1 5", "1 x", "ValueError: invalid literal"),
    (uneven, (Slot("x"),), "1", "", r"ValueError: slot 'x': expected it in \['y'\]"),
    (uneven, (Slot("x"),), "1", "list", r"TypeError: .* dict or None .*, got \['list'\]"),
]


@pytest.mark.parametrize("parser, slots, right, wrong, why", WRONG)
@pytest.mark.parametrize("most", [40, 10_000])
def test_a_wrong_line_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parser: Any,
    slots: tuple[Slot, ...],
    right: str,
    wrong: str,
    why: str,
    most: int,
) -> None:
    """The message has the file, the line, what was expected and what was got; or lines are left
    out, and counted.
    """
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (most,))
    head, path = (["x"] if parser == "csv" else []), tmp_path / "day.txt"
    lines = [*head, right, right, wrong, right, wrong, right]
    path.write_text("\n".join(lines) + "\n")
    form = format_of(parser, slots)

    with pytest.raises(WrongLine, match=rf"{path}, line {3 + len(head)}: {why}"):
        read(form, path)
    parsed = [form.read(piece, skip=True) for piece in form.pieces(str(path))]

    assert sum(each.wrong for each in parsed) == 2
    assert sum(each.samples for each in parsed) == 4


def test_a_url_and_a_missing_file(tmp_path: Path) -> None:
    """Any URL of fsspec's is read; a file that is not there is named."""
    with fsspec.open("memory://data/a.txt", "wb") as file:
        file.write(b"1 5\n1 6\n")
    form = MultiSlotLines([Slot("x")])

    assert read(form, "memory://data/a.txt")["x"].tolist() == [5, 6]
    for missing in (tmp_path / "none", "memory://data/none"):
        with pytest.raises(FileNotFoundError, match="none"):
            read(form, missing)


def test_torn_gzip_is_said(tmp_path: Path) -> None:
    """A compressed file that ends early is an error that names it."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"1 5\n" * 1000)[:-12])

    with pytest.raises(OSError, match="a.gz: "):
        read(MultiSlotLines([Slot("x")]), path)


def test_torn_bytes_of_each_kind_are_said(tmp_path: Path) -> None:
    """Whatever compressed them, and where nothing is left of them."""
    for ending, text in ((".xz", b"1 5\n"), (".bz2", b"1 5\n"), (".zip", b"1 5\n"), (".gz", b"")):
        path = tmp_path / f"a{ending}"
        path.write_bytes(text)

        with pytest.raises(OSError, match=f"a{ending}: "):
            read(MultiSlotLines([Slot("x")]), path)


@pytest.mark.parametrize("left", [0, 5, 25])
def test_a_file_that_becomes_shorter_is_said(tmp_path: Path, left: int) -> None:
    """Its lines are not missing in silence when it was cut into pieces, and then was written anew;
    and one that is gone is named.
    """
    path, form = tmp_path / "a.txt", MultiSlotLines([Slot("x")])
    path.write_bytes(b"1 5\n" * 10)
    pieces = pieces_of(str(path), 20)
    path.write_bytes((b"1 5\n" * 10)[:left])

    with pytest.raises(OSError, match=r"a.txt: expected \d+ more bytes: it has become shorter"):
        for piece in pieces:
            form.read(piece, skip=True)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="a.txt: there is no such file"):
        form.read(pieces[0], skip=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"y\n1\n", "a.csv: expected one column 'x', got the columns y"),
        (b"x,y,x\n1,2,3\n", "a.csv: expected one column 'x', got the columns x, y, x"),
        ("x,y\n1,2\n".encode("utf-16"), "a.csv: expected the columns' names in UTF-8, got b'"),
        (b"\xe9,x\n1,2\n", "a.csv: expected the columns' names in UTF-8, got b'"),
    ],
)
def test_a_wrong_head_is_said(tmp_path: Path, text: bytes, said: str) -> None:
    """With the file, also where wrong lines are left out."""
    path = tmp_path / "a.csv"
    path.write_bytes(text)

    with pytest.raises(ValueError, match=said):
        read(CsvLines([Slot("x")]), path, skip=True)


def test_no_count_is_beyond_its_line(tmp_path: Path) -> None:
    """Also one that only just is a number of 64 bits."""
    path, form = tmp_path / "a.txt", MultiSlotLines([Slot("x", width=None)])
    path.write_text(f"1 5\n{2**63 - 1}\n{2**63 - 1} 5\n{2**64 - 1} 5\n1 6\n")

    (parsed,) = (form.read(piece, skip=True) for piece in form.pieces(str(path)))

    assert parsed.wrong == 3 and parsed.samples == 2


def test_no_line_is_no_sample(tmp_path: Path) -> None:
    """An empty file has no sample."""
    path = tmp_path / "empty"
    path.write_bytes(b"")

    assert samples_of(read(CriteoLines(), path)) == 0
    assert math.isnan(float("nan")) and read(CsvLines([Slot("x")]), path) == {}


def test_wrong_settings_are_named() -> None:
    """What no format can be is said at once."""
    for parser, slots, why in (
        ("arff", (), "expected one of criteo, csv, multislot, parquet, got 'arff'"),
        ("csv", (), "expected use_var"),
        ("csv", (Slot("x", width=None),), "expected a dense slot"),
        ("criteo", (Slot("x"),), "criteo: expected slots among"),
    ):
        with pytest.raises(ValueError, match=why):
            format_of(parser, slots)
    with pytest.raises(TypeError, match="a function from a line to a dict, got int"):
        format_of(3, ())
    with pytest.raises(ValueError, match="dtype: expected one of int64"):
        Slot("x", "int8")
    assert Piece("sftp://ann:sesame@host/a").shown == "sftp://***@host/a"
