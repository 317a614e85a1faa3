"""Promises about formats: bytes become the numbers that Python reads in them, in every cut."""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from trainer.data.arrow import CsvLines, ParquetRows
from trainer.data.batches import Columns, Ragged, joined, samples_of
from trainer.data.formats import CriteoLines, Format, MultiSlotLines, format_of
from trainer.data.lines import WrongLine
from trainer.data.pieces import Piece, Slot, blocks_of, files_at, pieces_of
from trainer.data.text_kernels import rows_of
from trainer.nn.functional import string_ids

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
    csv.write_text("x,y\n" + "\n".join(f"{text},0" for text in texts))
    slots.write_text("\n".join(f"2 {text} 0.5" for text in texts))
    expected = np.array([float(text) for text in texts])

    (piece,) = CsvLines([Slot("x", "float64")]).pieces(str(csv))
    parsed = CsvLines([Slot("x", "float64")]).read(piece, skip=True)
    one = joined(parsed.blocks)["x"]
    two = read(MultiSlotLines([Slot("x", "float64", 2)]), slots, skip=True)["x"]

    finite = expected[np.isfinite(expected)]
    assert isinstance(one, np.ndarray) and isinstance(two, np.ndarray)
    assert np.ascontiguousarray(two[:, 0]).tobytes() == finite.tobytes()
    assert one.tobytes() == finite.tobytes() and parsed.wrong == len(expected) - len(finite) > 0
    assert parsed.first == f"{csv}, line 10: x: expected a number, got an infinity or a NaN"


def test_csv_takes_columns_by_name(tmp_path: Path) -> None:
    """A slot is the column of its name, or a group of columns; the others may hold anything."""
    path = tmp_path / "a.csv"
    path.write_text('a,note,b,"id"\n1.5,"x,""y"",z",2,-3\n,,4,18446744073709551615\n')
    slots = [Slot("id"), Slot("ab", "float32", 2)]

    found = read(CsvLines(slots, groups={"ab": ["a", "b"]}, fill={"ab": 0}), path)

    assert found["id"].tolist() == [-3, -1]
    assert found["ab"].tolist() == [[1.5, 2], [0, 4]]


def csv_of(text: str | bytes, slots: list[Slot], folder: Path, **settings: Any) -> Columns:
    """The samples that a format reads in these bytes; gzipped, they are the same."""
    path, form = folder / "a.csv", CsvLines(slots, **settings)
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    (folder / "a.csv.gz").write_bytes(gzip.compress(content))
    found, packed = read(form, path), read(form, folder / "a.csv.gz")
    assert all(np.array_equal(column, packed[name]) for name, column in found.items())
    counts = [form.count(piece, False) for piece in form.pieces(str(path))]
    assert sum(counts) == samples_of(found)
    return found


N, WORD = Slot("n"), Slot("word", "string")


@pytest.mark.parametrize(
    ("text", "words", "settings"),
    [
        ('word,n\na,1\n"b, c",2\n', ["a", "b, c"], {}),
        ('word,n\n"say ""hi""","1"\nb,2\n', ['say "hi"', "b"], {}),
        ('word,n\n"two\nlines",1\n"x\r\ny",2\n', ["two\nlines", "x\r\ny"], {}),
        ("word,n\n\n\na,1\n\nb,2\n\n", ["a", "b"], {}),
        ("word,n\r\na,1\r\nb,2\r\n", ["a", "b"], {}),
        ("word,n\ra,1\rb,2", ["a", "b"], {}),
        ("\ufeffword,n\na,1\nb,2", ["a", "b"], {}),
        ('\ufeff"a\nb",1\nc,2', ["a\nb", "c"], {"columns": ["word", "n"]}),
        ('"n","word"\n" 1","L\u00e4ufer"\n2,\u5382\u5546\n', ["L\u00e4ufer", "\u5382\u5546"], {}),
        ("word\tother\tn\na\t\t1\nb\t,\t2\n", ["a", "b"], {"delimiter": "\t"}),
        ("word|n\na|1\n'b|'|2\n", ["a", "b|"], {"delimiter": "|", "quote": "'"}),
        ('word;n\n"a;1\nb";2\n', ['"a', 'b"'], {"delimiter": ";", "quote": None}),
        ('5" disk,1\n"q"-7,2\n', ['5" disk', "q-7"], {"columns": ["word", "n"]}),
    ],
)
def test_csv_is_what_pyarrow_makes_of_it(
    text: str, words: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Quotes, delimiters and line breaks in them, blank lines, marks of the byte order, ends of
    lines; a text is the id of ``string_ids``.
    """
    found = csv_of(text, [N, WORD], tmp_path, **settings)

    assert found["word"].tolist() == string_ids(words).tolist()
    assert found["n"].tolist() == [1, 2]


def test_an_empty_field_is_filled_where_it_is_named(tmp_path: Path) -> None:
    """By its column, or its slot; a text becomes an id, the empty one too."""
    slots = [N, WORD, Slot("x", "float32", 2), Slot("words", "string", 2)]
    groups = {"x": ["x0", "x1"], "words": ["w0", "w1"]}
    fill = {"word": "", "x": -1, "x1": 0.5, "w1": "none", "n": 7}
    text = "n,word,x0,x1,w0,w1\n,,,,a,\n1,b,2,3,c,d\n"
    found = csv_of(text, slots, tmp_path, groups=groups, fill=fill)

    assert found["n"].tolist() == [7, 1]
    assert found["word"].tolist() == string_ids(["", "b"]).tolist()
    assert found["x"].tolist() == [[-1, 0.5], [2, 3]]
    words = string_ids([["a", "none"], ["c", "d"]]).tolist()
    assert found["words"].tolist() == words
    for wrong, kind, why in (
        (0.0, TypeError, "expected a dict .* no label and no id is filled unless it is named"),
        ({"y": 1}, ValueError, "no slot or column of use_var is 'y'"),
        ({"word": 1}, TypeError, "'word': expected text, got 1"),
        ({"n": 0.5}, TypeError, "'n': expected a whole number of 64 bits, got 0.5"),
        ({"n": 2**63}, TypeError, "'n': expected a whole number of 64 bits"),
        ({"x": "0"}, TypeError, "'x': expected a number, got '0'"),
        ({"x": None}, TypeError, "'x': expected a number, got None"),
        ({"x": math.nan}, TypeError, "'x': expected a number, got nan"),
        ({"x": 1e39}, TypeError, r"'x': expected a number, got 1e\+39"),
    ):
        with pytest.raises(kind, match=why):
            CsvLines(slots, groups=groups, fill=wrong)


def test_wrong_rows_have_their_lines_and_no_content(tmp_path: Path) -> None:
    """Also behind blank lines and fields with line breaks, and among rows of other lengths."""
    path = tmp_path / "a.csv"
    path.write_text('word,n\n\n"a\nb",1\nc,2,secret\n"d\ne",secret\n\nf,3\n')
    form = CsvLines([N, WORD])
    (piece,) = form.pieces(str(path))

    with pytest.raises(WrongLine) as raised:
        form.read(piece, skip=False)
    parsed = form.read(piece, skip=True)

    assert str(raised.value) == f"{path}, line 5: expected 2 fields with commas between them, got 3"
    assert parsed.first == str(raised.value) and parsed.wrong == 2 and parsed.samples == 2
    path.write_text('word,n\n\n"a\nb",1\n"d\ne",secret\n\nf,3\n')
    (piece,) = form.pieces(str(path))
    assert form.read(piece, skip=True).first == (
        f"{path}, line 5: n: expected a whole number of 64 bits, got text"
    )


@pytest.mark.parametrize("block", [64, 2**20])
def test_rows_are_numbered_over_blocks(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pyarrow divides at once; a row may be longer than that."""
    monkeypatch.setattr("trainer.data.arrow.BLOCK_BYTES", block)
    path, form = tmp_path / "a.csv", CsvLines([N, WORD])
    rows = [f"{number},{'w' * (number % 30)}w" for number in range(99)]
    rows[70], rows[80], rows[95] = "70,a,b", "x,y", "95"
    path.write_text("\n".join(["n,word", *rows]) + "\n")
    (piece,) = form.pieces(str(path))

    parsed = form.read(piece, skip=True)

    assert (parsed.wrong, parsed.samples) == (3, 96) and ", line 72: expected 2 " in parsed.first
    rows[70] = "70," + "long" * 100
    path.write_text("\n".join(["n,word", *rows]) + "\n")
    (piece,) = form.pieces(str(path))
    parsed = form.read(piece, skip=True)
    assert (parsed.wrong, parsed.samples) == (2, 97) and ", line 82: n: " in parsed.first
    assert joined(parsed.blocks)["word"].tolist()[70] == int(string_ids(["long" * 100])[0])


def test_line_breaks_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose begin has one is one piece, and read in blocks of whole rows; one that has one
    later is an error, unless it is said; and so is a quote that nothing closes.
    """
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (64,))
    monkeypatch.setattr("trainer.data.pieces.blocks_of.__defaults__", (16,))
    monkeypatch.setattr("trainer.data.arrow.LOOKED_AT", 40)
    path, slots = tmp_path / "a.csv", [N, WORD]
    words = [f"{n}\n" * (n % 4) + "," for n in range(50)]
    rows = [f'"{word}",{n}\n' for n, word in enumerate(words)]
    path.write_text("word,n\n" + "".join(rows))

    form = CsvLines(slots)
    (piece,) = form.pieces(str(path))
    found = joined(form.read(piece, False).blocks)

    assert found["word"].tolist() == string_ids(words).tolist()
    assert form.count(piece, False) == 50
    path.write_text("word,n\n" + "b,1\n" * 20 + "".join(rows))
    assert len(form.pieces(str(path))) > 1
    with pytest.raises(ValueError, match=r"a.csv, line 23: .* a quote, .*line_breaks=True"):
        read(form, path)
    assert samples_of(read(CsvLines(slots, line_breaks=True), path)) == 70
    path.write_text("word,n\n" + "".join(rows) + '"open,1\n')
    line = 1 + sum(1 + word.count("\n") for word in words)
    for skip in (False, True):
        with pytest.raises(ValueError, match=rf"a.csv, line {line + 1}: .* which nothing closes"):
            form.read(piece, skip)


def test_rows_are_those_of_pyarrow() -> None:
    """In texts of the bytes that matter, at random: as many, or the last one is open."""
    pyarrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    read_csv = pytest.importorskip("pyarrow.csv").read_csv
    rng, form, seen = random.Random(3), CsvLines([Slot("0", "string")], columns=["0"]), 0
    for _ in range(2000):
        text = "".join(rng.choices('"",\n\nab\r', k=rng.randint(1, 20))).encode() + b"\n"
        rows, cut, _, _ = rows_of(np.frombuffer(text, np.uint8), ord(","), ord('"'), -1)
        if cut == len(text):
            torn: list[Any]
            table, torn = form._table(text, 1, [0])
            assert rows == table.num_rows + len(torn), text
            seen += rows
    assert seen > 1000 and read_csv and pyarrow


@pytest.mark.parametrize("parser", ["csv", "multislot"])
def test_zstandard(parser: str, tmp_path: Path) -> None:
    """A file that ends in .zst is decompressed, also one of several frames; a torn one is named."""
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    path, form = tmp_path / "a.zst", format_of(parser, [N])
    parts = [b"n\n5\n", b"6\n"] if parser == "csv" else [b"1 5\n", b"1 6\n"]
    frames = [arrow.compress(part, "zstd", asbytes=True) for part in parts]
    path.write_bytes(b"".join(frames))

    assert read(form, path)["n"].tolist() == [5, 6]
    path.write_bytes(frames[0][:-3])
    with pytest.raises(OSError, match="a.zst"):
        read(form, path)


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
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
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
    with pytest.raises(WrongLine, match="a.parquet, row 1: ids: expected 1 value, got 2$"):
        read(format_of("parquet", [Slot("ids")]), path)


def test_texts_have_the_same_ids_in_each_format(tmp_path: Path) -> None:
    """Those of ``string_ids``: in CSV, in columns of Parquet of each type, also dictionaries and
    lists, and of what a function of the script gives.
    """
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    words = ["Nike", "", "L\u00e4ufer", "Nike", "x" * 300]
    expected, path = string_ids(words).tolist(), tmp_path / "a.parquet"
    column, slots = arrow.array(words), [Slot(name, "string") for name in "abcd"]
    packed = arrow.array([*words, None]).dictionary_encode().slice(1, 5)
    lists = arrow.array([words[:2], [], words[2:], [], []])
    table = {"a": column, "b": column.cast("large_binary"), "c": column.dictionary_encode()}
    parquet.write_table(arrow.table(table | {"d": packed, "list": lists}), path)

    form = ParquetRows([*slots, Slot("list", "string", None)], fill={"d": "none"})
    found = read(form, path)

    assert all(found[name].tolist() == expected for name in "abc")
    assert found["d"].tolist() == string_ids([*words[1:], "none"]).tolist()
    assert isinstance(found["list"], Ragged) and found["list"].values.tolist() == expected
    with pytest.raises(WrongLine, match="row 5: d: expected text, got a null; fill={'d'"):
        read(format_of("parquet", slots), path)
    with pytest.raises(ValueError, match="column 'a': expected whole numbers, got string"):
        read(format_of("parquet", [Slot("a")]), path)
    lines = tmp_path / "lines"
    lines.write_text("\n".join(words))
    given = format_of(
        lambda line: {"a": line, "two": [line, b"b"]}, [slots[0], Slot("two", "string", 2)]
    )
    found = read(given, lines)
    assert found["a"].tolist() == expected
    assert found["two"].tolist() == string_ids([[word, "b"] for word in words]).tolist()


def test_a_null_is_filled_where_it_is_named(tmp_path: Path) -> None:
    """Of each type; other nulls are wrong."""
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = {"i": [2**63 + 1, None], "x": [None, 1], "b": [None, True]}
    table = arrow.table({**columns, "i": arrow.array(columns["i"], arrow.uint64())})
    parquet.write_table(table, path)
    slots = [Slot("i"), Slot("x", "float32"), Slot("b")]

    found = read(ParquetRows(slots, fill={"i": 3, "x": 0.5, "b": 0}), path)

    assert [found[name].tolist() for name in "ixb"] == [[1 - 2**63, 3], [0.5, 1], [0, 1]]
    with pytest.raises(WrongLine, match="a.parquet, row 1: x: expected a number, got a null; fill"):
        read(ParquetRows(slots, fill={"i": 3, "b": 0}), path)
    parquet.write_table(arrow.table({"i": [None, None], "x": [1, 2]}), path)
    assert read(ParquetRows(slots[:1], fill={"i": 3}), path)["i"].tolist() == [3, 3]


INF, NAN = math.inf, math.nan
ROWS: list[tuple[Slot, list[Any], list[int], str]] = [
    (Slot("x", "float32"), [1, NAN, 2, INF], [0, 2], "a number, got an infinity or a NaN"),
    (Slot("x", "float32"), [1, 1e39, 2, -INF], [0, 2], "a number, got an infinity or a NaN"),
    (Slot("x", "float64", 2), [[1, 2], [1, NAN], [3, 4]], [0, 2], "a number, got an inf"),
    (Slot("x", "float64", None), [[], [1, NAN], [3]], [0, 2], "a number, got an inf"),
    (Slot("x", "float32", 2), [[1, 2], [1], [3, 4]], [0, 2], "2 values, got 1"),
    (Slot("x", "float32", None), [[1], None, []], [0, 2], "any number of values, got a null"),
    (Slot("x", width=None), [[1], [2, None], []], [0, 2], "a whole number of 64 bits, got a null"),
    (Slot("x"), [1, None, 3], [0, 2], "a whole number of 64 bits, got a null; fill={'x': ...}"),
    (Slot("x", "string"), ["a", None, ""], [0, 2], "text, got a null; fill={'x': ...}"),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "dictionary"])
@pytest.mark.parametrize(("slot", "values", "right", "why"), ROWS)
def test_a_wrong_row_is_named(
    slot: Slot, values: list[Any], right: list[int], why: str, packed: bool, tmp_path: Path
) -> None:
    """As a wrong line is: by file, row and reason; or it is left out, and counted, with what it has
    in other columns.
    """
    arrow = pytest.importorskip("pyarrow", reason="pserver[data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, column = tmp_path / "a.parquet", arrow.array(values)
    if packed and slot.width == 0:
        column = column.dictionary_encode()
    elif packed and slot.width == 2 and why[0] == "a":
        column = column.cast(arrow.list_(arrow.float64(), 2))
    table = arrow.table({"n": list(range(len(values))), "x": column})
    form = ParquetRows([Slot("n"), slot])
    for size in (1, 5):
        parquet.write_table(table, path, row_group_size=size)
        pieces = form.pieces(str(path))
        parsed = [form.read(piece, skip=True) for piece in pieces]
        found = joined([block for each in parsed for block in each.blocks])

        assert found["n"].tolist() == right  # type: ignore[union-attr]  # dense
        assert [form.count(piece, True) for piece in pieces] == [each.samples for each in parsed]
        assert sum(form.count(piece, False) for piece in pieces) == len(values)
        assert sum(each.wrong for each in parsed) == len(values) - len(right)
        assert sum((each.blocks for each in parsed), []) and len(found["x"]) == len(right)
        with pytest.raises(WrongLine) as raised:
            read(form, path)
        assert str(raised.value).startswith(f"{path}, row 2: x: expected {why}")
        assert str(raised.value) == next(each.first for each in parsed if each.first)


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


def nonfinite(line: str) -> dict[str, list[float]]:
    """A parser that gives what floats can be."""
    return {"x": [0.5, float(line)]}


RIGHT = criteo_line(random.Random(2))
FIELDS = RIGHT.split("\t")
SECRET = "s3cr3t"  # what a wrong line holds, and no message may have
X, REAL, MANY = (Slot("x"),), (Slot("x", "float32"),), (Slot("x", width=None),)
WRONG = [
    ("criteo", (), RIGHT, "2" + RIGHT[1:], "label: expected 0 or 1, got another number$"),
    ("criteo", (), RIGHT, RIGHT[1:], "label: expected 0 or 1, got an empty field$"),
    ("criteo", (), RIGHT, RIGHT + "\t1", "expected 40 fields with tabs between them, got 41"),
    ("criteo", (), RIGHT, SECRET, "expected 40 fields with tabs between them, got 1$"),
    (
        *("criteo", (), RIGHT, "\t".join([*FIELDS[:3], SECRET, *FIELDS[4:]])),
        "number 3: expected a whole number, got text$",
    ),
    (
        *("criteo", (), RIGHT, "\t".join([*FIELDS[:39], SECRET])),
        "category 26: expected at most 8 hexadecimal digits, got text$",
    ),
    ("csv", X, "1", "1.5", "x: expected a whole number of 64 bits, got another number$"),
    ("csv", X, "1", '""', "x: expected a whole number of 64 bits, got an empty field;"),
    ("csv", X, "1", "2e0", "x: expected a whole .* bits, got another number$"),
    (
        "csv",
        X,
        "1",
        "1 2",
        r"x: .*, got several in one field: .*Slot\('x', width=None\), .* function",
    ),
    *(
        (
            "csv",
            REAL,
            "1",
            many,
            "x: expected a number, got several in one field: lists are read in",
        )
        for many in ("1|2|3", '"[1, 2, 3]"', "[0.5]", "(1 2)", "7;8")
    ),
    *(
        ("csv", REAL, "1", other, "x: expected a number, got text$")
        for other in ('"1,5"', "[]", f"[1 {SECRET}]", f"1|{SECRET}", "2027-01-02 12:30")
    ),
    ("csv", X, "1", SECRET, "x: expected a whole number of 64 bits, got text$"),
    ("csv", X, "1", "18446744073709551616", "x: .*, got another number$"),
    ("csv", REAL, "1", "1e39", "x: .*, got an infinity or a NaN$"),
    ("csv", REAL, "1", " -Infinity", "x: expected a number, got an inf"),
    ("csv", REAL, "1", "1_000", "x: expected a number, got text$"),
    ("csv", (Slot("x", "string"),), "1", '""', r"x: expected text, got an empty .* fill=\{'x': "),
    (
        *("csv", (Slot("label", "float32"),), "1", '""'),
        "label: .* an empty field; a row without its label .*: on_error='skip' leaves it out; ",
    ),
    ("csv", X, "1", "1,2", "expected 1 fields with commas between them, got 2"),
    ("csv", REAL, "1", "1.2.3", "x: expected a number, got text$"),
    (
        "multislot",
        MANY,
        "1 5",
        "2 5",
        "slot 'x': .*, got 1 words after a larger count$",
    ),
    ("multislot", (Slot("x"), Slot("y")), "1 5 1 6", f"1 5 1 {SECRET}", "slot 'y': .*got text$"),
    ("multislot", (Slot("x"), Slot("y")), "1 5 1 6", "1 5", "slot 'y': .*got nothing$"),
    ("multislot", X, "1 5", "1 5 1 6", "expected 1 slots, got 2 words after them"),
    ("multislot", X, "1 5", "2 5 6", "slot 'x': .*got another count$"),
    ("multislot", X, "1 5", SECRET, "slot 'x': .*got text as the count$"),
    ("multislot", X, "1 5", "9" * 5000, "slot 'x': .*got another count$"),
    ("multislot", X, "1 5", "1 99999999999999999999", "slot 'x': .* 64 bits, got another number$"),
    ("multislot", X, "1 5", "1 5\x0b1", "slot 'x': .* 64 bits, got other bytes between them$"),
    ("multislot", REAL, "1 .5", "1.5", "slot 'x': .*, got another number as the count$"),
    ("multislot", REAL, "1 .5", "1 nan", "slot 'x': expected a finite number, got an inf.* NaN$"),
    ("multislot", REAL, "1 .5", "1 1e39", "slot 'x': expected a finite number, got an inf"),
    (
        *("multislot", (Slot("x", "float64", None), Slot("y")), "0 1 5", "2 3 -1e400 1 5"),
        "slot 'x': expected a finite number, got an infinity or a NaN$",
    ),
    (
        pairs,
        PAIRS,
        "1 5",
        f"1 {SECRET}",
        r"the parser raised ValueError in line \d+ of test_.*py$",
    ),
    (
        pairs,
        PAIRS,
        "1 5",
        "nan 5",
        "slot 'label': expected a finite number, got an inf",
    ),
    (pairs, PAIRS, "1 5", "1 9e99", "the parser raised ValueError"),
    (
        pairs,
        PAIRS,
        "1 5",
        "1 " + "9" * 30,
        "slot 'ids': expected whole numbers, got values",
    ),
    (pairs, PAIRS, "1 5", "1 \udcff", "expected a line in UTF-8, got other bytes$"),
    (nonfinite, (Slot("x", "float32", 2),), "1", "1e39", "slot 'x': expected a finite number, got"),
    (uneven, X, "1", "", "slot 'x': expected it in the parser's dict, got none$"),
    (uneven, X, "1", "list", "expected a dict or None from the parser, got list$"),
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
    """The message has the file, the line, what was expected and what was got, and nothing of what
    the line holds; or lines are left out, and counted.
    """
    monkeypatch.setattr("trainer.data.pieces.pieces_of.__defaults__", (most,))
    head = [slot.name for slot in slots] if parser == "csv" else []
    path = tmp_path / "day.txt"
    lines = [*head, right, right, wrong, right, wrong, right]
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    form = format_of(parser, slots)

    with pytest.raises(WrongLine, match=rf"{path}, line {3 + len(head)}: {why}") as raised:
        read(form, path)
    assert SECRET not in str(raised.value) and raised.value.__context__ is None
    assert "fill={'label'" not in str(raised.value)
    parsed = [form.read(piece, skip=True) for piece in form.pieces(str(path))]

    assert sum(each.wrong for each in parsed) == 2
    assert sum(each.samples for each in parsed) == 4


@pytest.mark.parametrize(
    ("text", "settings", "why"),
    [
        (
            "label\tn\n1\t2\n",
            {},
            r"got one field: .* tabs .*: parser='tsv', or .*delimiter='\\t'\)$",
        ),
        (
            "label;n\n1;2\n",
            {},
            r"got one field: .* semicolons .*: CsvLines\(slots, delimiter=';'\)$",
        ),
        ("label,n\n1,2\n", {"delimiter": "\t"}, "got one field: .* commas .*: parser='csv', or"),
        ("1|2\n", {"columns": ["label", "n"]}, "line 1: expected 2 .*, got 1: the .* bars between"),
        ("a,b\n", {"columns": ["label", "n", "x"]}, "line 1: expected 3 fields .*, got 2$"),
        ("labels\n1\n", {}, r"got 1 others \(one is 'labels'\): columns="),
    ],
)
def test_a_forgotten_delimiter_is_guessed(
    text: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """A line that is one field: the error has the delimiter that it seems to have, and no more."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    form = CsvLines([Slot("label", "float32"), N], **settings)

    with pytest.raises(ValueError, match=why):
        read(form, path)


@pytest.mark.parametrize("make", [CsvLines, ParquetRows, MultiSlotLines, CriteoLines])
def test_what_is_no_slot_is_shown_how_one_is_written(make: Any) -> None:
    """A name alone, a slot without a list round it, a text."""
    shown = r"as \[fleet.Slot\('label', 'float32'\)\], got .*: a slot has a column's name, a dtype"
    for given in (["label"], Slot("label"), "label", [Slot("n"), 7]):
        with pytest.raises(TypeError, match=shown):
            make(given)


def test_a_ragged_slot_is_shown_where_lists_are_read() -> None:
    """CSV has one value in a field."""
    with pytest.raises(ValueError, match="csv: slot 'x': expected a dense .*: lists are read in"):
        CsvLines(MANY)


def test_a_url_and_a_missing_file(tmp_path: Path) -> None:
    """Any URL of fsspec's is read; a file that is not there is named."""
    with fsspec.open("memory://data/a.txt", "wb") as file:
        file.write(b"1 5\n1 6\n")
    form = MultiSlotLines([Slot("x")])

    assert read(form, "memory://data/a.txt")["x"].tolist() == [5, 6]
    for missing in (tmp_path / "none", "memory://data/none"):
        with pytest.raises(FileNotFoundError, match="none"):
            read(form, missing)


def test_a_pattern_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their names, at URLs, too; a file of the very name is itself."""
    for name in ("b-1", "b-0", "c-0", "b-[0]"):
        (tmp_path / name).write_text("1 5\n")
        with fsspec.open(f"memory://globbed/{name}", "wb") as file:
            file.write(b"1 5\n")
    (tmp_path / "b-folder").mkdir()
    monkeypatch.chdir(tmp_path)

    assert files_at(["c-0", "b-?", "b-[0]"]) == ["c-0", "b-0", "b-1", "b-[0]"]
    assert files_at([f"{tmp_path}/b-*"]) == [
        f"{tmp_path}/{name}" for name in ("b-0", "b-1", "b-[0]")
    ]
    (first, *_) = found = files_at(["memory://globbed/b-?"])
    assert len(found) == 2 and read(MultiSlotLines([Slot("x")]), first)["x"].tolist() == [5]
    assert files_at(["https://host/a.csv?day=*"]) == ["https://host/a.csv?day=*"]
    with pytest.raises(FileNotFoundError, match="d-.: no file matches it"):
        files_at(["d-*"])


TORN: dict[str, tuple[str, bytes, str]] = {
    "gzip that ends early": (
        "a.gz",
        gzip.compress(b"1 5\n" * 1000)[:-12],
        "EOFError: Compressed file",
    ),
    "gzip without its sum": ("a.gz", gzip.compress(b"1 5\n")[:-4], "EOFError: Compressed file"),
    "gzip of another sum": ("a.gz", gzip.compress(b"1 5\n")[:-8] + bytes(8), "expected what gzip"),
    "no gzip": ("a.gz", b"1 5\n", "expected what gzip has made, got other bytes$"),
    "more behind gzip": ("a.gz", gzip.compress(b"1 5\n") + b"1 5\n", "expected what gzip has made"),
    "no byte of gzip": ("a.gz", b"", "expected compressed bytes, got an empty file"),
    "no xz": ("a.xz", b"1 5\n", ""),
    "no bzip2": ("a.bz2", b"1 5\n", ""),
    "no zip": ("a.zip", b"1 5\n", ""),
    "no zst": ("a.zst", b"1 5\n", "ZSTD decompress failed"),
    "no byte of zst": ("a.zst", b"", "expected compressed bytes, got an empty file"),
}


@pytest.mark.parametrize("what", TORN)
def test_torn_bytes_of_each_kind_are_said(what: str, tmp_path: Path) -> None:
    """Whatever compressed them, and where nothing is left of them; the message names the file, and
    quotes none of its bytes.
    """
    name, content, why = TORN[what]
    path = tmp_path / name
    path.write_bytes(content)
    for skip in (False, True):
        with pytest.raises(OSError, match=f"{name}: {why}") as raised:
            read(MultiSlotLines([Slot("x")]), path, skip)
        assert "1 5" not in str(raised.value)


@pytest.mark.parametrize("parser", ["csv", "multislot", "parquet"])
def test_a_folder_and_nothing_are_no_files(parser: str, tmp_path: Path) -> None:
    """Each is said with its path, and what to write for the files of a folder."""
    (tmp_path / "a.gz").mkdir()
    form = format_of(parser, [Slot("x")])
    for name in ("a", "a.gz"):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(IsADirectoryError, match=rf"{name}: expected a file.*{name}/\* names"):
            read(form, tmp_path / name)
        with pytest.raises(FileNotFoundError, match=f"none{name}: there is no such file$"):
            read(form, tmp_path / f"none{name}")


@pytest.mark.parametrize("text", ["9" * 300, f"1{'9' * 300}\n1\n", f'"{"9" * 300}\n\n"\n1\n'])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_no_line_is_endless(
    text: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no text, or a quote that nothing closes, fills no memory."""
    monkeypatch.setattr("trainer.data.pieces.LONGEST_LINE", 99)
    monkeypatch.setattr("trainer.data.arrow.LONGEST_LINE", 99)
    monkeypatch.setattr("trainer.data.pieces._AHEAD", 16)
    monkeypatch.setattr("trainer.data.pieces.blocks_of.__defaults__", (32,))
    path = tmp_path / f"a.csv{ending}"
    content = f"x\n1\n{text}".encode()
    path.write_bytes(gzip.compress(content) if ending else content)
    for skip in (False, True):
        with pytest.raises(ValueError, match=r"a.csv.*: expected (lines of at|fields that)"):
            read(CsvLines([Slot("x")]), path, skip)


@pytest.mark.parametrize(
    ("parser", "slots", "lines"),
    [
        ("csv", X, ["x", "1", "2"]),
        ("multislot", X, ["1 5", "1 6"]),
        ("criteo", (), [RIGHT, RIGHT]),
        (pairs, PAIRS, ["1 5", "0 6"]),
    ],
)
def test_a_mark_of_the_byte_order_is_no_part_of_a_line(
    parser: Any, slots: tuple[Slot, ...], lines: list[str], tmp_path: Path
) -> None:
    """In whatever format, and in whatever pieces."""
    form, path = format_of(parser, slots), tmp_path / "a"
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    for most in (1, 2, 5, 10_000):
        assert sum(form.read(piece, False).samples for piece in pieces_of(str(path), most)) == 2


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
        (b"s3cr3t\n1\n", "a.csv: expected one column 'x' in the first line, got 1 others: columns"),
        (b"X,y\n1,2\n", r"one column 'x' in the first line, got 2 others \(one is 'X'\): columns"),
        (b"x,y,x\n1,2,3\n", "a.csv: expected one column 'x' in the first line, got 2 of this name"),
        ("x,y\n1,2\n".encode("utf-16"), "a.csv: expected the columns' names in UTF-8, got other"),
        (b"\xe9,x\n1,2\n", "a.csv: expected the columns' names in UTF-8, got other"),
    ],
)
def test_a_wrong_head_is_said(tmp_path: Path, text: bytes, said: str) -> None:
    """With the file, also where wrong lines are left out."""
    path = tmp_path / "a.csv"
    path.write_bytes(text)

    with pytest.raises(ValueError, match=said) as raised:
        read(CsvLines([Slot("x")]), path, skip=True)
    assert SECRET not in str(raised.value)


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
        ("arff", (), "expected one of criteo, csv, multislot, parquet, tsv, got 'arff'"),
        ("csv", (), "expected use_var"),
        ("csv", (Slot("x", width=None),), "expected a dense slot"),
        (lambda: CsvLines(X, delimiter="||"), (), r"delimiter: expected one character, got '\|\|'"),
        (lambda: CsvLines(X, delimiter=None), (), "delimiter: expected one character, got None"),  # type: ignore[arg-type]
        (lambda: CsvLines(X, quote="''"), (), "quote: expected one character or None, got"),
        (lambda: CsvLines(X, columns=["x", "x"]), (), "columns: expected 'x' once, got x, x"),
        (lambda: CsvLines(X, columns=["y"]), (), "columns: expected 'x' once, got y"),
        ("criteo", (Slot("x"),), "criteo: expected slots among"),
        ("multislot", (Slot("x", "string"),), "slot 'x': expected numbers, got 'string'"),
    ):
        with pytest.raises(ValueError, match=why):
            parser() if callable(parser) else format_of(parser, slots)
    with pytest.raises(TypeError, match="columns: expected the names of columns, got 'x'"):
        CsvLines(X, columns="x")
    with pytest.raises(TypeError, match="a function from a line to a dict, got int"):
        format_of(3, ())
    with pytest.raises(TypeError, match="slot 3: expected a column's name"):
        Slot(3)  # type: ignore[arg-type]
    for width in (1.5, True, "4"):
        with pytest.raises(TypeError, match="slot 'x': width: expected a whole number or None"):
            Slot("x", width=width)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: expected one of int64"):
        Slot("x", "int8")
    assert Piece("sftp://ann:sesame@host/a").shown == "sftp://***@host/a"
