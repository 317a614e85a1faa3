"""Rows: text in Criteo's format, and TSV with strings, to columns, beside pyarrow's CSV reader and
Python's csv module.
"""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
from harness import Promise, Row, alternate, rows_of, timed

from trainer.data.arrow import CsvLines
from trainer.data.formats import CriteoLines, Format, in_parallel
from trainer.data.pieces import Slot

LINES, COPIES, THREADS = 200_000, 4, 2  # a file has so many lines so often: many pieces of 16 MB
SETTING = (
    f"{COPIES * LINES} lines of one file in memory's cache, about 180 MB; {THREADS} threads each"
)
ARROW = Promise("data/criteo text", "pyarrow's CSV reader", 0.7, setting=SETTING)
LOOPS = Promise(
    "data/criteo text, one thread", "csv and loops", 5, setting="20000 lines of one file; 1 thread"
)
STRINGS = Promise(
    "data/tsv with strings",
    "pyarrow's CSV reader",
    0.8,
    setting=f"{COPIES * LINES} lines of one file in memory's cache, about 150 MB: a label, 13 "
    f"numbers and 26 strings, which become ids here and stay strings there; {THREADS} threads each",
)
PROMISES = (ARROW, LOOPS, STRINGS)
DIGITS = 16


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """The rows that are wanted."""
    with tempfile.TemporaryDirectory() as folder:
        if ARROW in wanted:
            path = _repeated(_written(Path(folder) / "many", 2000 if tiny else LINES))
            calls = {"ours": _ours(path, THREADS), "pyarrow": _arrow(path)}
            yield from _row(ARROW, "pyarrow", calls, runs)
        if STRINGS in wanted:
            path = _repeated(_written(Path(folder) / "words", 2000 if tiny else LINES, _word))
            calls = {"ours": _ours(path, THREADS, _words()), "pyarrow": _arrow(path, '"')}
            yield from _row(STRINGS, "pyarrow", calls, runs)
        if LOOPS in wanted:
            path = _written(Path(folder) / "few", 200 if tiny else LINES // 10)
            calls = {"ours": _ours(path, 1), "loops": lambda: _loops(path)}
            yield from _row(LOOPS, "loops", calls, runs)


def _row(
    promise: Promise, baseline: str, calls: dict[str, Callable[[], object]], runs: int
) -> Iterator[Row]:
    medians = alternate({name: timed(call) for name, call in calls.items()}, runs)
    return rows_of({promise: baseline}, medians, "ours", runs)


def _category(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"


def _word(rng: random.Random) -> str:
    """Few words often, many seldom, of 4 to 15 bytes."""
    number = int(rng.paretovariate(0.3)) % 10**9
    return f"{rng.choice(('item', 'k', 'shop'))}-{number}"


def _written(path: Path, lines: int, category: Callable[[random.Random], str] = _category) -> Path:
    """Clicks as they come: a fifth of the fields is missing."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(lines):
            fields = [str(rng.randint(0, 1000)) for _ in range(13)]
            fields += [category(rng) for _ in range(26)]
            kept = [field if rng.random() > 0.2 else "" for field in fields]
            print(rng.choice("01"), *kept, sep="\t", file=file)
    return path


def _repeated(path: Path) -> Path:
    path.write_bytes(path.read_bytes() * COPIES)
    return path


def _words() -> CsvLines:
    names = [f"f{place}" for place in range(40)]
    numbers, words = Slot("numbers", "float32", 13), Slot("words", "string", 26)
    return CsvLines(
        [Slot("f0", "float32"), numbers, words],
        columns=names,
        delimiter="\t",
        groups={"numbers": names[1:14], "words": names[14:]},
        fill={"numbers": 0.0, "words": ""},
    )


def _ours(path: Path, threads: int, form: Format | None = None) -> Callable[[], object]:
    form = form or CriteoLines()
    pieces = form.pieces(str(path))
    return lambda: sum(parsed.samples for _, parsed in in_parallel(form, pieces, threads, False))


def _arrow(path: Path, quote: str | bool = False) -> Callable[[], object]:
    """The same columns, categories as text: their numbers are more work than this."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    pa.set_cpu_count(THREADS)
    names = [f"f{place}" for place in range(40)]
    kinds = {name: pa.float32() if place < 14 else pa.string() for place, name in enumerate(names)}
    options = (
        pa_csv.ReadOptions(column_names=names),
        pa_csv.ParseOptions(delimiter="\t", quote_char=quote),
        pa_csv.ConvertOptions(column_types=kinds),
    )
    return lambda: pa_csv.read_csv(str(path), *options)


def _loops(path: Path) -> object:
    """As a script does it: Python's csv, and a loop over the fields."""
    labels, numbers, ids = [], [], []
    with path.open(newline="") as file:
        for label, *fields in csv.reader(file, delimiter="\t"):
            labels.append(float(label))
            numbers.append([float(field or 0) for field in fields[:13]])
            ids.append([int(field, DIGITS) if field else 2**32 for field in fields[13:]])
    return np.array(labels), np.array(numbers, np.float32), np.array(ids)
